# SPDX-License-Identifier: Apache-2.0
"""Commands that let servers join and leave, and the history of a group.

Invariant: a request is recorded before the command waits. An interrupted command does not stop the request.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from amphora_cluster.cli.definition import server_id
from amphora_cluster.cli.stores import GROUP, Stores, opened
from amphora_cluster.model import Criterion, Request, RequestKind
from amphora_driver.cli.command import Lister, ShowOne, Table, argument
from amphora_driver.cli.formatting import Profile, Timestamp, ValueList
from amphora_driver.errors import DeadlinePassed, RequestError

_LOOK_SECONDS = 0.25
_HEAD = ("ID", "Kind", "State", "Servers", "Created", "Ended", "Failed")
_EVENTS = ("Time", "Server", "State", "Reason")
_SERVERS = argument("server", type=server_id, nargs="*", metavar="SERVER", help="Ids of the servers.")
_WAIT = argument(
    "--wait",
    type=float,
    default=600.0,
    metavar="SECONDS",
    help="Longest time to wait for the end of the request (default: 600). 0 only records it.",
)
_COUNT = argument("--count", type=int, default=0, metavar="NUMBER", help="Choose this number of servers instead.")
_CRITERION = argument(
    "--criterion",
    choices=[one.value for one in Criterion],
    default=Criterion.RANDOM.value,
    help="The choice with --count (default: random). Unhealthy servers are chosen first. least_loaded needs a group "
    "with --load-metadata; otherwise it chooses the oldest one.",
)
_LIMIT = argument("--limit", type=int, default=100, metavar="NUMBER", help="Number of rows (default: 100).")


class _Ask(ShowOne):
    """Records a request and waits for its end."""

    kind: RequestKind

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Record the request; return it at its end.

        Raises:
            RequestError: the request was refused, or failed for a server.
            DeadlinePassed: it did not end in the time of --wait. It continues.
        """
        servers, count = tuple(parsed_args.server), getattr(parsed_args, "count", 0)
        if self.kind is not RequestKind.SYNC and bool(servers) is (count > 0):
            raise RequestError(f"let servers {self.kind.value}", "servers or --count is needed", "Give one of both.")
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            criterion = Criterion(getattr(parsed_args, "criterion", Criterion.RANDOM.value))
            request = Request(
                id="", group_id=group.id, kind=self.kind, servers=servers, count=count, criterion=criterion
            )
            made = stores.requests.add(request)
            return _shown(_ended(stores, made, parsed_args.wait) if parsed_args.wait > 0 else made)


class JoinServers(_Ask):
    """Let servers join the pool again; wait until their members serve.

    New servers join without a request. The command is for servers that have left on request, or failed.
    """

    kind = RequestKind.JOIN
    arguments = (GROUP, _SERVERS, _COUNT, _CRITERION, _WAIT)


class LeaveServers(_Ask):
    """Let servers leave the pool: wait until they are drained and removed.

    A request that would leave fewer serving servers than the minimum of the group is refused.
    """

    kind = RequestKind.LEAVE
    arguments = (GROUP, _SERVERS, _COUNT, _CRITERION, _WAIT)


class SyncGroup(_Ask):
    """Read servers and pool of a group now; wait until no server is joining or draining."""

    kind = RequestKind.SYNC
    arguments = (GROUP, _SERVERS, _WAIT)


class ListRequests(Lister):
    """List the requests of a group, newest first."""

    arguments = (GROUP, _LIMIT)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        """Return the rows."""
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            found = stores.requests.list_requests(group.id, parsed_args.limit)
        return _HEAD, [
            (
                *(one.id, one.kind.value, _state(one), ValueList(one.servers)),
                *(Timestamp(one.created_at), Timestamp(one.ended_at), Profile(_failures(one))),
            )
            for one in found
        ]


class ListEvents(Lister):
    """List the changes of the states of a group's servers, newest first."""

    arguments = (GROUP, _LIMIT)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        """Return the rows."""
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            found = stores.groups.list_events(group.id, parsed_args.limit)
        return _EVENTS, [(Timestamp(one.at), one.server_id, one.state, one.reason) for one in found]


def _ended(stores: Stores, request: Request, seconds: float) -> Request:
    """Wait for the end of a request, or raise the error of its end."""
    wanted, end = f"let servers {request.kind.value}", time.monotonic() + seconds
    while True:
        found = stores.requests.get(request.group_id, request.id)
        if found.ended_at is not None:
            break
        if time.monotonic() > end:
            happened = f"request {found.id} did not end in {seconds:g} s"
            raise DeadlinePassed(wanted, happened, "It continues: amphoractl group request list.")
        time.sleep(_LOOK_SECONDS)
    if found.refusal:
        raise RequestError(wanted, f"request {found.id} was refused: {found.refusal}")
    if failed := _failures(found):
        reasons = "; ".join(f"{server}: {reason}" for server, reason in failed.items())
        happened = f"{len(failed)} of {len(found.servers)} servers failed in request {found.id}: {reasons}"
        raise RequestError(wanted, happened.rstrip("."))
    return found


def _failures(request: Request) -> dict[str, str]:
    return {server: reason for server, reason in request.outcome.items() if reason}


def _state(request: Request) -> str:
    if request.ended_at is None:
        return "open"
    return "refused" if request.refusal else "failed" if _failures(request) else "succeeded"


def _shown(request: Request) -> dict[str, Any]:
    return {
        "ID": request.id,
        "Kind": request.kind.value,
        "State": _state(request),
        "Servers": ValueList(request.servers),
        "Created": Timestamp(request.created_at),
        "Ended": Timestamp(request.ended_at),
    }
