# SPDX-License-Identifier: Apache-2.0
"""The command that resynchronizes load balancers with Octavia.

Invariant: the command records the request only. The provider agent performs the resync, at once or after its next
start.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import uuid
from typing import Any

import sqlalchemy as sa

from amphora_driver.cli import queries
from amphora_driver.cli.command import Lister, Table, argument, operator_at_host
from amphora_driver.cli.formatting import Timestamp, Value
from amphora_driver.database.tables import job
from amphora_driver.errors import RequestError, UnknownObject
from amphora_driver.queue import local_socket
from amphora_driver.store import resyncs

HEAD = ("Load balancer", "Asked", "Asked by", "Ended", "Outcome", "Detail")
_POLL_SECONDS = 0.2


class ResyncLoadBalancer(Lister):
    """Read load balancers from Octavia again, apply them, and report all statuses to Octavia again.

    Without ID and --all the command lists the results of earlier resyncs. A load balancer that is not recorded in the
    driver's database needs its complete id.
    """

    arguments = (
        argument("load_balancer", nargs="*", metavar="ID", help="Ids, or unique prefixes of ids."),
        argument("--all", action="store_true", help="All recorded load balancers."),
        argument(
            "--remove-unknown",
            action="store_true",
            help="Delete a load balancer that exists on one side only (Octavia or driver) from that side.",
        ),
        argument(
            "--wait", type=float, default=0.0, metavar="SECONDS", help="Seconds to wait for the result (default: 0)."
        ),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        prefixes, everything = parsed_args.load_balancer, parsed_args.all
        if prefixes and everything:
            raise RequestError("resynchronize", "both ids and --all are given", "Use one of them.")
        chosen = None
        if prefixes or everything:
            chosen = self.app.read(lambda connection: _find_ids(connection, prefixes))
            self._request(chosen, remove_unknown=parsed_args.remove_unknown)
        deadline = time.monotonic() + parsed_args.wait
        while True:
            rows = self.app.read(lambda connection: resyncs.list_resyncs(connection, chosen))
            if all(row.ended_at for row in rows) or time.monotonic() >= deadline:
                return HEAD, map(_row, rows)
            time.sleep(_POLL_SECONDS)

    def _request(self, chosen: list[str], *, remove_unknown: bool) -> None:
        database = self.app.database
        now, by = database.now(), operator_at_host()
        database.write(
            lambda connection: resyncs.request_resyncs(connection, chosen, now, by, remove_unknown=remove_unknown)
        )
        local_socket.wake_role(self.app.conf.amp_queue.socket_dir, local_socket.REPORTER)


def _find_ids(connection: sa.Connection, prefixes: list[str]) -> list[str]:
    """Return the ids with these prefixes, or all recorded ids without prefixes."""
    if prefixes:
        return sorted({_find_id(connection, prefix) for prefix in prefixes})
    query = sa.select(job.c.load_balancer_id).where(queries.IS_LOAD_BALANCER)
    return list(connection.execute(query.order_by(job.c.load_balancer_id)).scalars())


def _find_id(connection: sa.Connection, prefix: str) -> str:
    try:
        return queries.find_load_balancer_id(connection, prefix)
    except UnknownObject:
        # A complete id is accepted without a record, because a resync may name a load balancer that exists only in
        # Octavia.
        with contextlib.suppress(ValueError):
            if str(uuid.UUID(prefix)) == prefix:
                return prefix
        raise


def _row(row: Any) -> tuple[Any, ...]:
    times = (Timestamp(row.asked_at), Value(row.asked_by), Timestamp(row.ended_at))
    return (row.load_balancer_id, *times, row.outcome or "not done yet", Value(row.detail))
