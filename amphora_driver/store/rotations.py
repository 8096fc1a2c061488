# SPDX-License-Identifier: Apache-2.0
"""Rotations over many load balancers: requests and progress.

Invariant: the rows hold the complete state. A request stores the ids of the amphorae to replace, so no clock decides
later which amphora is new. At most one rotation is open. Every transaction that changes a rotation locks its row first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.rows import CHUNK, chunks, to_struct
from amphora_driver.database.tables import URGENT, amphora, desired_object, duty, job
from amphora_driver.database.tables_fleet import rotation, rotation_item
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import spare_pools
from amphora_driver.store.generations import update_job

_MAX_TEXT = 1000
# Each request for a rotation locks this row of the table `duty`, so that concurrent requests run one after the other.
_REQUEST_LOCK = "rotation request"


class RotationState(str, Enum):
    """State of a rotation. An aborted one ends when the load balancers in progress are finished."""

    RUNNING = "running"
    PAUSED = "paused"
    ABORTED = "aborted"
    DONE = "done"


class ItemState(str, Enum):
    """State of a load balancer in its rotation."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Selects the amphorae to replace, which satisfy all conditions.

    `image`: the image of the replacements, which the amphorae do not have yet. `older_than`: age in seconds. `left_of`:
    id of an earlier rotation that selected the amphorae but did not replace them. No `load_balancers` means all.
    `host` or `zone`: the hypervisor or the availability zone to evacuate; `hosts` are the names of the hypervisor in
    `Location.host`.
    """

    image: str | None = None
    older_than: float | None = None
    everything: bool = False
    left_of: int | None = None
    load_balancers: tuple[str, ...] = ()
    compute_flavor: str | None = None
    project: str | None = None
    topology: str | None = None
    host: str | None = None
    hosts: tuple[str, ...] = ()
    zone: str | None = None

    def forbids(self, host: str | None, zone: str | None) -> bool:
        """Whether a new amphora must not run at this location, because the rotation evacuates it."""
        return (host is not None and host in self.hosts) or (zone is not None and zone == self.zone)


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded rotation."""

    id: int
    state: RotationState
    wanted: Selection
    max_unavailable: int
    asked_by: str | None
    created_at: float
    changed_at: float
    ended_at: float | None
    reason: str | None


class RotationItem(msgspec.Struct, frozen=True, kw_only=True):
    """One load balancer of a rotation, with its operating status at the start."""

    load_balancer_id: str
    place: int
    state: ItemState
    amphorae: tuple[str, ...]
    operating: str | None = None
    begun_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None


def request_rotation(
    connection: sa.Connection,
    wanted: Selection,
    max_unavailable: int,
    asked_by: str | None,
    located: Collection[str] | None = None,
) -> Rotation:
    """Insert a rotation, which a controller starts within two seconds.

    At most `max_unavailable` load balancers are in progress at a time. `located` are the amphorae at the evacuated
    location, as the compute backends report them; None without an evacuation.

    Raises:
        Conflict: another rotation is open, or the selection is empty.
        UnknownObject: a selected load balancer or the rotation `left_of` is not recorded.
    """
    _lock_requests(connection)
    current = get_active_rotation(connection)
    if current is not None:
        is_aborted = current.state is RotationState.ABORTED
        state = "is aborted and finishes the load balancers in progress" if is_aborted else "is not finished"
        raise Conflict(
            "start a rotation",
            f"rotation {current.id} {state}; only one can be open",
            f"See: amphoractl rotation show {current.id}.",
        )
    now = connection.execute(sa.select(clock.now(connection))).scalar_one()
    chosen = select_amphorae(connection, wanted, now, located)
    if not chosen:
        raise Conflict("start a rotation", "the selection contains no amphora to replace")
    row = {"wanted": msgspec.json.encode(wanted).decode(), "max_unavailable": max_unavailable, "asked_by": asked_by}
    insert = rotation.insert().values(**row, state=RotationState.RUNNING.value, created_at=now, changed_at=now)
    key = connection.execute(insert).inserted_primary_key
    rotation_id = int(key[0]) if key else 0
    common = {"rotation_id": rotation_id, "state": ItemState.WAITING.value}
    items = [
        {**common, "load_balancer_id": one, "place": place, "amphorae": msgspec.json.encode(found).decode()}
        for place, (one, found) in enumerate(chosen.items(), 1)
    ]
    connection.execute(rotation_item.insert(), items)
    if located is None:
        _retire_old_spares(connection, rotation_id, wanted, now)
    else:
        _retire_located_spares(connection, rotation_id, located)
    return get_rotation(connection, rotation_id)


def select_amphorae(
    connection: sa.Connection, wanted: Selection, now: float, located: Collection[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the selected amphorae by load balancer, in the order of their replacement.

    `located` is the same as for `request_rotation`.
    """
    found: dict[str, list[str]] = {}
    for row in connection.execute(_selection_query(wanted, now)):
        if located is None or row.id in located:
            found.setdefault(row.load_balancer_id, []).append(row.id)
    if wanted.left_of is not None:
        get_rotation(connection, wanted.left_of)
        left = {one.load_balancer_id: one.amphorae for one in list_items(connection, wanted.left_of)}
        found = {one: [each for each in ids if each in left.get(one, ())] for one, ids in found.items()}
    if wanted.compute_flavor is not None:
        fitting = _filter_compute_flavor(connection, list(found), wanted.compute_flavor)
        found = {one: ids for one, ids in found.items() if one in fitting}
    if wanted.load_balancers:
        _require_known(connection, wanted.load_balancers)
        found = {one: found[one] for one in dict.fromkeys(wanted.load_balancers) if one in found}
    return {one: tuple(ids) for one, ids in found.items() if ids}


def get_rotation(connection: sa.Connection, rotation_id: int, *, lock: bool = False) -> Rotation:
    """Return one rotation, or raise `UnknownObject`; `lock` locks the row in this transaction."""
    query = sa.select(rotation).where(rotation.c.id == rotation_id)
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownObject(
            f"find rotation {rotation_id}", "there is no such rotation", "See: amphoractl rotation list."
        )
    return _to_rotation(row)


def get_active_rotation(connection: sa.Connection) -> Rotation | None:
    """Return the open rotation, or None."""
    row = connection.execute(sa.select(rotation).where(rotation.c.ended_at.is_(None)).order_by(rotation.c.id)).first()
    return None if row is None else _to_rotation(row)


def list_newest_rotations(connection: sa.Connection, limit: int) -> list[Rotation]:
    """Return the last rotations, the newest first."""
    query = sa.select(rotation).order_by(rotation.c.id.desc()).limit(limit)
    return [_to_rotation(row) for row in connection.execute(query)]


def list_items(
    connection: sa.Connection, rotation_id: int, states: Collection[ItemState] | None = None, limit: int | None = None
) -> list[RotationItem]:
    """Return the load balancers of a rotation in order, in these states or in any state."""
    query = sa.select(rotation_item).where(rotation_item.c.rotation_id == rotation_id).order_by(rotation_item.c.place)
    if states is not None:
        query = query.where(rotation_item.c.state.in_([one.value for one in states]))
    rows = connection.execute(query if limit is None else query.limit(limit))
    return [to_struct(row, RotationItem, amphorae=msgspec.json.decode(row.amphorae)) for row in rows]


def count_items(connection: sa.Connection, rotation_id: int) -> dict[str, int]:
    """Return the number of load balancers in each state."""
    query = sa.select(rotation_item.c.state, sa.func.count()).where(rotation_item.c.rotation_id == rotation_id)
    return dict(connection.execute(query.group_by(rotation_item.c.state)).tuples().all())


def pause_rotation(connection: sa.Connection, rotation_id: int, reason: str) -> None:
    """Pause a running rotation: it starts no load balancer, and finishes those in progress."""
    _lock_rotation(connection, rotation_id, "pause", RotationState.RUNNING)
    set_rotation_state(connection, rotation_id, RotationState.PAUSED, reason)


def resume_rotation(connection: sa.Connection, rotation_id: int, *, leave_failed: bool = False) -> None:
    """Resume a paused rotation; `leave_failed` skips load balancers that have failed."""
    found = _lock_rotation(connection, rotation_id, "resume", RotationState.PAUSED)
    for item in list_items(connection, rotation_id, [ItemState.FAILED]):
        if leave_failed:
            finish_item(connection, rotation_id, item, ItemState.SKIPPED, f"skipped after a failure: {item.reason}")
        else:
            _restart_item(connection, found, item)
    set_rotation_state(connection, rotation_id, RotationState.RUNNING, None)


def abort_rotation(connection: sa.Connection, rotation_id: int) -> None:
    """Abort an open rotation: it skips waiting load balancers, and finishes those in progress."""
    found = _lock_rotation(connection, rotation_id, "abort", RotationState.RUNNING, RotationState.PAUSED)
    mine = rotation_item.c.rotation_id == rotation_id, rotation_item.c.state == ItemState.WAITING.value
    skipped = {"state": ItemState.SKIPPED.value, "ended_at": clock.now(connection)}
    connection.execute(rotation_item.update().where(*mine).values(**skipped, reason="the rotation was aborted"))
    set_rotation_state(connection, rotation_id, RotationState.ABORTED, found.reason)
    if not list_items(connection, rotation_id, [ItemState.RUNNING], 1):
        finish_rotation(connection, rotation_id, RotationState.ABORTED)


def _lock_rotation(connection: sa.Connection, rotation_id: int, action: str, *states: RotationState) -> Rotation:
    """Lock a rotation and return it; raise `Conflict` if the rotation has none of these states."""
    found = get_rotation(connection, rotation_id, lock=True)
    if found.state not in states:
        raise Conflict(f"{action} rotation {rotation_id}", f"it is {found.state.value}")
    return found


def set_rotation_state(connection: sa.Connection, rotation_id: int, state: RotationState, reason: str | None) -> None:
    """Set the state of a rotation and its reason."""
    now = clock.now(connection)
    _update_rotation(connection, rotation_id, state=state.value, reason=_truncate(reason), changed_at=now)


def set_rotation_reason(connection: sa.Connection, rotation_id: int, reason: str | None) -> None:
    """Set the reason for which a rotation waits."""
    _update_rotation(connection, rotation_id, reason=_truncate(reason))


def finish_rotation(connection: sa.Connection, rotation_id: int, state: RotationState) -> None:
    """Record the end of a rotation."""
    now = clock.now(connection)
    ended: dict[str, Any] = {"state": state.value, "ended_at": now, "changed_at": now}
    if state is RotationState.DONE:
        ended["reason"] = None
    _update_rotation(connection, rotation_id, **ended)


def begin_item(connection: sa.Connection, rotation_id: int, item: RotationItem, operating: str | None) -> None:
    """Record that the rotation starts with a load balancer."""
    values = {"state": ItemState.RUNNING.value, "operating": operating, "begun_at": clock.now(connection)}
    _update_item(connection, rotation_id, item, **values, reason=None)


def finish_item(
    connection: sa.Connection, rotation_id: int, item: RotationItem, state: ItemState, reason: str | None
) -> None:
    """Record the result of a load balancer."""
    now = clock.now(connection)
    _update_item(connection, rotation_id, item, state=state.value, ended_at=now, reason=_truncate(reason))


def lock_work(connection: sa.Connection, load_balancer_ids: Collection[str]) -> None:
    """Lock the `job` rows of load balancers until the end of the transaction."""
    query = sa.select(job.c.load_balancer_id).where(job.c.load_balancer_id.in_(list(load_balancer_ids)))
    connection.execute(query.order_by(job.c.load_balancer_id).with_for_update()).all()


def purge_old_rotations(connection: sa.Connection, before: float) -> None:
    """Delete rotations that ended before this time (seconds since 1970)."""
    old = connection.execute(sa.select(rotation.c.id).where(rotation.c.ended_at < before)).scalars().all()
    if old:
        connection.execute(rotation_item.delete().where(rotation_item.c.rotation_id.in_(old)))
        connection.execute(rotation.delete().where(rotation.c.id.in_(old)))


def _restart_item(connection: sa.Connection, found: Rotation, item: RotationItem) -> None:
    """Continue with a failed load balancer; add its newer amphorae that have a wrong image."""
    wrong: list[str] = []
    if found.wanted.image is not None:
        selection = Selection(image=found.wanted.image, load_balancers=(item.load_balancer_id,))
        chosen = connection.execute(_selection_query(selection, found.created_at)).all()
        wrong = [row.id for row in chosen if row.id not in item.amphorae]
    values: dict[str, Any] = {"state": ItemState.RUNNING.value}
    if wrong:
        amphorae = msgspec.json.encode([*item.amphorae, *wrong]).decode()
        values = {"state": ItemState.WAITING.value, "amphorae": amphorae, "begun_at": None}
    _update_item(connection, found.id, item, ended_at=None, reason=None, **values)
    # The rotation retries a failed load balancer, so its job runs at once and without back-off.
    update_job(connection, item.load_balancer_id, job.c.op == "apply", dirty=True, due_at=URGENT, attempts=0)


def _lock_requests(connection: sa.Connection) -> None:
    """Serialize requests: a concurrent request waits, and then finds the rotation of the first one."""
    mine = duty.c.name == _REQUEST_LOCK
    if not connection.execute(duty.update().where(mine).values(epoch=duty.c.epoch + 1)).rowcount:
        connection.execute(duty.insert().values(name=_REQUEST_LOCK, owner="", epoch=1, leased_until=0.0))


def _retire_located_spares(connection: sa.Connection, rotation_id: int, located: Collection[str]) -> None:
    """Retire the spares at an evacuated location, so that they replace no amphora."""
    reason = f"rotation {rotation_id} evacuates its location"
    for pool in spare_pools.list_pools(connection):
        spare_pools.make_pool_due(connection, pool.load_balancer_id)
        query = sa.select(amphora.c.id).where(amphora.c.load_balancer_id == pool.load_balancer_id)
        for spare in sorted(set(connection.execute(query).scalars()) & set(located)):
            spare_pools.retire_spare(connection, spare, pool.load_balancer_id, reason)


def _retire_old_spares(connection: sa.Connection, rotation_id: int, wanted: Selection, now: float) -> None:
    """Retire old spares, so that they replace no amphora. Pools check the images of spares themselves."""
    if not wanted.everything and wanted.older_than is None:
        return
    for pool in spare_pools.list_pools(connection):
        spare_pools.make_pool_due(connection, pool.load_balancer_id)
        mine = amphora.c.load_balancer_id == pool.load_balancer_id, amphora.c.state == AmphoraState.READY.value
        old = amphora.update().where(*mine, amphora.c.created_at < now - (wanted.older_than or 0.0))
        reason = f"rotation {rotation_id} replaces amphorae of this age"
        connection.execute(old.values(state=AmphoraState.RETIRING.value, reason=reason))


def _selection_query(wanted: Selection, now: float) -> sa.Select[Any]:
    columns = (amphora.c.id, amphora.c.load_balancer_id)
    # Retiring amphorae are not selected, because they are being replaced already.
    conditions = [amphora.c.state != AmphoraState.RETIRING.value, job.c.op == "apply"]
    if wanted.image is not None:
        conditions.append(sa.or_(amphora.c.image.is_(None), amphora.c.image != wanted.image))
    if wanted.older_than is not None:
        conditions.append(amphora.c.created_at < now - wanted.older_than)
    if wanted.load_balancers and len(wanted.load_balancers) <= CHUNK:
        conditions.append(amphora.c.load_balancer_id.in_(wanted.load_balancers))
    if wanted.project is not None:
        conditions.append(job.c.project_id == wanted.project)
    if wanted.topology is not None:
        conditions.append(job.c.topology == wanted.topology)
    joined = amphora.join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
    ordered = (amphora.c.load_balancer_id, amphora.c.created_at, amphora.c.id)
    return sa.select(*columns).select_from(joined).where(*conditions).order_by(*ordered)


def _filter_compute_flavor(
    connection: sa.Connection, load_balancer_ids: Sequence[str], compute_flavor: str
) -> set[str]:
    """Return the load balancers with this compute flavor in their profile, which is in the JSON body."""
    found = set()
    for ids in chunks(load_balancer_ids):
        query = sa.select(desired_object.c.id, desired_object.c.body).where(desired_object.c.id.in_(ids))
        for row in connection.execute(query):
            profile = msgspec.json.decode(row.body).get("profile", {})
            if profile.get("compute_flavor") == compute_flavor:
                found.add(row.id)
    return found


def _require_known(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> None:
    for one in load_balancer_ids:
        query = sa.select(job.c.load_balancer_id).where(job.c.load_balancer_id == one)
        if connection.execute(query).first() is None:
            raise UnknownObject(f"rotate the amphorae of load balancer {one}", "nothing is recorded under this id")


def _update_item(connection: sa.Connection, rotation_id: int, item: RotationItem, **values: Any) -> None:
    mine = rotation_item.c.rotation_id == rotation_id, rotation_item.c.load_balancer_id == item.load_balancer_id
    connection.execute(rotation_item.update().where(*mine).values(**values))


def _update_rotation(connection: sa.Connection, rotation_id: int, **values: Any) -> None:
    connection.execute(rotation.update().where(rotation.c.id == rotation_id).values(**values))


def _to_rotation(row: Any) -> Rotation:
    return to_struct(row, Rotation, wanted=msgspec.json.decode(row.wanted))


def _truncate(reason: str | None) -> str | None:
    return None if reason is None else reason[:_MAX_TEXT]


def estimate_remaining_seconds(everything: Iterable[RotationItem], max_unavailable: int) -> float | None:
    """Return the estimated seconds until the end, from finished load balancers; None before the first one."""
    known = list(everything)
    done = [one for one in known if one.state is ItemState.DONE]
    durations = [one.ended_at - one.begun_at for one in done if one.ended_at and one.begun_at]
    remaining = sum(one.state in (ItemState.WAITING, ItemState.RUNNING) for one in known)
    return sum(durations) / len(durations) * remaining / max_unavailable if durations else None
