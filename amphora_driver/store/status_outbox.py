# SPDX-License-Identifier: Apache-2.0
"""The outbox of statuses for Octavia.

Invariant: one row per object holds its newest status, and stays due until Octavia has received exactly that version.
No status is lost while the driver agent is down, and no old status overtakes a newer one. Many changes of an object
become one report. An object that waits for a newer generation reports no provisioning status. A load balancer reports
nothing until Octavia's own transaction has ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.bulk_update import BulkUpdate
from amphora_driver.database.rows import chunks, force_index, to_struct
from amphora_driver.database.tables import (
    desired_object,
    job,
    listener_statistics,
    object_status,
    request,
    secret,
    vip_claim,
)
from amphora_driver.database.tables_fleet import adoption
from amphora_driver.model.enums import Kind, Operating, Provisioning


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """A status report that Octavia has not received yet.

    Every amphora serves the generation `applied` of the load balancer, or the load balancer is gone.
    """

    object_id: str
    kind: Kind
    load_balancer_id: str
    provisioning: Provisioning | None
    operating: Operating | None
    version: int
    applied: int = 0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An observed operating status and its reason."""

    object_id: str
    kind: Kind
    operating: Operating
    reason: str = ""


class _Reported(msgspec.Struct, frozen=True, array_like=True):
    """The version of an object's status that Octavia has received."""

    object_id: str
    reported: int


_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_KNOWN = sa.select(object_status.c.object_id).where(object_status.c.object_id.in_(_IDS))
_EXPECT = object_status.update().where(object_status.c.object_id.in_(_IDS)).values(pending=sa.bindparam("new_pending"))
_OF_LOAD_BALANCER = object_status.c.load_balancer_id == sa.bindparam("of")
_RECORDED_OF = sa.select(object_status.c.object_id, object_status.c.operating, object_status.c.provisioning).where(
    _OF_LOAD_BALANCER
)
_OBSERVE = (
    object_status.update()
    .where(object_status.c.object_id == sa.bindparam("at"))
    .values(
        operating=sa.bindparam("new_operating"),
        reason=sa.bindparam("new_reason"),
        since=sa.bindparam("new_since"),
        version=object_status.c.version + 1,
    )
)
_RECORDED_ALL = sa.select(
    *(object_status.c.object_id, object_status.c.load_balancer_id),
    *(object_status.c.operating, object_status.c.provisioning),
).where(object_status.c.object_id.in_(_IDS))
# The UPDATE statement changes an operating status only if the database still contains the status that the caller has
# read before.
_PREVIOUS = sa.bindparam("was", type_=sa.String)
_OBSERVE_IF_UNCHANGED = _OBSERVE.where(
    sa.or_(object_status.c.operating == _PREVIOUS, sa.and_(object_status.c.operating.is_(None), _PREVIOUS.is_(None)))
)


def _provisioning_change(provisioning: Any, reason: Any) -> list[tuple[Any, Any]]:
    # In an UPDATE, MySQL and MariaDB assign columns from left to right. So `settled`, which depends on the old
    # `version`, comes first.
    return [
        ("provisioning", provisioning),
        ("since", sa.bindparam("now", type_=sa.Double)),
        ("settled", object_status.c.version + 1),
        ("version", object_status.c.version + 1),
        ("reason", reason),
    ]


_IS_WAITING = object_status.c.pending <= sa.bindparam("upto", type_=sa.BigInteger)
_STOP_WAITING: list[tuple[Any, Any]] = [("pending", None)]
_IS_REMOVED = object_status.c.object_id.in_(
    sa.select(desired_object.c.id).where(
        desired_object.c.load_balancer_id == sa.bindparam("of"), desired_object.c.removed
    )
)
# When the amphorae serve a new generation, objects in ERROR become ACTIVE, except objects that wait for a later
# generation.
_IS_SETTLED = object_status.c.pending.is_(None)
_HAS_FAILED = object_status.c.provisioning == Provisioning.ERROR.value
_SUCCEED = (
    object_status.update()
    .where(_OF_LOAD_BALANCER, sa.or_(_IS_WAITING, sa.and_(_IS_SETTLED, _HAS_FAILED)))
    .ordered_values(
        *_provisioning_change(
            sa.case((_IS_REMOVED, Provisioning.DELETED.value), else_=Provisioning.ACTIVE.value),
            sa.case((_IS_REMOVED, object_status.c.reason), else_=None),
        ),
        *_STOP_WAITING,
    )
)
_SUCCEED_EXCEPT = _SUCCEED.where(sa.or_(object_status.c.object_id.not_in(_IDS), _IS_REMOVED))
_TO_ERROR = _provisioning_change(Provisioning.ERROR.value, sa.bindparam("why", type_=sa.Text))
_FAIL = (
    object_status.update()
    .where(_OF_LOAD_BALANCER, object_status.c.object_id.in_(_IDS), ~_IS_REMOVED)
    .where(sa.or_(_IS_WAITING, sa.and_(_IS_SETTLED, ~_HAS_FAILED)))
    .ordered_values(*_TO_ERROR, *_STOP_WAITING)
)
_FAIL_AND_WAIT = object_status.update().where(_OF_LOAD_BALANCER, _IS_WAITING).ordered_values(*_TO_ERROR)
_VERSION = sa.bindparam("told", type_=sa.BigInteger)
_MARK_REPORTED = BulkUpdate(
    object_status,
    _Reported,
    {"object_id": "at"},
    {"reported": "told"},
    {"reported": "n.reported"},
    "o.reported < n.reported",
    object_status.update()
    .where(object_status.c.object_id == sa.bindparam("at"), object_status.c.reported < _VERSION)
    .values(reported=_VERSION),
)


def _lock_query(*conditions: Any) -> sa.Select[Any]:
    """Return a query that locks the rows with these conditions in the order of their ids."""
    rows = sa.select(object_status.c.object_id).where(*conditions).order_by(object_status.c.object_id)
    return sa.select(sa.func.count()).select_from(rows.with_for_update().subquery())


_LOCK_OBJECTS = _lock_query(object_status.c.object_id.in_(_IDS))
_LOCK_WAITING = _lock_query(_OF_LOAD_BALANCER, _IS_WAITING)
_LOCK_CONFIRMED = _lock_query(_OF_LOAD_BALANCER, sa.or_(_IS_WAITING, sa.and_(_IS_SETTLED, _HAS_FAILED)))
_LOCK_LOAD_BALANCER = _lock_query(_OF_LOAD_BALANCER)
_REPORT_COLUMNS = (
    *(object_status.c.object_id, object_status.c.kind, object_status.c.load_balancer_id),
    *(object_status.c.provisioning, object_status.c.operating, object_status.c.pending),
    *(object_status.c.version, object_status.c.settled, object_status.c.reported),
)
# While another provider still has a load balancer in Octavia, this provider reports nothing about it.
_IS_FOREIGN = sa.exists().where(
    adoption.c.load_balancer_id == job.c.load_balancer_id, adoption.c.ended_at.is_(None), ~adoption.c.reporting
)


def expect_confirmation(
    connection: sa.Connection,
    load_balancer_id: str,
    generation: int,
    objects: Iterable[tuple[Kind, str]],
    new: Iterable[tuple[Kind, str]] = (),
) -> None:
    """Record that objects are PENDING until `generation` is confirmed; `new` objects have no row."""
    kinds = {object_id: kind for kind, object_id in objects}
    fresh = {object_id: kind for kind, object_id in new}
    for chunk in chunks(sorted(kinds)):
        _lock_in_order(connection, _LOCK_OBJECTS, {"ids": chunk})
        found = connection.execute(_EXPECT, {"ids": chunk, "new_pending": generation}).rowcount
        if found < len(chunk):
            known = set(connection.execute(_KNOWN, {"ids": chunk}).scalars())
            fresh |= {object_id: kinds[object_id] for object_id in chunk if object_id not in known}
    common = {"load_balancer_id": load_balancer_id, "pending": generation, "since": time.time()}
    for some in chunks([{**common, "object_id": one, "kind": kind.value} for one, kind in fresh.items()]):
        connection.execute(object_status.insert(), some)


def confirm_generation(
    connection: sa.Connection,
    load_balancer_id: str,
    generation: int,
    failed: Mapping[str, str],
    certain: Sequence[Observation] = (),
    first: Sequence[Observation] = (),
) -> None:
    """Set waiting objects ACTIVE, DELETED or ERROR, because every amphora serves `generation`.

    Args:
        failed: reasons by object id, for objects that the amphorae do not serve.
        certain: operating statuses that no measurement changes; Octavia receives them in the same report as ACTIVE.
        first: initial operating statuses of objects without a measurement.
    """
    common = {"of": load_balancer_id, "upto": generation, "now": time.time()}
    if failed:
        # The statements below lock the rows of each reason, then the others. So their order is fixed before.
        connection.execute(_LOCK_LOAD_BALANCER, {"of": load_balancer_id})
    else:
        _lock_in_order(connection, _LOCK_CONFIRMED, {"of": load_balancer_id, "upto": generation})
    by_reason: dict[str, list[str]] = defaultdict(list)
    for object_id, reason in failed.items():
        by_reason[reason].append(object_id)
    for reason, ids in by_reason.items():
        for some in chunks(ids):
            connection.execute(_FAIL, {**common, "ids": some, "why": reason})
    if failed:
        connection.execute(_SUCCEED_EXCEPT, {**common, "ids": list(failed)})
    else:
        connection.execute(_SUCCEED, common)
    if certain or first:
        _write_confirmed_statuses(connection, load_balancer_id, certain, first)


def fail_generation(connection: sa.Connection, load_balancer_id: str, generation: int, reason: str) -> None:
    """Set the objects that wait for `generation` to ERROR; they continue to wait for it."""
    bound = {"of": load_balancer_id, "upto": generation}
    _lock_in_order(connection, _LOCK_WAITING, bound)
    connection.execute(_FAIL_AND_WAIT, {**bound, "now": time.time(), "why": reason})


def write_observations(connection: sa.Connection, load_balancer_id: str, seen: Sequence[Observation]) -> int:
    """Write operating statuses that differ from the recorded ones; return their number."""
    return write_all_observations(connection, {load_balancer_id: seen})


def write_all_observations(connection: sa.Connection, seen: Mapping[str, Sequence[Observation]]) -> int:
    """Write operating statuses, by load balancer, that differ from the recorded ones; return their number.

    An object of another load balancer than the recorded one is ignored.
    """
    owners = {one.object_id: load_balancer_id for load_balancer_id, some in seen.items() for one in some}
    recorded: dict[str, str | None] = {}
    for ids in chunks(sorted(owners)):
        rows = connection.execute(_RECORDED_ALL, {"ids": ids})
        recorded |= _operating(row for row in rows if owners[row.object_id] == row.load_balancer_id)
    # All writers lock rows in the order of their ids, so that no deadlock occurs.
    every = sorted((one for some in seen.values() for one in some), key=lambda one: one.object_id)
    differing = _differing(recorded, every)
    if differing:
        connection.execute(_OBSERVE, differing)
    return len(differing)


def list_due_reports(connection: sa.Connection, limit: int, after: str = "") -> list[StatusReport]:
    """Return due reports ordered by load balancer; children come before the load balancer itself.

    Ids after `after`, the last reported load balancer, come first.
    """
    rows = connection.execute(
        force_index(sa.select(*_REPORT_COLUMNS, job.c.applied), object_status, "unreported")
        .join(job, job.c.load_balancer_id == object_status.c.load_balancer_id)
        .where(object_status.c.unreported == sa.true(), job.c.committed >= job.c.generation, ~_IS_FOREIGN)
        .order_by(
            sa.case((object_status.c.load_balancer_id > after, 0), else_=1),
            object_status.c.load_balancer_id,
            sa.case((object_status.c.kind == Kind.LOAD_BALANCER.value, 1), else_=0),
            object_status.c.object_id,
        )
        .limit(limit)
    )
    found = []
    for row in rows:
        is_waiting = row.pending is not None and row.provisioning != Provisioning.ERROR.value
        # Each provisioning status is reported once. A repeated report could overwrite the PENDING of the user's next
        # request.
        is_reported = row.settled <= row.reported
        provisioning = None if is_waiting or is_reported or row.provisioning is None else Provisioning(row.provisioning)
        if provisioning is not None or row.operating is not None:
            found.append(to_struct(row, StatusReport, provisioning=provisioning))
    return found


def mark_reported(connection: sa.Connection, reports: Sequence[StatusReport]) -> None:
    """Record that Octavia has received reports; delete the rows of objects reported as DELETED."""
    _MARK_REPORTED.execute(connection, [_Reported(one.object_id, one.version) for one in reports])
    deleted = [report for report in reports if report.provisioning is Provisioning.DELETED]
    for report in deleted:
        if report.kind is Kind.LOAD_BALANCER:
            delete_load_balancer_rows(connection, report.object_id)
    for ids in chunks([report.object_id for report in deleted]):
        connection.execute(object_status.delete().where(object_status.c.object_id.in_(ids)))
        connection.execute(desired_object.delete().where(desired_object.c.id.in_(ids)))


def _lock_in_order(connection: sa.Connection, query: sa.Select[Any], bound: Mapping[str, Any]) -> None:
    """Lock the rows of the next UPDATE in the order of their ids, so that no deadlock occurs.

    Requests, confirmations, measurements and reports lock rows in this order. Other writers are rare; a deadlock with
    one is repeated. PostgreSQL locks the rows of one UPDATE in the order of its plan, and a large list of ids has
    another plan than a small one. It detects a deadlock after one second (`deadlock_timeout`). MySQL and MariaDB use an
    index in the order of the ids.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(query, bound)


def read_operating_statuses(connection: sa.Connection, load_balancer_ids: Sequence[str]) -> dict[str, Operating]:
    """Return the operating statuses of load balancers; OFFLINE, as in Octavia, if none is recorded."""
    columns = object_status.c.object_id, object_status.c.operating
    query = sa.select(*columns).where(object_status.c.object_id.in_(load_balancer_ids))
    known = {row.object_id: Operating(row.operating) for row in connection.execute(query) if row.operating}
    return {one: known.get(one, Operating.OFFLINE) for one in load_balancer_ids}


def _operating(rows: Iterable[Any]) -> dict[str, str | None]:
    """Return the recorded operating statuses by object id, without objects reported as DELETED."""
    return {row.object_id: row.operating for row in rows if row.provisioning != Provisioning.DELETED.value}


def _differing(recorded: Mapping[str, str | None], seen: Iterable[Observation]) -> list[dict[str, Any]]:
    """Return the parameters of `_OBSERVE` for the statuses that differ from the recorded ones."""
    now = time.time()
    return [
        {"at": one.object_id, "new_operating": one.operating.value, "new_reason": one.reason or None, "new_since": now}
        for one in seen
        if one.object_id in recorded and recorded[one.object_id] != one.operating.value
    ]


def _write_confirmed_statuses(
    connection: sa.Connection, load_balancer_id: str, certain: Sequence[Observation], first: Sequence[Observation]
) -> None:
    """Write operating statuses that follow from a confirmation, unless a measurement was written since.

    An initial status never replaces a measured one. OFFLINE is not measured, because it means disabled or unused.
    """
    recorded = _operating(connection.execute(_RECORDED_OF, {"of": load_balancer_id}))
    unmeasured = (None, Operating.OFFLINE.value)
    wanted = [*certain, *(one for one in first if recorded.get(one.object_id) in unmeasured)]
    # All writers lock rows in the order of their ids, so that no deadlock occurs.
    differing = _differing(recorded, sorted(wanted, key=lambda one: one.object_id))
    if differing:
        connection.execute(_OBSERVE_IF_UNCHANGED, [{**one, "was": recorded[one["at"]]} for one in differing])


def delete_load_balancer_rows(connection: sa.Connection, load_balancer_id: str) -> None:
    """Delete all rows of a load balancer after Octavia has received its DELETED.

    The claim ends with the `job` row. Housekeeping would otherwise release the VIPs again, as those of a load balancer
    that Octavia never created.
    """
    for table in (object_status, desired_object, secret, job, request, listener_statistics, vip_claim):
        connection.execute(table.delete().where(table.c.load_balancer_id == load_balancer_id))
