# SPDX-License-Identifier: Apache-2.0
"""Writes listener statistics from heartbeats to the database.

Invariant: counters are absolute and never decrease, neither in a batch nor in the table. That holds for any order and
any repetition of writes, because several health managers receive the heartbeats of one amphora. Values for listeners of
another load balancer are refused.
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
# A 64-bit column holds the sum of several such values. At 100 Gbit/s an amphora needs a year and a half to reach it.
_MAX_COUNTER = 1 << 59
# Databases limit the number of values in one IN (...).
_CHUNK = 500


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one listener on one amphora: a row of `listener_statistics`."""

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
        """The primary key of the row."""
        return self.listener_id, self.amphora_id


class Batch(msgspec.Struct, frozen=True):
    """Rows to write.

    Attributes:
        decreased: number of counters that were lower than the written ones.
        refused: number of listener reports that were refused.
    """

    rows: tuple[Row, ...]
    decreased: int = 0
    refused: int = 0


def changed_rows(
    reports: Mapping[str, Report],
    load_balancers: Mapping[str, str],
    listeners: Mapping[str, str],
    written: Mapping[Key, Row],
) -> Batch:
    """Return the rows that differ from the last written rows.

    Args:
        reports: the reports by amphora id (`AmphoraReports.live_reports`).
        load_balancers: the load balancer of each amphora; reports of other amphorae are refused.
        listeners: the load balancer of each listener; reports about other listeners are refused.
        written: the last written rows; see `record_written`.
    """
    rows: list[Row] = []
    decreased = refused = 0
    for amphora_id, report in reports.items():
        load_balancer_id = load_balancers.get(amphora_id)
        for listener_id, reported in report.listeners.items():
            own = load_balancer_id is not None and listeners.get(listener_id) == load_balancer_id
            if load_balancer_id is None or not own or not _is_plausible(reported):
                refused += 1
                continue
            before = written.get((listener_id, amphora_id))
            row = _build_row(listener_id, amphora_id, load_balancer_id, reported)
            if before is not None:
                row, lower = _raise_to(row, before)
                decreased += lower
            if row != before:
                rows.append(row)
    return Batch(tuple(rows), decreased, refused)


def closed_connections(written: Mapping[Key, Row], live: Collection[str]) -> tuple[Row, ...]:
    """Return the rows of silent amphorae with open connections, with the number of connections set to 0.

    Args:
        written: the last written rows.
        live: the amphorae with unexpired heartbeats.
    """
    return tuple(
        msgspec.structs.replace(row, active_connections=0)
        for (_, amphora_id), row in written.items()
        if row.active_connections and amphora_id not in live
    )


def record_written(written: dict[Key, Row], rows: Iterable[Row]) -> None:
    """Add rows to the last written rows, after their transaction is committed."""
    written.update((row.key, row) for row in rows)


def write_rows(connection: sa.Connection, rows: Sequence[Row]) -> int:
    """Write a batch in the caller's transaction. `version` grows in each row that changes.

    Args:
        connection: of `Database.write`.
        rows: at most one for each listener and amphora.

    Returns:
        The number of counters that were higher in the table. They keep the higher value.
    """
    decreased = 0
    # All writers use one order, which prevents deadlocks.
    ordered = sorted(rows, key=lambda row: row.key)
    for begin in range(0, len(ordered), _CHUNK):
        decreased += _write_chunk(connection, ordered[begin : begin + _CHUNK])
    return decreased


def _write_chunk(connection: sa.Connection, rows: Sequence[Row]) -> int:
    # By listener only: every database uses the index for the first column of the key, but not all for pairs.
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
        # Another health manager has inserted rows of the same amphora meanwhile.
        for row in rows:
            try:
                with connection.begin_nested():
                    connection.execute(statement, msgspec.structs.asdict(row))
            except IntegrityError:
                connection.execute(_UPDATE, _bound(row))


def _new(name: str) -> sa.BindParameter[int]:
    # Typed, because not every database infers the type within CASE.
    return sa.bindparam(f"new_{name}", type_=sa.BigInteger)


def _update() -> sa.Update:
    """Return an UPDATE that keeps the higher value of each counter, and skips rows without a difference."""
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


def _build_row(listener_id: str, amphora_id: str, load_balancer_id: str, reported: ListenerReport) -> Row:
    return Row(
        listener_id=listener_id,
        amphora_id=amphora_id,
        load_balancer_id=load_balancer_id,
        active_connections=reported.active_connections,
        bytes_in=reported.bytes_in,
        bytes_out=reported.bytes_out,
        request_errors=reported.request_errors,
        total_connections=reported.total_connections,
    )


def _raise_to(row: Row, before: Row) -> tuple[Row, int]:
    """Return the row with no counter lower than before, and the number of counters that were lower."""
    lower = {name: getattr(before, name) for name in _COUNTERS if getattr(row, name) < getattr(before, name)}
    return (msgspec.structs.replace(row, **lower), len(lower)) if lower else (row, 0)


def _is_plausible(reported: ListenerReport) -> bool:
    return (
        0 <= reported.active_connections < _MAX_COUNTER
        and 0 <= reported.bytes_in < _MAX_COUNTER
        and 0 <= reported.bytes_out < _MAX_COUNTER
        and 0 <= reported.request_errors < _MAX_COUNTER
        and 0 <= reported.total_connections < _MAX_COUNTER
    )
