# SPDX-License-Identifier: Apache-2.0
"""Rows of the circuit breaker of automatic fail-overs.

`automatic` holds the failure detector's state, `operator` the operator's, `sight` the detector's ability to detect.

Invariant: only operators write `operator`, a row that exists only while an operator holds the breaker open. The failure
detector writes `automatic`. An operator may close the breaker, so the detector adopts a row that differs from its own
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables_fleet import circuit_breaker

AUTOMATIC = "automatic"
OPERATOR = "operator"
# The row `sight` records whether the failure detector receives heartbeats.
SIGHT = "sight"
SEEING, BLIND = "seeing", "blind"
CLOSED, OPEN = "closed", "open"
_MAX_REASON = 1000


class BreakerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row. An open breaker permits one trial fail-over at `trial_at`."""

    name: str
    state: str
    since: float
    silent: int = 0
    watched: int = 0
    trial_at: float | None = None
    reason: str | None = None


def read_breaker_rows(connection: sa.Connection) -> dict[str, BreakerRow]:
    """Return all rows by name."""
    return {row["name"]: BreakerRow(**row) for row in connection.execute(sa.select(circuit_breaker)).mappings()}


def write_breaker_row(connection: sa.Connection, row: BreakerRow) -> None:
    """Insert or replace a row."""
    values: Mapping[str, Any] = {**msgspec.structs.asdict(row), "reason": (row.reason or "")[:_MAX_REASON] or None}
    connection.execute(circuit_breaker.delete().where(circuit_breaker.c.name == row.name))
    connection.execute(circuit_breaker.insert().values(**values))


def hold_breaker_open(connection: sa.Connection, reason: str, now: float) -> None:
    """Hold the breaker open for an operator."""
    write_breaker_row(connection, BreakerRow(name=OPERATOR, state=OPEN, since=now, reason=reason))


def close_breaker(connection: sa.Connection, reason: str, now: float) -> None:
    """Close the breaker for an operator: amphorae that are silent now count as dead."""
    connection.execute(circuit_breaker.delete().where(circuit_breaker.c.name == OPERATOR))
    row = read_breaker_rows(connection).get(AUTOMATIC)
    silent, watched = (row.silent, row.watched) if row is not None else (0, 0)
    write_breaker_row(
        connection, BreakerRow(name=AUTOMATIC, state=CLOSED, since=now, silent=silent, watched=watched, reason=reason)
    )
