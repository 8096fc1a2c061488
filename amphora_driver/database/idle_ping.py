# SPDX-License-Identifier: Apache-2.0
"""Tests an idle connection of the pool before its next use, because the server may have closed it.

A connection that was used in the last second is not tested: the test takes as long as a query, and a job of a
controller needs dozens of transactions in a few milliseconds. If the server has closed such a connection, the first
statement fails, and `Database` repeats the transaction on a new connection.
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import InvalidatePoolError

TESTED_AFTER_SECONDS = 1.0
_USED_AT = "amphora_used_at"


def attach(engine: sa.Engine) -> None:
    """Test the idle connections of an engine when they leave its pool."""
    dialect = engine.dialect

    def used(_connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    def check(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info[_USED_AT] <= TESTED_AFTER_SECONDS:
            return
        try:
            alive = dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            if not dialect.is_disconnect(error, connection, None):
                raise
            alive = False
        if not alive:
            # After this error, SQLAlchemy opens a new connection and also replaces all older connections of the pool.
            raise InvalidatePoolError

    event.listen(engine, "connect", used)
    event.listen(engine, "checkin", used)
    event.listen(engine, "checkout", check)
