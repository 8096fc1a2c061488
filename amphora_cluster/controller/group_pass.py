# SPDX-License-Identifier: Apache-2.0
"""One pass over a group: read servers and pool, plan, record, change the pool, record the result.

Invariant: the nodes are recorded under the lease before the steps, and each step compares the pool with its result. A
pass can therefore end at any point, also by a crash: the next one reads servers and pool again and does the rest. A
pass without a difference writes nothing; the controller returns its lease together with others.

A pass never raises an error of the cloud or of the database. It records the error, and the group waits for a back-off.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from amphora_cluster import requests
from amphora_cluster.cloud.errors import Busy, Missing
from amphora_cluster.controller.clouds import Cloud
from amphora_cluster.controller.elapsed import ElapsedTimes
from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.claims import Claim, PassEnd
from amphora_cluster.database.passes import ClaimedGroup, PassStore
from amphora_cluster.database.requests import StoredRequest
from amphora_cluster.metrics import METRICS, Pass
from amphora_cluster.model import Group, Node, NodeState, Plan, Pool, Request, RequestKind, Server, StepKind
from amphora_cluster.plan import WATCH_SECONDS, Moment, plan
from amphora_driver.errors import AmphoraDriverError, LeaseLost

LOG = logging.getLogger(__name__)

# Seconds until the next pass after Octavia refused a change of a busy load balancer.
BUSY_SECONDS = 1.0
# After _MOST_BUSY successive passes with a busy load balancer, the next pass waits for the poll interval. A load
# balancer may stay pending for hours.
_MOST_BUSY = 60
# Seconds between two checks while Octavia deletes a load balancer.
_DELETION_SECONDS = 2.0
_DELETED = "The group is being deleted."


class PassSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of passes in seconds; see the options of the same names."""

    poll_interval: float
    retry_first: float
    retry_most: float
    statistics_age: float


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has computed before the steps.

    Args:
        begun: time before the first read.
        moment: the time of the plan.
        plan: its nodes are those to record.
        requests: those that are open, with their new content.
    """

    begun: float
    moment: Moment
    pool: Pool
    plan: Plan
    requests: tuple[StoredRequest, ...]


class GroupPass:
    """Works on claimed groups, from any thread.

    Args:
        store: of the database with the groups.
        now: the database clock, in seconds since 1970.
        open_credential: opens a sealed credential of a group.
        cloud: returns the cloud of a group's owner.
        settings: times.
        elapsed: how long ago recorded times are.
    """

    def __init__(
        self,
        store: PassStore,
        now: Callable[[], float],
        open_credential: Callable[[str, bytes | None], ApplicationCredential | None],
        cloud: Callable[[Group, ApplicationCredential | None], Cloud],
        settings: PassSettings,
        elapsed: ElapsedTimes,
    ) -> None:
        self._store = store
        self._now = now
        self._open = open_credential
        self._cloud = cloud
        self._settings = settings
        self._elapsed = elapsed
        self._rng = random.SystemRandom()
        # By group id, the number of successive passes in which the load balancer was busy.
        self._busy: dict[str, int] = {}

    def run(self, claimed: ClaimedGroup) -> PassEnd | None:
        """Run one pass; return its end if the caller must still return the lease, otherwise None."""
        with METRICS.measure_pass() as measured:
            try:
                return self._run(claimed, measured)
            except LeaseLost as error:
                measured.outcome = "lost"
                LOG.warning(
                    "the controller has lost the lease of a group, and stops its work on the group without "
                    "recording the result: %s",
                    error,
                )
                return None
            except AmphoraDriverError as error:
                return self._failed(claimed, str(error))
            except Exception as error:
                LOG.exception(
                    "group %s: the controller's work on the group failed with an unexpected error, and is "
                    "repeated later",
                    claimed.group.id,
                )
                return self._failed(claimed, f"The pass failed with an unexpected error: {type(error).__name__}.")

    def _run(self, claimed: ClaimedGroup, measured: Pass) -> PassEnd | None:
        begun = self._now()
        cloud = self._cloud(claimed.group, self._open(claimed.group.id, claimed.credential))
        if claimed.deleting:
            return self._delete(claimed, cloud, measured)
        view = self._view(claimed, cloud, begun)
        nodes, busy = self._apply(claimed, cloud, view)
        return self._finish(claimed, view, nodes, measured, busy=busy)

    def _view(self, claimed: ClaimedGroup, cloud: Cloud, begun: float) -> _View:
        group, nodes = claimed.group, claimed.nodes
        new = any(not one.applied for one in claimed.requests)
        # A request can announce servers that Nova does not have yet, so `known` has no expected servers. A new request
        # may name new servers, so `fresh` demands a new list from Nova.
        known = [node.server_id for node in nodes if not requests.is_expected(node)]
        servers = cloud.servers(group, known, fresh=new)
        pool = cloud.read_pool(group, connections=new or any(map(_drains, nodes)))
        now = self._now()
        nodes, applied = self._apply_requests(group, claimed.requests, servers, nodes, now)
        moment = self._moment(group, now)
        planned = plan(group, servers, pool, nodes, moment)
        recorded = {node.server_id: node for node in nodes}
        kept = tuple(_keep_failure(recorded.get(node.server_id), node) for node in planned.nodes)
        planned = msgspec.structs.replace(planned, nodes=kept)
        return _View(begun=begun, moment=moment, pool=pool, plan=planned, requests=applied)

    def _apply_requests(
        self,
        group: Group,
        stored: tuple[StoredRequest, ...],
        servers: tuple[Server, ...],
        nodes: tuple[Node, ...],
        now: float,
    ) -> tuple[tuple[Node, ...], tuple[StoredRequest, ...]]:
        """Apply new requests, oldest first; return the nodes after them, and all requests as applied."""
        applied = []
        for one in stored:
            request = one.request
            if not one.applied:
                result = requests.apply_request(group, request, servers, nodes, now, self._rng)
                nodes, request = _merged(nodes, result.nodes), result.request
            applied.append(StoredRequest(request=request, applied=True))
        return nodes, tuple(applied)

    def _apply(self, claimed: ClaimedGroup, cloud: Cloud, view: _View) -> tuple[tuple[Node, ...], bool]:
        """Record the plan and do its steps; return the nodes after them, and whether Octavia was busy."""
        nodes = view.plan.nodes
        if not view.plan.steps:
            return nodes, not view.pool.changeable and not view.plan.complete
        # The plan is recorded before members change. After a crash, the next pass then knows which servers leave, and
        # since when.
        self._moved(claimed.group, self._store.record(claimed.claim, claimed.nodes, nodes, view.requests))
        for one in view.requests:
            _count(one.request)
        for step in view.plan.steps:
            LOG.info(
                "group %s: the controller starts the step %s for server %s, which has %d pool members",
                claimed.group.id,
                step.kind.value,
                step.server_id,
                len(step.members),
            )
        try:
            refused, busy = cloud.apply(claimed.group, view.plan.steps).refused, False
        except Busy as error:
            LOG.info(
                "group %s: Octavia is still processing another change of the load balancer, so the controller repeats "
                "its own changes of pool members in %g s: %s",
                claimed.group.id,
                BUSY_SECONDS,
                error.happened,
            )
            refused, busy = error.refused, True
        for step in view.plan.steps:
            (METRICS.refused if step.server_id in refused else METRICS.steps).labels(step.kind.value).inc()
        before = {node.server_id: node for node in nodes}
        failed = tuple(
            _refused(before[server_id], reason, self._now())
            for server_id, reason in refused.items()
            if server_id in before
        )
        started = () if busy else _started(view.plan, before, refused, self._now())
        return _merged(nodes, (*failed, *started)), busy

    def _finish(
        self, claimed: ClaimedGroup, view: _View, nodes: tuple[Node, ...], measured: Pass, *, busy: bool
    ) -> PassEnd | None:
        now = self._now()
        at = msgspec.structs.replace(view.moment, now=now)
        ended = tuple(
            msgspec.structs.replace(one, request=requests.outcome(claimed.group, one.request, nodes, at))
            for one in view.requests
        )
        due_at = self._due_at(claimed.claim, view, nodes, now, busy=busy)
        if any(requests.awaits_recovery(one.request, nodes) for one in ended):
            # No notification announces the recovery of a member.
            due_at = min(due_at, now + WATCH_SECONDS)
        end = PassEnd(claim=claimed.claim, due_at=due_at)
        measured.outcome = "busy" if busy else "done"
        return self._record_end(claimed, end, view, nodes, ended)

    def _record_end(
        self,
        claimed: ClaimedGroup,
        end: PassEnd,
        view: _View,
        nodes: tuple[Node, ...],
        ended: tuple[StoredRequest, ...],
    ) -> PassEnd | None:
        """Record what differs from the database and return the lease, or leave both to the caller."""
        # If the plan has steps, `_apply` has already recorded the nodes and requests. The comparison below starts from
        # the recorded values.
        nodes_before, requests_before = (
            (view.plan.nodes, view.requests) if view.plan.steps else (claimed.nodes, claimed.requests)
        )
        known = {one.request.id: one for one in requests_before}
        changed = tuple(one for one in ended if known[one.request.id] != one)
        if _same(nodes_before, nodes) and not changed:
            return end
        self._moved(claimed.group, self._store.finish(end, nodes_before, nodes, changed))
        for one in changed:
            _count(one.request)
        return None

    def _due_at(self, claim: Claim, view: _View, nodes: tuple[Node, ...], now: float, *, busy: bool) -> float:
        # The interval counts from the start of the pass, so its duration does not extend the interval.
        poll = max(view.begun + self._settings.poll_interval, now)
        if busy:
            number = self._busy[claim.group_id] = self._busy.get(claim.group_id, 0) + 1
            return now + BUSY_SECONDS if number <= _MOST_BUSY else poll
        self._busy.pop(claim.group_id, None)
        failed = {node.server_id for node in nodes if node.state is NodeState.FAILED}
        if view.plan.steps and all(step.server_id in failed for step in view.plan.steps):
            # Octavia has refused all steps and would refuse them again after a second. So the next pass waits for the
            # poll interval.
            return poll
        return poll if view.plan.again_at is None else min(poll, max(view.plan.again_at, now))

    def _delete(self, claimed: ClaimedGroup, cloud: Cloud, measured: Pass) -> PassEnd | None:
        """Remove the members of a group that is being deleted, then its load balancer, then its record."""
        group = claimed.group
        view: _View | None = None
        nodes: tuple[Node, ...] = ()
        busy = False
        try:
            view = self._view_of_deletion(claimed, cloud)
            nodes, busy = self._apply(claimed, cloud, view)
            # In the status ERROR, Octavia refuses changes of members, but can delete the load balancer with all
            # members.
            deletable = group.owns_load_balancer and view.pool.failed
            there = not deletable and any(group.tag in member.tags for member in view.pool.members)
        except Missing as error:
            # The user has deleted the pool, the load balancer or the source of the servers before the group. The
            # deletion of the group continues.
            LOG.info(
                "group %s: the pool or the source of the servers does not exist any more, but the controller "
                "continues to delete the group: %s",
                group.id,
                error,
            )
            there = self._without_source(claimed, cloud)
            view = None
        measured.outcome = "busy" if busy else "done"
        if there:
            if view is None:
                return PassEnd(claim=claimed.claim, due_at=self._now() + BUSY_SECONDS)
            return self._finish(claimed, view, nodes, measured, busy=busy)
        if group.owns_load_balancer and not self._load_balancer_gone(group, cloud):
            return PassEnd(claim=claimed.claim, due_at=self._now() + _DELETION_SECONDS)
        self._store.remove(claimed.claim)
        self._busy.pop(group.id, None)
        LOG.info("the controller has deleted group %s and removed it from the database", group.id)
        return None

    def _view_of_deletion(self, claimed: ClaimedGroup, cloud: Cloud) -> _View:
        """Plan the leave of all servers, without regard to the minimum."""
        group, now = claimed.group, self._now()
        servers = cloud.servers(group, [node.server_id for node in claimed.nodes], fresh=False)
        pool = cloud.read_pool(group, connections=True)
        leaving = {node.server_id for node in claimed.nodes if node.leaving}
        staying = tuple(
            dict.fromkeys(
                one
                for one in (*(server.id for server in servers), *(node.server_id for node in claimed.nodes))
                if one not in leaving
            )
        )
        nodes = claimed.nodes
        if staying:
            leave = Request(id="", group_id=group.id, kind=RequestKind.LEAVE, servers=staying)
            free = msgspec.structs.replace(group, minimum=0)
            nodes = _merged(nodes, requests.apply_request(free, leave, servers, nodes, now, self._rng).nodes)
        moment = self._moment(group, now)
        planned = plan(group, servers, pool, nodes, moment)
        refused = tuple(_refusal(one, _DELETED, now) for one in claimed.requests if not one.applied)
        running = tuple(one for one in claimed.requests if one.applied)
        return _View(begun=now, moment=moment, pool=pool, plan=planned, requests=(*refused, *running))

    def _without_source(self, claimed: ClaimedGroup, cloud: Cloud) -> bool:
        """Remove the members if only the source of the servers is missing; return whether members were there."""
        try:
            pool = cloud.read_pool(claimed.group, connections=False)
        except Missing:
            return False
        # The plan sees no servers, because the source of the servers does not exist. So it removes all members of the
        # group at once.
        steps = plan(claimed.group, (), pool, (), self._moment(claimed.group, self._now())).steps
        if steps:
            self._store.record(claimed.claim, claimed.nodes, claimed.nodes)
            cloud.apply(claimed.group, steps)
        return any(claimed.group.tag in member.tags for member in pool.members)

    def _load_balancer_gone(self, group: Group, cloud: Cloud) -> bool:
        try:
            return cloud.delete_load_balancer(group)
        except Busy as error:
            LOG.info(
                "group %s: Octavia cannot delete the load balancer yet, so the controller tries again later: %s",
                group.id,
                error.happened,
            )
            return False

    def _failed(self, claimed: ClaimedGroup, error: str) -> PassEnd | None:
        """Record an error and return the lease; the group is due again after a back-off."""
        group, claim = claimed.group, claimed.claim
        attempts = claim.attempts + 1
        settings = self._settings
        pause = min(settings.retry_first * 2 ** min(attempts - 1, 16), settings.retry_most)
        pause *= random.uniform(0.8, 1.0)  # noqa: S311 - jitter, no secret
        LOG.warning(
            "group %s: the controller's work on the group failed in attempt %d, and is repeated in %.1f s: %s",
            group.id,
            attempts,
            pause,
            error,
        )
        now = self._now()
        end = PassEnd(claim=claim, due_at=now + pause, error=error, attempts=attempts)
        overdue = tuple(
            _refusal(one, error, now)
            for one in claimed.requests
            if now - one.request.created_at > group.join_timeout + group.drain_seconds
        )
        if not overdue:
            return end
        try:
            # The failed pass may have read outdated states of servers. So only the failure of requests is recorded.
            self._store.finish(end, (), (), overdue)
        except AmphoraDriverError as failure:
            LOG.warning(
                "group %s: the controller could not record that requests of the group have failed, and tries again "
                "later: %s",
                group.id,
                failure,
            )
            return end
        for one in overdue:
            _count(one.request)
        return None

    def _moment(self, group: Group, now: float) -> Moment:
        elapsed = self._elapsed.of_group(group.id, now)
        return Moment(now=now, elapsed=elapsed, statistics_age=self._settings.statistics_age)

    def _moved(self, group: Group, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            METRICS.moves.labels(node.state.value).inc()
            reason = f": {node.reason}" if node.reason else ""
            LOG.info(
                "group %s: the controller set the state of server %s to %s%s",
                group.id,
                node.server_id,
                node.state.value,
                reason,
            )


def _drains(node: Node) -> bool:
    return node.leaving and node.state is not NodeState.LEFT


def _merged(nodes: tuple[Node, ...], changed: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes with the changed ones in place of older ones."""
    return tuple({**{node.server_id: node for node in nodes}, **{node.server_id: node for node in changed}}.values())


def _same(before: tuple[Node, ...], after: tuple[Node, ...]) -> bool:
    return len(before) == len(after) and {one.server_id: one for one in before} == {one.server_id: one for one in after}


def _keep_failure(recorded: Node | None, planned: Node) -> Node:
    """Keep the record of a failure while its step is repeated, until Octavia accepts the step."""
    if recorded is None or recorded.state is not NodeState.FAILED or planned.state is not NodeState.JOINING:
        return planned
    return msgspec.structs.replace(recorded, drain_began_at=planned.drain_began_at)


def _refused(node: Node, reason: str, now: float) -> Node:
    since = node.since if node.state is NodeState.FAILED else now
    return msgspec.structs.replace(node, state=NodeState.FAILED, reason=reason, since=since)


def _started(planned: Plan, nodes: Mapping[str, Node], refused: Mapping[str, Any], now: float) -> tuple[Node, ...]:
    """Return the records of failed servers whose join Octavia has accepted now."""
    joined = {step.server_id for step in planned.steps if step.kind is StepKind.JOIN and step.server_id not in refused}
    return tuple(
        msgspec.structs.replace(node, state=NodeState.JOINING, reason="", since=now)
        for server_id, node in nodes.items()
        if server_id in joined and node.state is NodeState.FAILED and not node.leaving
    )


def _refusal(one: StoredRequest, reason: str, now: float) -> StoredRequest:
    """Return a request that ends with the reason of its failure."""
    open_servers = {server: reason for server in one.request.servers if server not in one.request.outcome}
    refusal = "" if one.applied else reason
    outcome = {**one.request.outcome, **open_servers}
    ended = msgspec.structs.replace(one.request, outcome=outcome, refusal=refusal, ended_at=now)
    return StoredRequest(request=ended, applied=True)


def _count(request: Request) -> None:
    if request.ended_at is None:
        return
    result = "refused" if request.refusal else "failure" if any(request.outcome.values()) else "success"
    METRICS.count_request(request.kind, result, request.ended_at - request.created_at)
    LOG.info(
        "group %s: request %s (kind: %s) has ended with the result %s",
        request.group_id,
        request.id,
        request.kind.value,
        result,
    )
