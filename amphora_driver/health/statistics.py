# SPDX-License-Identifier: Apache-2.0
"""Writes listener statistics from heartbeats to the database.

Invariant: counters are absolute and never decrease, neither in a batch nor in the table. The invariant holds for any
order and any repetition of writes, because several health managers receive the heartbeats of one amphora.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.bulk_update import BulkUpdate
from amphora_driver.database.tables import listener_statistics
from amphora_driver.health.status import ListenerReport, Report

# Listener id and amphora id: the primary key of `listener_statistics`.
Key = tuple[str, str]

_TABLE = listener_statistics
_COUNTERS = ("bytes_in", "bytes_out", "request_errors", "total_connections")
_VALUES = ("active_connections", *_COUNTERS)
_values_of = attrgetter(*_VALUES)
_key_of = attrgetter("listener_id", "amphora_id")
# Limit of a valid counter, so that the sum of several counters fits into 64 bits. A byte counter needs 1.5 years at 100
# Gbit/s to reach it.
_MAX_COUNTER = 1 << 59
# Maximum number of rows that one query handles, because databases limit the number of values in `IN (...)`.
_CHUNK = 500


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
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
        return self.listener_id, self.amphora_id


def changed_rows(
    reports: Mapping[str, Report],
    load_balancer_id: str,
    listener_ids: Collection[str],
    written: Mapping[Key, Row],
    live: Collection[str] | None = None,
) -> list[Row]:
    """Return the rows of one load balancer that differ from the last written rows.

    The result contains no reports about other listeners and no impossible values. The reports have amphora ids as keys.
    An amphora that is not in `live` has no open connections; None means that all are live.
    """
    rows: list[Row] = []
    for amphora_id, report in reports.items():
        for listener_id, reported in report.listeners.items():
            if listener_id not in listener_ids or not _is_plausible(reported):
                continue
            before = written.get((listener_id, amphora_id))
            known: Row | ListenerReport = reported if before is None else before
            # The health manager creates several thousand rows per second. Named parameters are faster than a loop over
            # the counters.
            row = Row(
                listener_id=listener_id,
                amphora_id=amphora_id,
                load_balancer_id=load_balancer_id,
                active_connections=reported.active_connections if live is None or amphora_id in live else 0,
                bytes_in=max(reported.bytes_in, known.bytes_in),
                bytes_out=max(reported.bytes_out, known.bytes_out),
                request_errors=max(reported.request_errors, known.request_errors),
                total_connections=max(reported.total_connections, known.total_connections),
            )
            if row != before:
                rows.append(row)
    return rows


def closed_connections(written: Mapping[Key, Row], live: Collection[str]) -> tuple[Row, ...]:
    """Return the rows of amphorae that are not live and have open connections, with 0 connections."""
    stale = (row for row in written.values() if row.active_connections and row.amphora_id not in live)
    return tuple(msgspec.structs.replace(row, active_connections=0) for row in stale)


def record_written(written: dict[Key, Row], rows: Iterable[Row]) -> None:
    """Add rows to the last written rows, after the commit of their transaction."""
    written.update((_key_of(row), row) for row in rows)


def write_rows(connection: sa.Connection, rows: Sequence[Row], recorded: Container[Key] = frozenset()) -> None:
    """Write at most one row for each listener and amphora, in the caller's transaction.

    A counter that is higher in the table keeps the higher value. `version` grows in each row that changes. The table
    has rows with the keys in `recorded`.
    """
    # All writers sort the rows by primary key. Locks in different orders could cause a deadlock.
    ordered = sorted(rows, key=_key_of)
    unknown = [row for row in ordered if row.key not in recorded]
    missing: set[Key] = set()
    for begin in range(0, len(unknown), _CHUNK):
        missing |= _missing(connection, unknown[begin : begin + _CHUNK])
    _UPDATE_ALL.execute(connection, [row for row in ordered if row.key not in missing] if missing else ordered)
    if missing:
        _insert(connection, [row for row in ordered if row.key in missing])


def _missing(connection: sa.Connection, rows: Sequence[Row]) -> set[Key]:
    """Return the keys without a row in the table."""
    # Some databases use no index for pairs of columns. So the query selects by listener id, the first column of the
    # primary key.
    listener_ids = sorted({row.listener_id for row in rows})
    statement = sa.select(_TABLE.c.listener_id, _TABLE.c.amphora_id).where(_TABLE.c.listener_id.in_(listener_ids))
    known = {(one.listener_id, one.amphora_id) for one in connection.execute(statement)}
    return {row.key for row in rows if row.key not in known}


def _insert(connection: sa.Connection, rows: Sequence[Row]) -> None:
    statement = _TABLE.insert().values(version=1, reported=0)
    try:
        with connection.begin_nested():
            connection.execute(statement, [msgspec.structs.asdict(row) for row in rows])
    except IntegrityError:
        # Another health manager may have inserted one of these rows. So the rows are inserted one by one, and an
        # existing row is updated.
        if len(rows) == 1:
            connection.execute(_UPDATE, _UPDATE_ALL.parameters(rows[0]))
            return
        for row in rows:
            _insert(connection, [row])


def _new(name: str) -> sa.BindParameter[int]:
    # The parameter has an explicit type, because some databases cannot infer the type of a parameter inside CASE.
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
_UPDATE_ALL = BulkUpdate(
    _TABLE,
    Row,
    {"listener_id": "at_listener", "amphora_id": "at_amphora"},
    {name: f"new_{name}" for name in _VALUES},
    {
        "version": "o.version + 1",
        "active_connections": "n.active_connections",
        **{name: f"GREATEST(o.{name}, n.{name})" for name in _COUNTERS},
    },
    " OR ".join(("o.active_connections <> n.active_connections", *(f"o.{name} < n.{name}" for name in _COUNTERS))),
    _UPDATE,
)


def _is_plausible(reported: ListenerReport) -> bool:
    values: tuple[int, ...] = _values_of(reported)
    return min(values) >= 0 and max(values) < _MAX_COUNTER
