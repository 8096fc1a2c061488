# SPDX-License-Identifier: Apache-2.0
"""The clock that all processes with one database share.

Invariant: leases, deadlines and ages use the database server's clock, so the hosts' own clocks do not matter. With
SQLite the clock of the one machine is used.

An operator or a time service may set that clock, forwards or backwards. Row ages are then wrong. A caller relies on an
age only if `ClockJumpMonitor` has seen no jump for that long. `queue/jobs.py` clamps due times in the far future.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

LOG = logging.getLogger(__name__)
# Seconds for which a measured offset of the database clock is used. The next measurement corrects the slow drift
# between the local clock and the database clock.
OFFSET_VALID_SECONDS = 30.0
# A change of the database clock by more than two seconds counts as a jump. NTP changes a clock more slowly, by at most
# 500 ppm.
JUMP_SECONDS = 2.0


class server_time(GenericFunction[float]):  # noqa: N801 - SQL statements use the class like a function
    """Database time in seconds since 1970; the time is constant during a statement, so indexes apply."""

    type = sa.Double()
    inherit_cache = True


@compiles(server_time, "mysql")
@compiles(server_time, "mariadb")
def _mysql(_element: server_time, _compiler: SQLCompiler, **_: Any) -> str:
    # Each connection uses the time zone UTC. In a local time zone, UNIX_TIMESTAMP(NOW()) would be ambiguous in the hour
    # that daylight saving time repeats.
    return "(UNIX_TIMESTAMP(NOW(6)) + 0e0)"


@compiles(server_time, "postgresql")
def _postgresql(_element: server_time, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)"


SERVER_TIME: sa.ColumnElement[float] = server_time()


class ClockJumpMonitor:
    """Detects jumps of a clock relative to `time.monotonic()`. Thread-safe."""

    def __init__(self) -> None:
        self._offset: float | None = None
        self._jumped_at: float | None = None

    def record_offset(self, offset: float, uncertainty: float = 0.0) -> None:
        """Record how many seconds the clock is ahead of `time.monotonic()`, and log a jump.

        The duration of the measurement causes an `uncertainty` in seconds.
        """
        before, self._offset = self._offset, offset
        if before is None or abs(offset - before) <= JUMP_SECONDS + uncertainty:
            return
        self._jumped_at = time.monotonic()
        LOG.warning(
            "the database clock jumped by %+.1f s, so this process ignores the ages of rows written before the jump",
            offset - before,
        )

    def seconds_since_clock_jump(self) -> float:
        """Seconds since the last observed jump; infinity if there was none."""
        return math.inf if self._jumped_at is None else time.monotonic() - self._jumped_at


def now(connection: sa.Connection) -> sa.ColumnElement[float]:
    """Expression for the current time (seconds since 1970) in a statement on this connection."""
    return sa.literal(time.time(), sa.Double) if connection.dialect.name == "sqlite" else SERVER_TIME
