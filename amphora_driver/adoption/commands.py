# SPDX-License-Identifier: Apache-2.0
"""Commands that move load balancers of Octavia's provider `amphora` to this provider, and back.

Invariant: the commands record requests only, and a controller performs them. `plan` reads Octavia and changes nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from amphora_driver.adoption import records, survey
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.adoption.survey import Surveyor
from amphora_driver.cli.command import Command, Lister, Table, argument, operator_at_host
from amphora_driver.cli.formatting import Timestamp, Value
from amphora_driver.errors import AmphoraDriverError, RequestError, UnknownObject
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket

_IDS = argument("load_balancer", nargs="*", metavar="ID", help="Complete ids of load balancers in Octavia.")
_PROJECT = argument("--project", metavar="ID", help="All load balancers of this project with the provider amphora.")
_TAG = argument("--tag", metavar="TAG", help="All load balancers with this tag and the provider amphora.")
_ID = argument("load_balancer", metavar="ID", help="Complete id of the load balancer in Octavia.")
_HEAD = ("Load balancer", "Step", "Asked by", "Asked", "Since", "Ended", "Paused", "Reason")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return seconds


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


class PlanAdoption(Lister):
    """Show for each load balancer what an adoption would do, or why it is refused. Nothing changes."""

    arguments = (_IDS, _PROJECT, _TAG)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        octavia = OctaviaDatabase(self.app.conf.amp_adoption.octavia_connection)
        library = survey.connect_library(self.app.conf)
        catalogue = Catalogue(self.app.conf, self.app.database)
        surveyor = Surveyor(self.app.conf, self.app.database, catalogue, octavia, lambda: library)
        chosen = find_load_balancers(octavia, parsed_args)
        delay = float(self.app.conf.amp_adoption.remove_after)
        return ("Load balancer", "Step", "Action"), (row for one in chosen for row in self._rows(surveyor, one, delay))

    def _rows(self, surveyor: Surveyor, load_balancer_id: str, delay: float) -> Iterable[tuple[Any, ...]]:
        try:
            found = surveyor.survey(load_balancer_id, delay).plan
        except AmphoraDriverError as error:
            return [(load_balancer_id, "refused", Value(str(error)))]
        if found.refusals:
            return [(load_balancer_id, "refused", Value(one)) for one in found.refusals]
        return [(load_balancer_id, one.step.value, Value(one.text)) for one in found.actions]


class AdoptLoadBalancers(Command):
    """Move load balancers of Octavia's provider amphora to this provider.

    They keep id, VIPs and VIP ports. A controller starts them in the given order. A failure returns to the former
    amphorae and pauses the others.
    """

    arguments = (
        _IDS,
        _PROJECT,
        _TAG,
        argument(
            "--max-in-progress",
            type=_positive,
            default=1,
            metavar="N",
            help="Largest number of load balancers that are moved at the same time (default: 1).",
        ),
        argument(
            "--remove-after",
            type=_seconds,
            metavar="SECONDS",
            help="Seconds until the former amphorae are removed (default: [amp_adoption] remove_after).",
        ),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        octavia = OctaviaDatabase(self.app.conf.amp_adoption.octavia_connection)
        chosen = find_load_balancers(octavia, parsed_args)
        delay = parsed_args.remove_after
        delay = float(self.app.conf.amp_adoption.remove_after) if delay is None else delay
        request = partial(
            records.request_adoptions,
            load_balancer_ids=chosen,
            max_in_progress=parsed_args.max_in_progress,
            remove_after=delay,
            asked_by=operator_at_host(),
        )
        self.app.database.write(request)
        local_socket.wake_role(self.app.conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        self.app.stdout.write(f"Recorded: {len(chosen)}. Follow it with: amphoractl loadbalancer adopt list\n")


class ListAdoptions(Lister):
    """List adoptions with their step and reason."""

    arguments = (argument("--all", action="store_true", help="Also those that have ended."),)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        found = self.app.read(lambda c: records.list_adoptions(c, only_open=not parsed_args.all))
        return _HEAD, map(_row, found)


class PauseAdoptions(Command):
    """Start no further load balancer; those in progress continue."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:  # noqa: ARG002 - the interface of cliff
        number = self.app.database.write(partial(records.set_paused, paused=True))
        self.app.stdout.write(f"Paused: {number}.\n")


class ResumeAdoptions(Command):
    """Start the paused load balancers."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:  # noqa: ARG002 - the interface of cliff
        number = self.app.database.write(partial(records.set_paused, paused=False))
        self.app.stdout.write(f"Resumed: {number}.\n")


class RevertAdoption(Command):
    """Return a load balancer to its former amphorae, until these are removed."""

    arguments = (_ID,)

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        self.app.database.write(partial(records.request_revert, load_balancer_id=parsed_args.load_balancer))


def find_load_balancers(octavia: OctaviaDatabase, parsed_args: argparse.Namespace) -> list[str]:
    """Return the selected load balancers; raise an error without a selection, or if it selects none."""
    ids, project, tag = parsed_args.load_balancer, parsed_args.project, parsed_args.tag
    attempt = "select load balancers"
    if bool(ids) + bool(project) + bool(tag) != 1:
        raise RequestError(attempt, "exactly one of ID, --project and --tag is necessary")
    if ids:
        return list(dict.fromkeys(ids))
    found = octavia.find(project_id=project, tag=tag)
    if not found:
        raise UnknownObject(attempt, f"no load balancer of the provider amphora has {project or tag}")
    return found


def _row(one: records.Adoption) -> tuple[Any, ...]:
    step = f"{one.step.value} (revert)" if one.revert and one.ended_at is None else one.step.value
    times = (Timestamp(one.asked_at), Timestamp(one.step_at), Timestamp(one.ended_at))
    return (one.load_balancer_id, step, Value(one.asked_by), *times, "yes" if one.paused else "", Value(one.reason))
