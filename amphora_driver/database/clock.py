# SPDX-License-Identifier: Apache-2.0
"""What time it is.

Invariant: whoever shares a database shares its clock. A lease that one host takes and another one finds run out is
measured by the same clock, whatever the hosts' own clocks say. One machine with SQLite has one clock anyway.

That clock may be set (by somebody who corrects it, by a host that comes back with a wrong one), and then says of what
is written down that it is old, or of tomorrow. Old is believed only by who has seen the clock go evenly for as long
(`Pace`); what ends later than anything could is not believed at all (`queue/jobs.py`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

LOG = logging.getLogger(__name__)
# Seconds for which a look at the database's clock is believed: two clocks drift apart by microseconds meanwhile.
BELIEVED_SECONDS = 30.0
# A clock that is this many seconds off from where it should be was set; one that is slewed is not (500 ppm).
_SET = 2.0


class server_time(GenericFunction[float]):  # noqa: N801 - it is written like a function in a statement
    """Seconds since 1970 when the statement began, as the database sees it; stable within it, so indexes serve."""

    type = sa.Double()
    inherit_cache = True


@compiles(server_time, "mysql")
@compiles(server_time, "mariadb")
def _mysql(_element: server_time, _compiler: SQLCompiler, **_: Any) -> str:
    # The session's time zone is UTC (engine.py): in others an hour comes twice a year.
    return "(UNIX_TIMESTAMP(NOW(6)) + 0e0)"


@compiles(server_time, "postgresql")
def _postgresql(_element: server_time, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)"


_SERVER_TIME: sa.ColumnElement[float] = server_time()


class Pace:
    """How evenly a clock goes, beside one that only goes forward. For any thread."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._set_at: float | None = None

    def note(self, ahead: float, doubt: float = 0.0) -> None:
        """Take in a look at it.

        Args:
            ahead: seconds that it is ahead of `time.monotonic()`.
            doubt: how wrong that may be, because looking took so long.
        """
        before, self._ahead = self._ahead, ahead
        if before is None or abs(ahead - before) <= _SET + doubt:
            return
        self._set_at = time.monotonic()
        LOG.warning("the clock was set by %+.1f s: nothing is old for some time that is so by it alone", ahead - before)

    def even_for(self) -> float:
        """Seconds since it was seen to be set; without end if it never was."""
        return math.inf if self._set_at is None else time.monotonic() - self._set_at


def now(connection: sa.Connection) -> sa.ColumnElement[float]:
    """The time (seconds since 1970), for a statement on this connection."""
    return sa.literal(time.time(), sa.Double) if connection.dialect.name == "sqlite" else _SERVER_TIME
