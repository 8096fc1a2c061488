# SPDX-License-Identifier: Apache-2.0
"""The steps that make a pool match the servers of a group. A pure function.

Semantics, for each server:

* **Joining.** A server without members is WAITING until it is ACTIVE and has an address. Then its members join, and it
  is JOINING until all of them are ONLINE, or NO_MONITOR in a pool without monitor, and none has a pending change or the
  weight 0 of a drain. A member whose weight is 0 by definition of the group never becomes ONLINE: DRAINING counts for
  it. After `join_timeout` in one of these states the server is FAILED with the reason. A server in ERROR, and one with
  a conflict, is FAILED at once. The plan continues to join a failed server, and its members stay: it becomes SERVING as
  soon as the cause is gone.
* **Serving.** A status other than ACTIVE (SHUTOFF, ERROR, REBOOT) removes no member: the health monitor decides about
  traffic. If a member is in ERROR, the server is UNHEALTHY with time and reason. Only ERROR counts, because Octavia
  shows OFFLINE and NO_MONITOR for moments after changes, and a consumer of this state replaces servers.
* **Leaving by request.** The server is DRAINING: a DRAIN step sets weight 0, unless the weight is 0 already. The drain
  begins when no own member has another weight or a pending change. It ends after `drain_seconds`. With `drain_on_idle`
  it ends earlier if the listeners have no connection, but not within `Moment.statistics_age` seconds: an older number
  may not count a connection that was opened just before the drain. Then the members are removed, and the server is LEFT
  until it vanishes or joins by request. With `drain_seconds` 0 the members are removed at once. A leave that takes
  `join_timeout` longer than its drain is FAILED with the reason, and continues: it becomes LEFT when it succeeds. A
  leave is also FAILED while a foreign member has the server's address and port, because the server still receives
  requests.
* **Not selected.** A server that exists, but lost the tag, metadata or place in a list that selects it, drains as after
  a request. Then it is forgotten. It joins again if the selector selects it again.
* **Vanished.** A server that the source does not show, or shows as DELETED or SOFT_DELETED, answers no request any
  more. Its members are removed at once, also those of servers without a recorded state. Meanwhile it is DRAINING. If
  the source shows it again, it joins again, unless a request had removed it.
* **Repairs.** A member with another name, weight, monitor port or backup flag than wanted is changed back, but not
  while its server leaves. After a change of the address or of the group's ports, the new members join first. The old
  ones are removed when all new ones serve, or as soon as the old ones do not serve.
* **Conflicts.** A foreign member with the server's address and port makes the server FAILED. No member of this server
  joins, and the foreign member is not changed. A member that lost the group's tag is foreign, too.

A JOIN, DRAIN or REPAIR step can be repeated after a crash. A LEAVE step names the members that exist.

No limit compares two times: the clock may be set between them. `Moment.elapsed` states how long ago a recorded time is.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from amphora_cluster.members import ServerMembers, relate, unchanged
from amphora_cluster.model import (
    Group,
    Member,
    MemberChange,
    Node,
    NodeState,
    Plan,
    Pool,
    Server,
    Step,
    StepKind,
)

# Seconds until the next pass over a group while members are being added or drained.
WATCH_SECONDS = 1.0

NOT_SHOWN = "The source of the group does not show the server."
NOT_SELECTED = "The selector of the group does not select the server any more."

_SERVED = frozenset({NodeState.SERVING, NodeState.UNHEALTHY})


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a plan.

    Args:
        now: seconds since 1970, for the records.
        elapsed: seconds that have certainly elapsed since a recorded time of a server: too few rather than too many.
        statistics_age: maximum age in seconds of Octavia's statistics, which providers report at intervals.
    """

    now: float
    elapsed: Callable[[str, float], float]
    statistics_age: float


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one server needs.

    Args:
        node: its new record; None to forget it.
        again_at: time of the next look at it.
        outstanding: a change follows, also if there is no step now.
    """

    node: Node | None
    steps: tuple[Step, ...] = ()
    again_at: float | None = None
    outstanding: bool = False


def plan(group: Group, servers: tuple[Server, ...], pool: Pool, nodes: tuple[Node, ...], at: Moment) -> Plan:
    """Compare the servers of a group with the pool.

    Args:
        servers: all servers that the source of the group shows.
        pool: the pool with all its members, also foreign ones.
        nodes: the recorded states of the last pass, with the changes of requests since then.
        at: the present time.
    """
    related = relate(group, servers, pool)
    recorded = {node.server_id: _not_after(node, at.now) for node in nodes}
    # The plan contains all servers in the order of the source, and then the recorded servers that the source does not
    # show. Such a recorded server without members may not exist yet.
    ids = list(dict.fromkeys([*related, *recorded]))
    outcomes = [
        _one(group, pool, related.get(one) or ServerMembers(server_id=one, server=None), recorded.get(one), at)
        for one in ids
    ]
    steps = tuple(step for outcome in outcomes for step in outcome.steps)
    planned = tuple(outcome.node for outcome in outcomes if outcome.node)
    times = [outcome.again_at for outcome in outcomes if outcome.again_at is not None]
    return Plan(
        # Octavia refuses all changes while the load balancer is not ACTIVE, so the plan then has no steps.
        steps=steps if pool.changeable else (),
        nodes=planned,
        again_at=min(times, default=None),
        complete=not steps and not any(outcome.outstanding for outcome in outcomes),
    )


def _one(group: Group, pool: Pool, server: ServerMembers, node: Node | None, at: Moment) -> _Outcome:
    if server.server is None:
        return _vanished(group, server, node, at)
    if not server.server.selected:
        return _deselected(group, pool, server, node, at)
    if node and node.leaving:
        return _leaving(group, pool, server, node, at)
    return _wanted(group, pool, server, node, at)


# A server has vanished if Nova, or the Heat stack of the group, does not list it any more.


def _vanished(group: Group, server: ServerMembers, node: Node | None, at: Moment) -> _Outcome:
    if server.own:
        steps = (_leave(server.server_id, server.own),)
        if node is None:
            return _Outcome(node=None, steps=steps, again_at=at.now + WATCH_SECONDS)
        gone = node
        if node.state not in {NodeState.DRAINING, NodeState.FAILED}:
            gone = _moved(node, NodeState.DRAINING, NOT_SHOWN, at)
        return _watched(_overdue(group, gone, server.own, at), steps, at.now + WATCH_SECONDS)
    if node is None or node.leaving or node.state is not NodeState.WAITING or node.reason != NOT_SHOWN:
        return _Outcome(node=None)
    # A request may name a server that the source of the group does not show yet. After the time-out, the controller
    # forgets the server.
    return _timed(group, node, NodeState.WAITING, NOT_SHOWN, at)


# These functions handle servers that leave because of a request, or because the group's selector does not select them
# any more.


def _deselected(group: Group, pool: Pool, server: ServerMembers, node: Node | None, at: Moment) -> _Outcome:
    if not server.own:
        return _Outcome(node=None)
    node = node or Node(server_id=server.server_id, state=NodeState.DRAINING, since=at.now, reason=NOT_SELECTED)
    if node.state not in {NodeState.DRAINING, NodeState.FAILED}:
        node = _moved(node, NodeState.DRAINING, NOT_SELECTED, at)
    return _leaving(group, pool, server, node, at)


def _leaving(group: Group, pool: Pool, server: ServerMembers, node: Node, at: Moment) -> _Outcome:
    own = server.own
    if not own:
        return _Outcome(node=_removed(server, node, at))
    if node.state not in {NodeState.DRAINING, NodeState.FAILED}:
        node = _moved(node, NodeState.DRAINING, "", at)
    node, steps = _drain(node, own, at)
    ended, again_at = _drain_ended(group, pool, node, at)
    if ended or group.drain_seconds <= 0:
        steps = (_leave(server.server_id, own),)
    return _watched(_overdue(group, node, own, at), steps, again_at)


def _removed(server: ServerMembers, node: Node, at: Moment) -> Node:
    """The record of a leaving server without own members."""
    node = msgspec.structs.replace(node, drain_began_at=None)
    if server.conflict and node.state is not NodeState.LEFT:
        return _moved(node, NodeState.FAILED, f"The server still receives requests. {server.conflict}", at)
    return _moved(node, NodeState.LEFT, "", at)


def _drain(node: Node, own: tuple[Member, ...], at: Moment) -> tuple[Node, tuple[Step, ...]]:
    """Set weight 0, or record the time at which all members have it."""
    weighted = [member for member in own if member.weight]
    if weighted:
        changes = tuple(msgspec.structs.replace(unchanged(member), weight=0) for member in weighted)
        step = Step(kind=StepKind.DRAIN, server_id=node.server_id, members=changes)
        return msgspec.structs.replace(node, drain_began_at=None), (step,)
    if node.drain_began_at is None and not any(_pending(member) for member in own):
        node = msgspec.structs.replace(node, drain_began_at=at.now)
    return node, ()


def _drain_ended(group: Group, pool: Pool, node: Node, at: Moment) -> tuple[bool, float]:
    """Whether the members can be removed, and the time of the next look."""
    if node.drain_began_at is None:
        return False, at.now + WATCH_SECONDS
    # Seconds until the drain must end (`longest`), and seconds until it may end early (`earliest`).
    longest = group.drain_seconds - at.elapsed(node.server_id, node.drain_began_at)
    earliest = longest
    if group.drain_on_idle and pool.active_connections is not None:
        earliest = min(longest, longest - group.drain_seconds + at.statistics_age)
    if longest <= 0 or (earliest <= 0 and pool.active_connections == 0):
        return True, at.now + WATCH_SECONDS
    return False, at.now + min(longest, max(earliest, WATCH_SECONDS))


def _watched(node: Node, steps: tuple[Step, ...], again_at: float) -> _Outcome:
    """A failed leave is repeated in the poll interval only. The end of its drain is known."""
    poll = node.state is NodeState.FAILED and (steps or node.drain_began_at is None)
    return _Outcome(node=node, steps=steps, again_at=None if poll else again_at, outstanding=True)


def _overdue(group: Group, node: Node, own: tuple[Member, ...], at: Moment) -> Node:
    """A leave that takes too long is FAILED, and continues. The record keeps the begin of the drain."""
    limit = group.drain_seconds + group.join_timeout
    if node.state is NodeState.FAILED or at.elapsed(node.server_id, node.since) < limit:
        return node
    statuses = ", ".join(f"{member.id} in {member.provisioning_status}" for member in own)
    reason = f"{node.reason} The members were not drained and removed within {limit} s: {statuses}."
    return _moved(node, NodeState.FAILED, reason.strip(), at)


# The following functions handle servers that should serve. The functions above handle servers that leave the group.


def _wanted(group: Group, pool: Pool, server: ServerMembers, node: Node | None, at: Moment) -> _Outcome:
    before = node or Node(server_id=server.server_id, state=NodeState.WAITING, since=at.now)
    # The server should serve again. So the plan cancels an earlier drain and removes the start time of the drain.
    before = msgspec.structs.replace(before, drain_began_at=None)
    outcome = _judged(group, pool, server, before, at)
    return msgspec.structs.replace(outcome, steps=_steps(pool, server))


def _steps(pool: Pool, server: ServerMembers) -> tuple[Step, ...]:
    steps = []
    if server.missing and not server.obstacle:
        steps.append(Step(kind=StepKind.JOIN, server_id=server.server_id, members=server.missing))
    drifted = tuple(change for member, change in server.current if change != unchanged(member))
    if drifted:
        steps.append(Step(kind=StepKind.REPAIR, server_id=server.server_id, members=drifted))
    replaced = not server.missing and server.current and _all_serve(pool, server)
    useless = [member for member in server.obsolete if replaced or not _serves(pool, member)]
    # A server without current members keeps its obsolete members. Their status in Octavia shows why the server does not
    # serve.
    if useless and server.current and not server.missing:
        steps.append(_leave(server.server_id, tuple(useless)))
    return tuple(steps)


def _judged(group: Group, pool: Pool, server: ServerMembers, node: Node, at: Moment) -> _Outcome:
    """The state of a server that should serve, by the members that it has."""
    if server.conflict:
        return _Outcome(node=_moved(node, NodeState.FAILED, server.conflict, at))
    if not server.own:
        return _without_members(group, pool, server, node, at)
    if not server.missing and server.current and _all_serve(pool, server):
        return _Outcome(node=_moved(node, NodeState.SERVING, "", at))
    judged = [member for member, _ in server.current] or list(server.obsolete)
    if node.state in _SERVED:
        reason = _statuses([member for member in judged if member.operating_status == "ERROR"])
        return _Outcome(node=_moved(node, NodeState.UNHEALTHY, reason, at) if reason else node)
    reason = _statuses([member for member in judged if not _serves(pool, member)])
    return _timed(group, node, NodeState.JOINING, reason or "Not all members exist.", at)


def _without_members(group: Group, pool: Pool, server: ServerMembers, node: Node, at: Moment) -> _Outcome:
    if server.server and server.server.status == "ERROR":
        return _Outcome(node=_moved(node, NodeState.FAILED, server.obstacle, at))
    if server.obstacle:
        return _timed(group, node, NodeState.WAITING, server.obstacle, at)
    if pool.changeable or node.state is NodeState.JOINING:
        # The time-out counts from the first attempt. So repeated attempts after refusals of Octavia do not extend the
        # time-out.
        return _timed(group, node, NodeState.JOINING, "Octavia has not created the members yet.", at)
    return _timed(group, node, NodeState.WAITING, "The load balancer accepts no changes now.", at)


def _timed(group: Group, node: Node, state: NodeState, reason: str, at: Moment) -> _Outcome:
    """The state WAITING or JOINING, or FAILED after the time-out, until the server serves or joins."""
    if node.state is NodeState.FAILED:
        return _Outcome(node=_moved(node, NodeState.FAILED, reason, at))
    node = _moved(node, state, reason, at)
    left = group.join_timeout - at.elapsed(node.server_id, node.since)
    if left <= 0:
        return _Outcome(node=_moved(node, NodeState.FAILED, reason, at))
    # The plan does not check a booting server more often than the poll interval, because Nova's notification about the
    # end of the boot arrives earlier.
    watch = WATCH_SECONDS if state is NodeState.JOINING else left
    return _Outcome(node=node, again_at=at.now + min(left, watch), outstanding=True)


def _leave(server_id: str, members: tuple[Member, ...]) -> Step:
    return Step(kind=StepKind.LEAVE, server_id=server_id, members=tuple(unchanged(member) for member in members))


def _all_serve(pool: Pool, server: ServerMembers) -> bool:
    return all(
        _serves(pool, member, change) and not _pending(member) and not _is_drained(member, change)
        for member, change in server.current
    )


def _is_drained(member: Member, change: MemberChange) -> bool:
    """Whether the member still has the weight 0 of a drain: its status is the one before the drain."""
    return member.weight == 0 and change.weight != 0


def _serves(pool: Pool, member: Member, change: MemberChange | None = None) -> bool:
    if member.operating_status == "ONLINE":
        return True
    if member.operating_status == "NO_MONITOR":
        return not pool.has_monitor and not _pending(member)
    return member.operating_status == "DRAINING" and change is not None and change.weight == 0


def _pending(member: Member) -> bool:
    return member.provisioning_status.startswith("PENDING")


def _statuses(members: list[Member]) -> str:
    return " ".join(
        f"Member {member.id} ({member.address} port {member.port}) is in operating status {member.operating_status}."
        for member in members
    )


def _not_after(node: Node, now: float) -> Node:
    """The node without times in the future, with which a drain would last too long.

    Such a time was recorded before the clock was set back.
    """
    began = node.drain_began_at
    if node.since <= now and (began is None or began <= now):
        return node
    return msgspec.structs.replace(
        node, since=min(node.since, now), drain_began_at=None if began is None else min(began, now)
    )


def _moved(node: Node, state: NodeState, reason: str, at: Moment) -> Node:
    since = node.since if node.state is state else at.now
    return msgspec.structs.replace(node, state=state, reason=reason, since=since)
