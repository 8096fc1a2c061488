# SPDX-License-Identifier: Apache-2.0
"""Listener statistics: from heartbeats to the table.

Invariant: counters are absolute and never fall, neither in a batch nor in the table, whoever writes first and however
often the same batch is written: several health managers hear the same amphora. An amphora is heard only about
listeners of its own load balancer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.tables import listener_statistics
from amphora_driver.health.status import ListenerReport, Report

# (listener id, amphora id)
Key = tuple[str, str]

_TABLE = listener_statistics
_COUNTERS = ("bytes_in", "bytes_out", "request_errors", "total_connections")
_VALUES = ("active_connections", *_COUNTERS)
# A few of these can be added up in a 64 bit column. At 100 Gbit/s it takes an amphora a year and a half to get there.
_LARGEST = 1 << 59
# Databases limit the number of values in one IN (...).
_CHUNK = 500


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one amphora says of one listener: a row of `listener_statistics`."""

    listener_id: str
    amphora_id: str
    load_balancer_id: str
    active_connections: int
    bytes_in: int
    bytes_out: int
    request_errors: int
    total_connections: int

    @property
    def key(self) -> Key:
        """The row's primary key."""
        return self.listener_id, self.amphora_id


class Batch(msgspec.Struct, frozen=True):
    """Rows to write. `fallen` counts counters that were lower than before, `odd` reports that were not taken."""

    rows: tuple[Row, ...]
    fallen: int = 0
    odd: int = 0


def changed(
    reports: Mapping[str, Report],
    load_balancers: Mapping[str, str],
    listeners: Mapping[str, str],
    flushed: Mapping[Key, Row],
) -> Batch:
    """Which counters differ from those written down last.

    Args:
        reports: what amphorae say, by amphora id (`Ledger.reports`).
        load_balancers: the load balancer of each amphora; what others say is not taken.
        listeners: the load balancer of each listener; what is said of others is not taken.
        flushed: the rows written down last; see `remember`.
    """
    rows: list[Row] = []
    fallen = odd = 0
    for amphora_id, report in reports.items():
        load_balancer_id = load_balancers.get(amphora_id)
        for listener_id, said in report.listeners.items():
            if load_balancer_id is None or listeners.get(listener_id) != load_balancer_id or not _sane(said):
                odd += 1
                continue
            before = flushed.get((listener_id, amphora_id))
            row = _row(listener_id, amphora_id, load_balancer_id, said)
            if before is not None:
                row, fell = _not_below(row, before)
                fallen += fell
            if row != before:
                rows.append(row)
    return Batch(tuple(rows), fallen, odd)


def ended(flushed: Mapping[Key, Row], speaking: Collection[str]) -> tuple[Row, ...]:
    """The rows of amphorae that are silent while they still seem to have connections, without these.

    Args:
        flushed: the rows written down last.
        speaking: the amphorae that are heard.
    """
    return tuple(
        msgspec.structs.replace(row, active_connections=0)
        for (_, amphora_id), row in flushed.items()
        if row.active_connections and amphora_id not in speaking
    )


def remember(flushed: dict[Key, Row], rows: Iterable[Row]) -> None:
    """Note that these rows are written down, once their transaction is."""
    flushed.update((row.key, row) for row in rows)


def store(connection: sa.Connection, rows: Sequence[Row]) -> int:
    """Write a batch, within the caller's transaction; `version` grows where something changed.

    Args:
        connection: of `Database.write`.
        rows: at most one for each listener and amphora.

    Returns:
        How many counters the table knew to be higher; the higher ones stay.
    """
    fallen = 0
    # One order for everybody, so that two writers wait for each other instead of deadlocking.
    ordered = sorted(rows, key=lambda row: row.key)
    for begin in range(0, len(ordered), _CHUNK):
        fallen += _store_chunk(connection, ordered[begin : begin + _CHUNK])
    return fallen


def _store_chunk(connection: sa.Connection, rows: Sequence[Row]) -> int:
    # By listener only: every database finds rows through the first column of the key, not all through pairs.
    found = connection.execute(
        sa.select(_TABLE.c.listener_id, _TABLE.c.amphora_id, *(_TABLE.c[name] for name in _COUNTERS)).where(
            _TABLE.c.listener_id.in_(sorted({row.listener_id for row in rows}))
        )
    )
    known = {(one.listener_id, one.amphora_id): one for one in found}
    old = [row for row in rows if row.key in known]
    new = [row for row in rows if row.key not in known]
    if old:
        connection.execute(_UPDATE, [_bound(row) for row in old])
    if new:
        _insert(connection, new)
    return sum(getattr(row, name) < getattr(known[row.key], name) for row in old for name in _COUNTERS)


def _insert(connection: sa.Connection, rows: Sequence[Row]) -> None:
    statement = _TABLE.insert().values(version=1, reported=0)
    try:
        with connection.begin_nested():
            connection.execute(statement, [msgspec.structs.asdict(row) for row in rows])
    except IntegrityError:
        # Another health manager heard the same amphora for the first time in this very moment.
        for row in rows:
            try:
                with connection.begin_nested():
                    connection.execute(statement, msgspec.structs.asdict(row))
            except IntegrityError:
                connection.execute(_UPDATE, _bound(row))


def _new(name: str) -> sa.BindParameter[int]:
    # Typed: within CASE a database cannot always tell.
    return sa.bindparam(f"new_{name}", type_=sa.BigInteger)


def _update() -> sa.Update:
    """Take the higher of each counter, and only if that makes a difference: a batch may be written twice."""
    higher = [_TABLE.c[name] < _new(name) for name in _COUNTERS]
    active = _new("active_connections")
    values: dict[str, Any] = {
        name: sa.case((condition, _new(name)), else_=_TABLE.c[name])
        for name, condition in zip(_COUNTERS, higher, strict=True)
    }
    return (
        _TABLE.update()
        .where(_TABLE.c.listener_id == sa.bindparam("at_listener"), _TABLE.c.amphora_id == sa.bindparam("at_amphora"))
        .where(sa.or_(_TABLE.c.active_connections != active, *higher))
        .values(version=_TABLE.c.version + 1, active_connections=active, **values)
    )


_UPDATE = _update()


def _bound(row: Row) -> dict[str, Any]:
    bound: dict[str, Any] = {f"new_{name}": getattr(row, name) for name in _VALUES}
    return {**bound, "at_listener": row.listener_id, "at_amphora": row.amphora_id}


def _row(listener_id: str, amphora_id: str, load_balancer_id: str, said: ListenerReport) -> Row:
    return Row(
        listener_id=listener_id,
        amphora_id=amphora_id,
        load_balancer_id=load_balancer_id,
        active_connections=said.active_connections,
        bytes_in=said.bytes_in,
        bytes_out=said.bytes_out,
        request_errors=said.request_errors,
        total_connections=said.total_connections,
    )


def _not_below(row: Row, before: Row) -> tuple[Row, int]:
    """The row with no counter below what it was, and how many were: agents promise that none is."""
    lower = {name: getattr(before, name) for name in _COUNTERS if getattr(row, name) < getattr(before, name)}
    return (msgspec.structs.replace(row, **lower), len(lower)) if lower else (row, 0)


def _sane(said: ListenerReport) -> bool:
    return (
        0 <= said.active_connections < _LARGEST
        and 0 <= said.bytes_in < _LARGEST
        and 0 <= said.bytes_out < _LARGEST
        and 0 <= said.request_errors < _LARGEST
        and 0 <= said.total_connections < _LARGEST
    )
