# SPDX-License-Identifier: Apache-2.0
"""Pools and members in Octavia's public API.

Invariant: a member without the tag of the group is never changed or deleted. Before each change, the members are read
again. A new member whose address and port another member has is refused, because Octavia's batch call would overwrite
the other member. Octavia has no precondition for a batch: a member that a user creates between this read and the batch
could still be overwritten. The window is one request long.

Calls: `read_pool` sends three requests, plus one for each further page of members, one for statistics on request, and
one for a monitor whose members are not monitored (yet).
`apply` sends one read of the members, one batch for all members that join or change, and one request for each deleted
member. After each change, Octavia refuses the next one until the load balancer is ACTIVE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from amphora_cluster.cloud.errors import Busy, CloudError, CredentialRefused, ListChanged, Missing
from amphora_cluster.cloud.member_batch import MEMBER_FIELDS, MemberBatch, MemberRecord
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.model import TAG_PREFIX, Group, Member, Pool, Step
from amphora_driver.deadline import Deadline, part_of_current
from amphora_driver.openstack.pages import read_pages

T = TypeVar("T")

# API version with additive batches (OpenStack Train, 2019). An older Octavia deletes all members that are not in the
# batch.
_NEEDED = (2, 11)
_POOL_FIELDS = ("id", "healthmonitor_id", "listeners", "loadbalancers")
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 1.0
_LB = "/v2/lbaas/loadbalancers"


class _Members(msgspec.Struct, frozen=True):
    members: list[MemberRecord]
    members_links: list[dict[str, str]] = []


class _Id(msgspec.Struct, frozen=True):
    id: str


class _PoolBody(msgspec.Struct, frozen=True):
    id: str
    healthmonitor_id: str | None = None
    listeners: list[_Id] = []
    loadbalancers: list[_Id] = []


class _PoolAnswer(msgspec.Struct, frozen=True):
    pool: _PoolBody


class _Status(msgspec.Struct, frozen=True):
    provisioning_status: str = ""
    tags: tuple[str, ...] | None = ()


class _StatusAnswer(msgspec.Struct, frozen=True):
    loadbalancer: _Status


class _Monitor(msgspec.Struct, frozen=True):
    admin_state_up: bool = True


class _MonitorAnswer(msgspec.Struct, frozen=True):
    healthmonitor: _Monitor


class _Statistics(msgspec.Struct, frozen=True):
    active_connections: int = 0
    total_connections: int = 0


class _StatisticsAnswer(msgspec.Struct, frozen=True):
    stats: _Statistics


class _Version(msgspec.Struct, frozen=True):
    id: str


class _Versions(msgspec.Struct, frozen=True):
    versions: list[_Version]


class LoadBalancerIds(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that a group created from its policy; `created` is False if an earlier call did it."""

    load_balancer_id: str
    pool_id: str
    listener_id: str | None = None
    health_monitor_id: str | None = None
    created: bool = True


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `apply`.

    Args:
        changes: number of accepted changes. The load balancer is pending after one.
        refused: servers whose step failed for good, with the reasons.
    """

    changes: int
    refused: dict[str, str]


class OctaviaPools:
    """Octavia's pools, for the owner of some groups. Its methods are safe for threads.

    Args:
        connection: the services of the cloud.
        patience: seconds for which `apply` repeats a change that Octavia refuses as busy.
    """

    def __init__(self, connection: CloudConnection, patience: float = 10.0) -> None:
        self._connection = connection
        self._patience = patience
        self._version_known = False

    def read_pool(self, group: Group, *, connections: bool = False) -> Pool:
        """Return the pool of a group with all members.

        Args:
            group: the group.
            connections: read the number of active connections too; needed while members drain only.

        Raises:
            Missing: pool or load balancer does not exist.
            CloudError: Octavia refuses the request, or does not answer.
        """
        wanted = f"read pool {group.pool_id}"
        balancer = self._get(f"{_LB}/{group.load_balancer_id}", _StatusAnswer, wanted, ("provisioning_status",))
        pool = self._get(f"/v2/lbaas/pools/{group.pool_id}", _PoolAnswer, wanted, _POOL_FIELDS).pool
        listeners = [one.id for one in pool.listeners]
        active = self._active_connections(group.load_balancer_id, listeners, wanted) if connections else None
        members = tuple(one.member() for one in self._members(group.pool_id, wanted))
        return Pool(
            id=pool.id,
            load_balancer_id=next((one.id for one in pool.loadbalancers), group.load_balancer_id),
            has_monitor=self._has_monitor(pool, members, wanted),
            changeable=balancer.loadbalancer.provisioning_status == "ACTIVE",
            failed=balancer.loadbalancer.provisioning_status == "ERROR",
            members=members,
            active_connections=active,
        )

    def require_project(self) -> None:
        """Refuse an application credential of another project; see `CloudConnection.require_project`."""
        self._connection.require_project()

    def load_balancer_status(self, load_balancer_id: str) -> str:
        """Return the provisioning status of a load balancer; `DELETED` if it does not exist."""
        wanted = f"read load balancer {load_balancer_id}"
        try:
            found = self._get(f"{_LB}/{load_balancer_id}", _StatusAnswer, wanted, ("provisioning_status",))
        except Missing:
            return "DELETED"
        return found.loadbalancer.provisioning_status

    def _has_monitor(self, pool: _PoolBody, members: Sequence[Member], wanted: str) -> bool:
        """Return whether the pool has a monitor that is enabled."""
        if pool.healthmonitor_id is None:
            return False
        # With a disabled health monitor, all members have the status NO_MONITOR. So the monitor is read only if a
        # member has this status.
        if not any(one.operating_status == "NO_MONITOR" for one in members):
            return True
        path = f"/v2/lbaas/healthmonitors/{pool.healthmonitor_id}"
        try:
            monitor = self._get(path, _MonitorAnswer, wanted, ("admin_state_up",)).healthmonitor
        except Missing:
            return False
        return bool(monitor.admin_state_up)

    def _active_connections(self, load_balancer_id: str, listeners: list[str], wanted: str) -> int | None:
        if not listeners:
            return None
        # For several listeners, one request for the load balancer's statistics replaces a request for each listener.
        # The load balancer's number includes all listeners, so it is never too small.
        path = f"/v2/lbaas/listeners/{listeners[0]}/stats" if len(listeners) == 1 else f"{_LB}/{load_balancer_id}/stats"
        found = self._get(path, _StatisticsAnswer, wanted).stats
        # Octavia answers zeros if a provider reports no statistics, for example OVN. So only a listener that has
        # counted a connection has reliable statistics.
        return found.active_connections if found.total_connections > 0 else None

    def _members(self, pool_id: str, wanted: str) -> list[MemberRecord]:
        path, size = f"/v2/lbaas/pools/{pool_id}/members", self._connection.settings.page_size

        def read(last: MemberRecord | None) -> tuple[list[MemberRecord], bool]:
            marker = [] if last is None else [("marker", last.id)]
            params = [*_fields(MEMBER_FIELDS), ("limit", str(size)), *marker]
            page = self._request("GET", path, kind=_Members, wanted=wanted, params=params)
            return page.members, any(one.get("rel") == "next" for one in page.members_links)

        return read_pages(read, lambda error: isinstance(error, ListChanged))

    def apply(self, group: Group, steps: Sequence[Step]) -> Applied:
        """Make the changes of a plan: one batch for joins, drains and repairs, then single deletions.

        A call that was interrupted at any point is completed by the next pass, because each step compares the members
        with its result. A step without a difference sends no request.

        Raises:
            Busy: the load balancer accepted no change for the patience of this object. The steps before it are done.
            CredentialRefused: the application credential is revoked, or lacks a right.
            CloudError: Octavia does not answer. Some steps may be done.
        """
        wanted = f"change the members of pool {group.pool_id}"
        deadline = part_of_current(self._patience, wanted)
        work = MemberBatch({one.endpoint: one for one in self._members(group.pool_id, wanted)}, group.tag)
        batch = {step.server_id: members for step in steps if (members := work.batch_of(step))}
        deleted = [(step.server_id, one) for step in steps for one in work.deleted_of(step)]
        changes = 0
        try:
            if batch:
                self._require_additive_batches()
                changes += self._put(group, batch, work.refused, deadline)
            for server_id, member_id in deleted:
                changes += self._delete(group, member_id, server_id, work.refused, deadline)
        except Busy as busy:
            busy.refused.update(work.refused)
            raise
        return Applied(changes=changes, refused=work.refused)

    def _put(self, group: Group, batch: Mapping[str, list[Any]], refused: dict[str, str], deadline: Deadline) -> int:
        """Send one batch; if Octavia refuses it for good, send its halves: the other servers continue."""
        path, wanted = f"/v2/lbaas/pools/{group.pool_id}/members", f"change the members of pool {group.pool_id}"
        body = {"members": [member for members in batch.values() for member in members]}

        def put() -> None:
            params = [("additive_only", "true")]
            self._request("PUT", path, kind=type(None), wanted=wanted, params=params, body=body)

        try:
            _when_changeable(put, deadline)
        except (Busy, CredentialRefused, Missing):
            raise
        except CloudError as error:
            if not error.final:
                raise
            if len(batch) == 1:
                refused[next(iter(batch))] = f"Octavia refused the members: {error.happened}"
                return 0
            half = len(batch) // 2
            parts = dict(islice(batch.items(), half)), dict(islice(batch.items(), half, None))
            return sum(self._put(group, part, refused, deadline) for part in parts)
        return 1

    def _delete(self, group: Group, member_id: str, server_id: str, refused: dict[str, str], deadline: Deadline) -> int:
        path, wanted = f"/v2/lbaas/pools/{group.pool_id}/members/{member_id}", f"delete member {member_id}"
        try:
            _when_changeable(lambda: self._request("DELETE", path, kind=type(None), wanted=wanted), deadline)
        except Missing:
            return 0
        except (Busy, CredentialRefused):
            raise
        except CloudError as error:
            if not error.final:
                raise
            refused[server_id] = f"Octavia refused the deletion of member {member_id}: {error.happened}"
            return 0
        return 1

    def _require_additive_batches(self) -> None:
        if self._version_known:
            return
        wanted = "change members with an additive batch"
        found = self._connection.request(
            "octavia", "GET", f"{self._connection.root('octavia')}/", kind=_Versions, wanted=wanted
        )
        newest = max((_number(one.id) for one in found.versions), default=(0, 0))
        if newest < _NEEDED:
            needed = ".".join(map(str, _NEEDED))
            happened = f"Octavia has API version {'.'.join(map(str, newest))}, and needs {needed}"
            raise CloudError(wanted, happened, "Upgrade Octavia.", final=True)
        self._version_known = True

    def create_load_balancer(self, group_id: str, body: Mapping[str, object]) -> LoadBalancerIds:
        """Create the load balancer of a policy with all its objects; return their ids.

        A repetition, for example after a crash, returns the load balancer of the first call: it has the tag of the
        group.

        Args:
            group_id: the group that owns the load balancer.
            body: the value of `loadbalancer` in the request (`policy.to_load_balancer`).

        Raises:
            CloudError: Octavia refuses the load balancer, or does not answer.
        """
        tag = TAG_PREFIX + group_id
        wanted = f"create the load balancer of group {group_id}"
        found = self._find_load_balancer(tag, wanted)
        created = found is None
        if found is None:
            tags = [tag, *(str(one) for one in _list(body.get("tags")))]
            request = {"loadbalancer": {**body, "tags": tags}}
            made = self._request("POST", _LB, kind=dict[str, Any], wanted=wanted, body=request)
            found = str(made["loadbalancer"]["id"])
        return msgspec.structs.replace(self._ids_of(found, wanted), created=created)

    def delete_load_balancer(self, group_id: str, load_balancer_id: str) -> bool:
        """Request the deletion of a group's load balancer with all its objects; return whether it is gone.

        Raises:
            Busy: the load balancer is pending.
            CloudError: the load balancer does not have the tag of the group, or Octavia refuses the deletion.
        """
        wanted = f"delete load balancer {load_balancer_id}"
        path = f"{_LB}/{load_balancer_id}"
        try:
            found = self._get(path, _StatusAnswer, wanted, ("provisioning_status", "tags")).loadbalancer
        except Missing:
            return True
        if TAG_PREFIX + group_id not in (found.tags or ()):
            happened = f"it does not have the tag {TAG_PREFIX + group_id}"
            raise CloudError(wanted, happened, "Delete it with Octavia's API.", final=True)
        if found.provisioning_status == "DELETED":
            return True
        if found.provisioning_status == "PENDING_DELETE":
            return False
        try:
            self._request("DELETE", path, kind=type(None), wanted=wanted, params=[("cascade", "true")])
        except Missing:
            return True
        return False

    def _find_load_balancer(self, tag: str, wanted: str) -> str | None:
        project = [("project_id", self._connection.project_id)] if self._connection.project_id else []
        params = [("tags", tag), *project, *_fields(("id", "provisioning_status"))]
        answer = self._request("GET", _LB, kind=dict[str, Any], wanted=wanted, params=params)
        ending = {"DELETED", "PENDING_DELETE"}
        there = [one for one in answer["loadbalancers"] if one.get("provisioning_status") not in ending]
        return str(there[0]["id"]) if there else None

    def _ids_of(self, load_balancer_id: str, wanted: str) -> LoadBalancerIds:
        answer = self._get(f"{_LB}/{load_balancer_id}", dict[str, Any], wanted, ("pools", "listeners"))["loadbalancer"]
        pools, listeners = answer.get("pools") or [], answer.get("listeners") or []
        if not pools:
            raise CloudError(wanted, f"load balancer {load_balancer_id} has no pool", final=True)
        pool_id = str(pools[0]["id"])
        pool = self._get(f"/v2/lbaas/pools/{pool_id}", _PoolAnswer, wanted, _POOL_FIELDS).pool
        return LoadBalancerIds(
            load_balancer_id=load_balancer_id,
            pool_id=pool_id,
            listener_id=str(listeners[0]["id"]) if listeners else None,
            health_monitor_id=pool.healthmonitor_id,
        )

    def _get(self, path: str, kind: type[T], wanted: str, fields: Iterable[str] = ()) -> T:
        return self._request("GET", path, kind=kind, wanted=wanted, params=_fields(fields))

    def _request(self, method: str, path: str, *, kind: type[T], **more: Any) -> T:
        root = self._connection.root("octavia")
        return self._connection.request("octavia", method, root + path, kind=kind, **more)


def _when_changeable(change: Callable[[], object], deadline: Deadline) -> None:
    """Send a change, and repeat it with growing pauses while the load balancer is busy."""
    wait = _FIRST_WAIT
    while True:
        try:
            change()
        except Busy:
            if deadline.left() < wait:
                raise
            time.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_WAIT)
        else:
            return


def _fields(names: Iterable[str]) -> list[tuple[str, str]]:
    return [("fields", one) for one in names]


def _list(value: object) -> Collection[object]:
    return value if isinstance(value, list | tuple) else ()


def _number(version: str) -> tuple[int, int]:
    """Return `v2.30` as (2, 30); zeros for an unknown form."""
    major, _, minor = version.removeprefix("v").partition(".")
    return (int(major), int(minor or "0")) if major.isdigit() and (minor or "0").isdigit() else (0, 0)
