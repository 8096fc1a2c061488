# SPDX-License-Identifier: Apache-2.0
"""The effect of a request on the recorded nodes, and the outcome of a request. Pure functions.

A request changes records only. The next plan computes the steps. So a request is applied once, in the transaction that
records its nodes, and its outcome is computed after each pass until it has ended.

* **Join.** A server that leaves, has left or has failed gets a new attempt. A serving server is not changed. A server
  that the source does not show yet may appear within the group's `join_timeout`. A group expects a limited number of
  such servers, because each one is a record that every pass reads. An UNHEALTHY server may recover within
  `join_timeout` after the request. Such a server may still boot: a group adds a server as soon as Nova shows it as
  ACTIVE, and Octavia may show its member as ONLINE until the first check has failed.
* **Leave.** A server that is neither shown nor recorded has no member in the pool: its leave succeeds, so that a caller
  can repeat a request after the deletion of the server. This is true for ids only: the leave of an unknown server with
  another text, for example a name, fails. A request that would leave fewer SERVING servers than the group's `minimum`
  is refused as a whole. A server that does not serve can always leave.
* **Count.** A request that names no server chooses `count` servers. A leave takes servers that are not leaving, first
  those that are FAILED or UNHEALTHY, then by the criterion. A join takes servers that are leaving or have left. If
  there are fewer than `count`, all of them are chosen. If there is none, the request is refused.
* **Sync.** The request changes nothing. It ends when none of the servers that it names is WAITING, JOINING or DRAINING.
  Without names it covers all servers of the group, also those that the source shows for the first time.

Nova's ids are in lower case. Some callers read the id of their machine in upper case, for example from its firmware;
the request then names the same server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

import msgspec

from amphora_cluster.candidates import choose
from amphora_cluster.members import GONE
from amphora_cluster.model import Criterion, Group, Node, NodeState, Request, RequestKind, Server
from amphora_cluster.plan import NOT_SHOWN, Moment

# Nova's server ids are UUIDs. The pattern also permits the ids of a stub of Nova.
SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_OPEN = frozenset({NodeState.WAITING, NodeState.JOINING, NodeState.DRAINING})
_FAULTY = (NodeState.FAILED, NodeState.UNHEALTHY)
# A request can name a server that the source of the group does not show yet. This is the maximum number of such servers
# in a group.
MOST_EXPECTED = 1000
NO_ID = "The group has no such server. Send the id that Nova shows, not the name."
NO_LOAD = "No server has metadata with its load, so least_loaded chooses the oldest one."
_LOAD = re.compile(r"[0-9]{1,12}([.][0-9]{1,12})?", re.ASCII)


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request.

    Args:
        request: with the chosen servers. If it was refused, it has ended and `refusal` is the reason.
        nodes: the changed records only. Empty after a refusal.
    """

    request: Request
    nodes: tuple[Node, ...] = ()


def apply_request(
    group: Group,
    request: Request,
    servers: tuple[Server, ...],
    nodes: tuple[Node, ...],
    now: float,
    rng: Random,
) -> Applied:
    """Record a request.

    Args:
        servers: all servers that the source of the group shows.
        nodes: all recorded nodes of the group.
        now: seconds since 1970.
    """
    shown = {server.id: server for server in servers if server.selected and server.status not in GONE}
    recorded = {node.server_id: node for node in nodes}
    named = tuple(dict.fromkeys(one.lower() for one in request.servers))
    if request.kind is RequestKind.SYNC:
        return Applied(request=msgspec.structs.replace(request, servers=named or tuple({**recorded, **shown})))
    if not named and request.count <= 0:
        return _refused(request, "The request names neither servers nor a count.", now)
    load = loads(group, tuple(shown.values()))
    chosen = named or _chosen(request, shown, recorded, rng, load)
    request = msgspec.structs.replace(request, servers=chosen)
    if not chosen:
        return _refused(request, f"The group has no server that can {request.kind.value}.", now)
    if request.kind is RequestKind.JOIN:
        if expected(nodes) + sum(one not in shown and one not in recorded for one in chosen) > MOST_EXPECTED:
            return _refused(request, f"The source of the group would have to show {MOST_EXPECTED} more servers.", now)
        changes = [_joining(one, one in shown, recorded.get(one), now) for one in chosen]
    else:
        if refusal := _below_minimum(group, chosen, recorded):
            return _refused(request, refusal, now)
        changes = [_leaving(one, one in shown, recorded.get(one), now) for one in chosen]
        unknown = [one for one in named if one not in shown and one not in recorded and not _is_id(one)]
        request = msgspec.structs.replace(request, outcome=dict.fromkeys(unknown, NO_ID))
        if not named and request.criterion is Criterion.LEAST_LOADED and not load:
            changes = [node and msgspec.structs.replace(node, reason=NO_LOAD) for node in changes]
    return Applied(request=request, nodes=tuple(node for node in changes if node))


def outcome(group: Group, request: Request, nodes: tuple[Node, ...], at: Moment) -> Request:
    """The request with the outcomes of the servers that have one, and the end of the last of them.

    Args:
        nodes: the records of a plan that was computed after the request was applied.
        at: the present time.
    """
    if request.ended_at is not None:
        return request
    recorded = {node.server_id: node for node in nodes}
    found = dict(request.outcome)
    open_states = _OPEN
    if request.kind is RequestKind.JOIN and at.elapsed(request.id, request.created_at) < group.join_timeout:
        open_states |= {NodeState.UNHEALTHY}
    for one in request.servers:
        if one not in found and (result := _result(request.kind, recorded.get(one), open_states)) is not None:
            found[one] = result
    ended = all(one in found for one in request.servers)
    return msgspec.structs.replace(request, outcome=found, ended_at=at.now if ended else None)


def awaits_recovery(request: Request, nodes: tuple[Node, ...]) -> bool:
    """Whether an open join waits for an unhealthy server."""
    unhealthy = {node.server_id for node in nodes if node.state is NodeState.UNHEALTHY}
    open_servers = set(request.servers) - request.outcome.keys()
    return request.kind is RequestKind.JOIN and request.ended_at is None and bool(unhealthy & open_servers)


def loads(group: Group, servers: tuple[Server, ...]) -> dict[str, float]:
    """The load of each server whose metadata states one, for the criterion `least_loaded`.

    No other public API has it for the owner of servers: Octavia has no statistics of single members, and Nova shows
    diagnostics to administrators only.
    """
    found = {one.id: one.metadata.get(group.load_metadata, "").strip() for one in servers if group.load_metadata}
    return {one: float(text) for one, text in found.items() if _LOAD.fullmatch(text)}


def expected(nodes: tuple[Node, ...]) -> int:
    """The number of servers that a join named before the source of the group shows them."""
    return sum(map(is_expected, nodes))


def is_expected(node: Node) -> bool:
    """Whether a join named the server, but the source does not show it yet: it has no members."""
    return node.state is NodeState.WAITING and node.reason == NOT_SHOWN and not node.leaving


def serving(nodes: tuple[Node, ...]) -> int:
    """The number of servers that count for the minimum of a group."""
    return sum(node.state is NodeState.SERVING and not node.leaving for node in nodes)


def _refused(request: Request, reason: str, now: float) -> Applied:
    failed = dict.fromkeys(request.servers, reason)
    return Applied(request=msgspec.structs.replace(request, refusal=reason, outcome=failed, ended_at=now))


def _chosen(
    request: Request, shown: Mapping[str, Server], recorded: Mapping[str, Node], rng: Random, load: Mapping[str, float]
) -> tuple[str, ...]:
    leaving = {one for one, node in recorded.items() if node.leaving}
    if request.kind is RequestKind.JOIN:
        outside = [server for one, server in shown.items() if one in leaving]
        return choose(outside, request.count, request.criterion, rng, load)
    inside = [server for one, server in shown.items() if one not in leaving]
    states = {one: node.state for one, node in recorded.items()}
    faulty = sorted((one for one in shown if states.get(one) in _FAULTY), key=lambda one: _FAULTY.index(states[one]))
    return choose(inside, request.count, request.criterion, rng, load, faulty)


def _below_minimum(group: Group, chosen: tuple[str, ...], recorded: Mapping[str, Node]) -> str:
    before = serving(tuple(recorded.values()))
    after = serving(tuple(node for one, node in recorded.items() if one not in chosen))
    if after == before or after >= group.minimum:
        return ""
    return f"{after} of {before} serving servers would stay. The minimum of the group is {group.minimum}."


def _joining(server_id: str, shown: bool, node: Node | None, now: float) -> Node | None:
    if node and not node.leaving and node.state is not NodeState.FAILED:
        return None
    return Node(server_id=server_id, state=NodeState.WAITING, since=now, reason="" if shown else NOT_SHOWN)


def _leaving(server_id: str, shown: bool, node: Node | None, now: float) -> Node | None:
    if node is None:
        return Node(server_id=server_id, state=NodeState.DRAINING, since=now, leaving=True) if shown else None
    if node.leaving and node.state is not NodeState.FAILED:
        return None
    return msgspec.structs.replace(node, state=NodeState.DRAINING, since=now, leaving=True, reason="")


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) is not None


def _result(kind: RequestKind, node: Node | None, open_states: frozenset[NodeState]) -> str | None:
    """The outcome of one server: an empty text, the reason of a failure, or None while it is open."""
    if node is None:
        return NOT_SHOWN if kind is RequestKind.JOIN else ""
    if kind is RequestKind.SYNC:
        return None if node.state in open_states else node.reason
    if kind is RequestKind.LEAVE:
        if not node.leaving:
            return "A later request joined the server again."
        return None if node.state in open_states else node.reason
    if node.leaving:
        return node.reason or "A later request removed the server."
    return None if node.state in open_states else node.reason
