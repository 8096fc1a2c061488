# SPDX-License-Identifier: Apache-2.0
"""Asking for fail-overs, as an operator.

Invariant: only rows are written, so that it works while every process is down; a controller does it as soon as there
is one. Octavia is told nothing: users can go on changing their load balancers meanwhile. What is being replaced
already, or is about to go, is refused with words and left as it is.
"""

from __future__ import annotations

import argparse
import getpass
import socket
import time
from typing import TYPE_CHECKING

import sqlalchemy as sa
from cliff.command import Command

from amphora_driver.cli import id_prefix
from amphora_driver.database.tables import amphora, work
from amphora_driver.errors import Conflict
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.queue import local_socket
from amphora_driver.store import failovers
from amphora_driver.store.requests import Op
from amphora_driver.store.spare_pools import ROLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# Characters the columns for this have.
_LONGEST_NAME = 128
_NEXT = (
    "A controller boots {them}, has {it} serve, and removes the old {ones} after that. What it does is shown by: "
    "amphoractl failover show {failover}"
)


class FailOverLoadBalancer(Command):
    """Replace every amphora of a load balancer, one after the other; Octavia's users are not kept from anything."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer, or its beginning.")
        _add_reason(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down, and say what happens next."""

        def begin(connection: sa.Connection) -> str:
            chosen = id_prefix.load_balancer(connection, parsed_args.load_balancer)
            doing = f"fail over load balancer {chosen}"
            _refuse_if_deleted(connection, doing, chosen)
            rows = _amphorae(connection, amphora.c.load_balancer_id == chosen)
            live = [row.id for row in rows if row.state != AmphoraState.RETIRING.value]
            if not live:
                goes_on = rows and _going_on(connection, chosen)
                raise Conflict(doing, goes_on or "it has no amphora yet: it is being created", "Wait for that.")
            return _begin(connection, chosen, live, parsed_args.reason)

        _write(self, begin)


class FailOverAmphora(Command):
    """Replace one amphora by a new one, or by a warm spare."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("amphora", metavar="ID", help="Id of the amphora, or its beginning.")
        _add_reason(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down, and say what happens next."""

        def begin(connection: sa.Connection) -> str:
            chosen = id_prefix.amphora_id(connection, parsed_args.amphora)
            doing = f"fail over amphora {chosen}"
            (row,) = _amphorae(connection, amphora.c.id == chosen)
            if row.role == ROLE:
                raise Conflict(doing, "it is a warm spare and serves nobody", "Its pool replaces what does not answer.")
            _refuse_if_deleted(connection, doing, row.load_balancer_id)
            if row.state == AmphoraState.RETIRING.value:
                raise Conflict(doing, _going_on(connection, row.load_balancer_id, chosen), "Wait for that.")
            return _begin(connection, row.load_balancer_id, [chosen], parsed_args.reason)

        _write(self, begin)


def _add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", default="an operator asked for it", help="Why, for the history.")


def _write(command: Command, begin: Callable[[sa.Connection], str]) -> None:
    said = command.app.database.write(begin)
    # A hint for this host; a controller of another one looks now and then.
    local_socket.wake_role(command.app.conf.queue.doorbell_dir, local_socket.CONTROLLER)
    command.app.stdout.write(said + "\n")


def _begin(connection: sa.Connection, load_balancer_id: str, amphora_ids: Sequence[str], reason: str) -> str:
    why = failovers.FailoverTrigger(cause=failovers.Cause.OPERATOR, reason=reason, asked_by=who())
    failovers.open_failovers(connection, load_balancer_id, amphora_ids, why, time.time())
    newest = max(row.id for row in failovers.list_open_failovers_of(connection, load_balancer_id))
    one = len(amphora_ids) == 1
    head = f"Amphora {amphora_ids[0]} is" if one else f"{len(amphora_ids)} amphorae ({', '.join(amphora_ids)}) are"
    words = {
        "them": "a new one or takes a warm spare" if one else "new ones or takes warm spares, one at a time",
        "it": "it" if one else "each",
        "ones": "one" if one else "ones",
    }
    return f"{head} to be replaced. {_NEXT.format(**words, failover=newest)}"


def _amphorae(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> Sequence[Any]:
    columns = (amphora.c.id, amphora.c.load_balancer_id, amphora.c.role, amphora.c.state)
    return connection.execute(sa.select(*columns).where(condition).order_by(amphora.c.created_at)).all()


def _refuse_if_deleted(connection: sa.Connection, doing: str, load_balancer_id: str) -> None:
    op = connection.execute(sa.select(work.c.op).where(work.c.load_balancer_id == load_balancer_id)).scalar()
    if op != Op.APPLY:
        raise Conflict(doing, "the load balancer is being deleted", "Nothing is to be done.")


def _going_on(connection: sa.Connection, load_balancer_id: str, amphora_id: str | None = None) -> str:
    """Which fail-over is in the way, in words."""
    rows = failovers.list_open_failovers_of(connection, load_balancer_id)
    mine = [row for row in rows if amphora_id in (None, row.amphora_id)]
    if not mine:
        return "it is being replaced already"
    ago = max(0.0, time.time() - mine[0].begun_at)
    cause = f"{mine[0].cause}: {mine[0].reason}" if mine[0].reason else mine[0].cause
    return f"it is being replaced already (fail-over {mine[0].id}, begun {ago:.0f} s ago because of {cause})"


def who() -> str:
    """The operating system's user, as well as it is known, in at most 128 characters.

    A process may run under a number that has no entry among the users.
    """
    try:
        return getpass.getuser()[:_LONGEST_NAME]
    except (KeyError, OSError):
        return "unknown"


def who_where() -> str:
    """The same, and on which host, in at most 128 characters."""
    return f"{who()}@{socket.gethostname()}"[:_LONGEST_NAME]
