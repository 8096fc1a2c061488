# SPDX-License-Identifier: Apache-2.0
"""The breaker's rows: what the detector thinks (`automatic`), what an operator wants (`operator`), whether it hears.

Invariant: `operator` is written by operators only, and is there only while one holds the breaker open. `automatic` is
the detector's, but an operator may close it: whoever finds it other than he left it takes it as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables_fleet import breaker

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTOMATIC = "automatic"
OPERATOR = "operator"
# Whether the detector sees: `state` is seeing or blind.
SIGHT = "sight"
SEEING, BLIND = "seeing", "blind"
CLOSED, OPEN = "closed", "open"
_MAX_REASON = 1000


class BreakerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; times in seconds since 1970, `trial_at` is when an open one lets one through for a trial."""

    name: str
    state: str
    since: float
    silent: int = 0
    watched: int = 0
    trial_at: float | None = None
    reason: str | None = None


def read_breaker_rows(connection: sa.Connection) -> dict[str, BreakerRow]:
    """All rows, by name."""
    return {row["name"]: BreakerRow(**row) for row in connection.execute(sa.select(breaker)).mappings()}


def write_breaker_row(connection: sa.Connection, row: BreakerRow) -> None:
    """Write a row, whether it is there or not."""
    values: Mapping[str, Any] = {**msgspec.structs.asdict(row), "reason": (row.reason or "")[:_MAX_REASON] or None}
    connection.execute(breaker.delete().where(breaker.c.name == row.name))
    connection.execute(breaker.insert().values(**values))


def hold_breaker_open(connection: sa.Connection, reason: str, now: float) -> None:
    """An operator holds it open."""
    write_breaker_row(connection, BreakerRow(name=OPERATOR, state=OPEN, since=now, reason=reason))


def close_breaker(connection: sa.Connection, reason: str, now: float) -> None:
    """An operator closes it: those that are silent now are believed to be dead."""
    connection.execute(breaker.delete().where(breaker.c.name == OPERATOR))
    row = read_breaker_rows(connection).get(AUTOMATIC)
    silent, watched = (row.silent, row.watched) if row is not None else (0, 0)
    write_breaker_row(
        connection, BreakerRow(name=AUTOMATIC, state=CLOSED, since=now, silent=silent, watched=watched, reason=reason)
    )
