# SPDX-License-Identifier: Apache-2.0
"""What time it is.

Invariant: whoever shares a database shares its clock. A lease that one host takes and another one finds run out is
measured by the same clock, whatever the hosts' own clocks say. One machine with SQLite has one clock anyway.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

# Seconds for which a look at the database's clock is believed: two clocks drift apart by microseconds meanwhile.
BELIEVED_SECONDS = 30.0


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


def now(connection: sa.Connection) -> sa.ColumnElement[float]:
    """The time (seconds since 1970), for a statement on this connection."""
    return sa.literal(time.time(), sa.Double) if connection.dialect.name == "sqlite" else _SERVER_TIME
