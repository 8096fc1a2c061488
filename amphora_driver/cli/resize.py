# SPDX-License-Identifier: Apache-2.0
"""The command that resizes a load balancer.

Invariant: the command records the request only. A controller performs it as soon as one runs. Octavia receives no
PENDING status, so users can change the load balancer meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from amphora_driver.cli import queries
from amphora_driver.cli.command import LOAD_BALANCER, Command, argument, operator_name
from amphora_driver.cli.formatting import escape_unprintable
from amphora_driver.errors import UnsupportedOption
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket
from amphora_driver.resize import Resizer, ResizeTarget
from amphora_driver.store.failovers import Cause, FailoverTrigger
from amphora_driver.store.resizes import Resize
from amphora_driver.validation.profile import changed_values

_SOURCE = "JSON|@FILE"


class ResizeLoadBalancer(Command):
    """Change flavor or availability zone of a load balancer: size, topology, zone, limits and time-outs.

    The given metadata replace the present metadata completely. A load balancer keeps its topology if the flavor names
    none. Octavia continues to show the original flavor and zone.
    """

    arguments = (
        LOAD_BALANCER,
        argument("--flavor", metavar=_SOURCE, help="Metadata of the new flavor (default: the present flavor)."),
        argument(
            "--availability-zone",
            metavar=_SOURCE,
            help="Metadata of the new availability zone (default: the present zone).",
        ),
        argument("--reason", metavar="TEXT", default="an operator asked for it", help="Reason, for the history."),
        argument("--dry-run", action="store_true", help="Check the request and show the changes; record nothing."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        flavor = _read_metadata("flavor", parsed_args.flavor)
        zone = _read_metadata("availability zone", parsed_args.availability_zone)
        if flavor is None and zone is None:
            raise UnsupportedOption("resize a load balancer", "neither --flavor nor --availability-zone is given")
        chosen = self.app.read(lambda c: queries.find_load_balancer_id(c, parsed_args.load_balancer))
        trigger = FailoverTrigger(cause=Cause.RESIZE, reason=parsed_args.reason, asked_by=operator_name())
        resizer = Resizer(self.app.conf, self.app.database, Catalogue(self.app.conf, self.app.database))
        target = ResizeTarget(flavor=flavor, zone=zone, trigger=trigger)
        if parsed_args.dry_run:
            self._say(resizer.preview(chosen, target))
            self.app.stdout.write("Nothing is recorded (--dry-run).\n")
            return
        self._say(resizer.record(chosen, target))
        local_socket.wake_role(self.app.conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        self.app.stdout.write(f"Follow it with: amphoractl loadbalancer history {chosen}\n")

    def _say(self, found: Resize) -> None:
        lines = [f"Load balancer {found.tree.id}:"]
        for name, (former, new) in changed_values(found.former.profile, found.tree.profile).items():
            lines.append(f"  {name}: {_value(former)} -> {_value(new)}")
        if found.replaced:
            lines.append(f"Amphorae to be replaced: {', '.join(found.replaced)}.")
        else:
            lines.append("No amphora is replaced: the amphorae receive a new configuration.")
        lines.append("Octavia continues to show the original flavor and availability zone.")
        self.app.stdout.write("\n".join(lines) + "\n")


def _read_metadata(what: str, given: str | None) -> dict[str, Any] | None:
    """Return metadata from the command line or, after @, from a file.

    Raise UnsupportedOption if the file cannot be read, or if the metadata are no JSON object.
    """
    if given is None:
        return None
    attempt = f"read the metadata of the {what}"
    try:
        text = Path(given[1:]).read_bytes() if given.startswith("@") else given.encode()
    except OSError as error:
        raise UnsupportedOption(attempt, f"the file cannot be read: {error}") from error
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UnsupportedOption(attempt, f"it is no JSON object: {error}") from error


def _value(value: object) -> str:
    """Return a value of a profile as text. If the profile has no value, the configuration applies."""
    if value is None:
        return "as configured"
    return escape_unprintable(", ".join(value) if isinstance(value, tuple) else str(getattr(value, "value", value)))
