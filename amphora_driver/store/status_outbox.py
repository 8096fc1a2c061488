# SPDX-License-Identifier: Apache-2.0
"""What Octavia is to be told: the outbox.

Invariant: there is one row per object with its newest status; a row stays due until Octavia has taken exactly that
version. So nothing is lost while a driver agent is away, nothing old overtakes something new, and many changes to one
object become one report. Provisioning statuses of a load balancer are held back while a newer generation waits to be
confirmed, and everything is held back until Octavia's own transaction is known to have ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import listener_statistics, request, secret, status, wanted_object, work
from amphora_driver.model.enums import Kind, Operating, Provisioning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CHUNK = 500


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """One report Octavia has not taken yet."""

    object_id: str
    kind: Kind
    load_balancer_id: str
    provisioning: Provisioning | None
    operating: Operating | None
    version: int


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An operating status somebody observed, and why."""

    object_id: str
    kind: Kind
    operating: Operating
    reason: str = ""


# What every call of Octavia's and every change of health needs is built once: putting a statement together costs more
# than running it.
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_KNOWN = sa.select(status.c.object_id).where(status.c.object_id.in_(_IDS))
_EXPECT = status.update().where(status.c.object_id.in_(_IDS)).values(pending=sa.bindparam("new_pending"))
_INSERT = status.insert()
_RECORDED = sa.select(status.c.object_id, status.c.operating, status.c.provisioning).where(
    status.c.object_id.in_(_IDS), status.c.load_balancer_id == sa.bindparam("of")
)
_OBSERVE = (
    status.update()
    .where(status.c.object_id == sa.bindparam("at"))
    .values(
        operating=sa.bindparam("new_operating"),
        reason=sa.bindparam("new_reason"),
        since=sa.bindparam("new_since"),
        version=status.c.version + 1,
    )
)
# A health manager may have written what it measured since the status was read.
_WAS = sa.bindparam("was", type_=sa.String)
_CONCLUDE = _OBSERVE.where(sa.or_(status.c.operating == _WAS, sa.and_(status.c.operating.is_(None), _WAS.is_(None))))
_RECORDED_OF = sa.select(status.c.object_id, status.c.operating, status.c.provisioning).where(
    status.c.load_balancer_id == sa.bindparam("of")
)


def _provisioning_change(provisioning: Any, reason: Any) -> list[tuple[Any, Any]]:
    """What changes with an object whose wait is over, or for `_failing` goes on.

    In this order: MySQL and MariaDB assign from left to right, and go on with what was assigned.
    """
    return [
        ("provisioning", provisioning),
        ("since", sa.bindparam("now", type_=sa.Double)),
        ("settled", status.c.version + 1),
        ("version", status.c.version + 1),
        ("reason", reason),
    ]


_UPTO = sa.bindparam("upto", type_=sa.BigInteger)
_OURS = status.c.load_balancer_id == sa.bindparam("of")
_WAITS = status.c.pending <= _UPTO
_OVER: list[tuple[Any, Any]] = [("pending", None)]
_GONE = status.c.object_id.in_(
    sa.select(wanted_object.c.id).where(wanted_object.c.load_balancer_id == sa.bindparam("of"), wanted_object.c.removed)
)
# What failed before and is served now is well again, whoever mended it. What waits for a later generation is told then.
_WELL = (
    status.update()
    .where(
        _OURS, sa.or_(_WAITS, sa.and_(status.c.pending.is_(None), status.c.provisioning == Provisioning.ERROR.value))
    )
    .ordered_values(
        *_provisioning_change(
            sa.case((_GONE, Provisioning.DELETED.value), else_=Provisioning.ACTIVE.value),
            sa.case((_GONE, status.c.reason), else_=None),
        ),
        *_OVER,
    )
)
_WELL_BUT = _WELL.where(sa.or_(status.c.object_id.not_in(_IDS), _GONE))
_FAILED = (
    status.update()
    .where(
        _OURS,
        status.c.object_id.in_(_IDS),
        sa.or_(_WAITS, sa.and_(status.c.pending.is_(None), status.c.provisioning != Provisioning.ERROR.value)),
        ~_GONE,
    )
    .ordered_values(*_provisioning_change(Provisioning.ERROR.value, sa.bindparam("why", type_=sa.Text)), *_OVER)
)
_FAILING = (
    status.update()
    .where(_OURS, _WAITS)
    .ordered_values(*_provisioning_change(Provisioning.ERROR.value, sa.bindparam("why", type_=sa.Text)))
)
_TAKEN = (
    status.update()
    .where(status.c.object_id.in_(_IDS), status.c.reported < sa.bindparam("told", type_=sa.BigInteger))
    .values(reported=sa.bindparam("told", type_=sa.BigInteger))
)
_FORGET = status.delete().where(status.c.object_id.in_(_IDS))
_FORGET_WANTED = wanted_object.delete().where(wanted_object.c.id.in_(_IDS))


def expect_confirmation(
    connection: sa.Connection,
    load_balancer_id: str,
    generation: int,
    objects: Iterable[tuple[Kind, str]],
    new: Iterable[tuple[Kind, str]] = (),
) -> None:
    """Note that these objects are PENDING in Octavia until `generation` is confirmed.

    Args:
        connection: of a writing transaction.
        load_balancer_id: whose objects.
        generation: what they wait for.
        objects: usually they are known, but need not be.
        new: more of them, which nobody can know.
    """
    kinds = {object_id: kind for kind, object_id in objects}
    fresh = {object_id: kind for kind, object_id in new}
    # One order for everybody, so that two writers wait for each other instead of deadlocking.
    ids = sorted(kinds)
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        found = connection.execute(_EXPECT, {"ids": chunk, "new_pending": generation}).rowcount
        if found < len(chunk):
            known = set(connection.execute(_KNOWN, {"ids": chunk}).scalars())
            fresh |= {object_id: kinds[object_id] for object_id in chunk if object_id not in known}
    rows = [
        {
            "object_id": object_id,
            "kind": kind.value,
            "load_balancer_id": load_balancer_id,
            "pending": generation,
            "version": 0,
            "reported": 0,
            "since": time.time(),
        }
        for object_id, kind in fresh.items()
    ]
    for start in range(0, len(rows), _CHUNK):
        connection.execute(_INSERT, rows[start : start + _CHUNK])


def confirm_generation(
    connection: sa.Connection,
    load_balancer_id: str,
    generation: int,
    failed: Mapping[str, str],
    certain: Sequence[Observation] = (),
    first: Sequence[Observation] = (),
) -> None:
    """Every amphora serves `generation`: what waited for it becomes ACTIVE or DELETED, what failed becomes ERROR.

    Args:
        failed: reasons by object id, for objects that could not be served while the rest is.
        certain: operating statuses that no measurement changes; Octavia gets them in the same report as ACTIVE.
        first: operating statuses of objects that may not have been measured yet.
    """
    common = {"of": load_balancer_id, "upto": generation, "now": time.time()}
    by_reason: dict[str, list[str]] = defaultdict(list)
    for object_id, reason in failed.items():
        by_reason[reason].append(object_id)
    for reason, ids in by_reason.items():
        for start in range(0, len(ids), _CHUNK):
            connection.execute(_FAILED, {**common, "ids": ids[start : start + _CHUNK], "why": reason})
    if failed:
        connection.execute(_WELL_BUT, {**common, "ids": list(failed)})
    else:
        connection.execute(_WELL, common)
    if certain or first:
        _write_confirmed_statuses(connection, load_balancer_id, certain, first)


def fail_generation(connection: sa.Connection, load_balancer_id: str, generation: int, reason: str) -> None:
    """Nothing came of `generation` for now: what waited for it becomes ERROR, and still waits."""
    connection.execute(_FAILING, {"of": load_balancer_id, "upto": generation, "now": time.time(), "why": reason})


def write_observations(connection: sa.Connection, load_balancer_id: str, seen: Sequence[Observation]) -> int:
    """Write down operating statuses that differ from the recorded ones; returns how many did."""
    # One order for everybody, so that two writers wait for each other instead of deadlocking.
    ordered = sorted(seen, key=lambda one: one.object_id)
    return sum(
        _observe_chunk(connection, load_balancer_id, ordered[start : start + _CHUNK])
        for start in range(0, len(ordered), _CHUNK)
    )


def list_due_reports(connection: sa.Connection, limit: int, after: str = "") -> list[StatusReport]:
    """What may be reported now, load balancer by load balancer, children before the load balancer itself.

    Args:
        limit: the most rows to look at.
        after: the load balancer that had its turn last; the next ones come first.
    """
    rows = connection.execute(
        sa.select(status, work.c.generation.label("wanted"), work.c.applied)
        .join(work, work.c.load_balancer_id == status.c.load_balancer_id)
        .where(status.c.version > status.c.reported, work.c.committed >= work.c.generation)
        .order_by(
            sa.case((status.c.load_balancer_id > after, 0), else_=1),
            status.c.load_balancer_id,
            sa.case((status.c.kind == Kind.LOAD_BALANCER.value, 1), else_=0),
            status.c.object_id,
        )
        .limit(limit)
    )
    found = []
    for row in rows:
        held = row.pending is not None and row.provisioning != Provisioning.ERROR.value
        # A provisioning status is said once. Said again with a new operating status, it could arrive after the
        # user's next request and take back the PENDING that request has set.
        told = row.settled <= row.reported
        provisioning = None if held or told or row.provisioning is None else Provisioning(row.provisioning)
        operating = None if row.operating is None else Operating(row.operating)
        if provisioning is not None or operating is not None:
            found.append(
                StatusReport(
                    object_id=row.object_id,
                    kind=Kind(row.kind),
                    load_balancer_id=row.load_balancer_id,
                    provisioning=provisioning,
                    operating=operating,
                    version=row.version,
                )
            )
    return found


def mark_reported(connection: sa.Connection, reports: Sequence[StatusReport]) -> None:
    """Octavia has taken these; an object it was told is DELETED is forgotten."""
    by_version: dict[int, list[str]] = defaultdict(list)
    for report in reports:
        by_version[report.version].append(report.object_id)
    for version, told in by_version.items():
        for start in range(0, len(told), _CHUNK):
            # One order for everybody, so that two writers wait for each other instead of deadlocking.
            connection.execute(_TAKEN, {"ids": sorted(told)[start : start + _CHUNK], "told": version})
    deleted = [report for report in reports if report.provisioning is Provisioning.DELETED]
    for report in deleted:
        if report.kind is Kind.LOAD_BALANCER:
            _delete_load_balancer_rows(connection, report.object_id)
    gone = [report.object_id for report in deleted]
    for start in range(0, len(gone), _CHUNK):
        chunk = gone[start : start + _CHUNK]
        connection.execute(_FORGET, {"ids": chunk})
        connection.execute(_FORGET_WANTED, {"ids": chunk})


def read_operating_statuses(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> dict[str, Operating]:
    """The recorded operating status of load balancers; OFFLINE, Octavia's own first word, where none is recorded."""
    rows = connection.execute(
        sa.select(status.c.object_id, status.c.operating).where(status.c.object_id.in_(load_balancer_ids))
    )
    known = {row.object_id: Operating(row.operating) for row in rows if row.operating}
    return {one: known.get(one, Operating.OFFLINE) for one in load_balancer_ids}


def _observe_chunk(connection: sa.Connection, load_balancer_id: str, seen: Sequence[Observation]) -> int:
    rows = connection.execute(_RECORDED, {"ids": [one.object_id for one in seen], "of": load_balancer_id})
    recorded = {row.object_id: row.operating for row in rows if row.provisioning != Provisioning.DELETED.value}
    now = time.time()
    differing = [
        {
            "at": one.object_id,
            "new_operating": one.operating.value,
            "new_reason": one.reason or None,
            "new_since": now,
        }
        for one in seen
        if one.object_id in recorded and recorded[one.object_id] != one.operating.value
    ]
    if differing:
        connection.execute(_OBSERVE, differing)
    return len(differing)


def _write_confirmed_statuses(
    connection: sa.Connection, load_balancer_id: str, certain: Sequence[Observation], first: Sequence[Observation]
) -> None:
    """Write operating statuses that follow from a confirmation, where nothing else was written meanwhile.

    A first status replaces none that was measured: OFFLINE is none, since a disabled or unused object is not measured.
    """
    rows = connection.execute(_RECORDED_OF, {"of": load_balancer_id})
    recorded = {row.object_id: row.operating for row in rows if row.provisioning != Provisioning.DELETED.value}
    unmeasured = (None, Operating.OFFLINE.value)
    wanted = [*certain, *(one for one in first if recorded.get(one.object_id) in unmeasured)]
    now = time.time()
    differing = [
        {
            "at": one.object_id,
            "was": recorded[one.object_id],
            "new_operating": one.operating.value,
            "new_reason": one.reason or None,
            "new_since": now,
        }
        # One order for everybody, so that two writers wait for each other instead of deadlocking.
        for one in sorted(wanted, key=lambda one: one.object_id)
        if one.object_id in recorded and recorded[one.object_id] != one.operating.value
    ]
    if differing:
        connection.execute(_CONCLUDE, differing)


def _delete_load_balancer_rows(connection: sa.Connection, load_balancer_id: str) -> None:
    """Octavia knows that the load balancer is gone: nothing of it is kept."""
    for table in (status, wanted_object, secret, work, request, listener_statistics):
        connection.execute(table.delete().where(table.c.load_balancer_id == load_balancer_id))
