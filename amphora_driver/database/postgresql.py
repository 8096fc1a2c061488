# SPDX-License-Identifier: Apache-2.0
"""Connections to PostgreSQL that do not wait for ever.

Invariant: an answer that does not come within the connection's patience ends the connection. The server's own limits
(statement_timeout) help only while the server runs, and TCP's only while its host is away: a server that is stopped
has a kernel that acknowledges everything.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg

if TYPE_CHECKING:
    from collections.abc import Generator

    from psycopg.waiting import Ready, Wait

T = TypeVar("T")
# Seconds between two looks at the clock while an answer is awaited.
_LOOK_EVERY = 0.5


class Connection(psycopg.Connection[Any]):
    """A connection with a limit to its patience.

    All of psycopg's waiting goes through `wait`: it is given a generator that says what it waits for, and is told
    whether that has come.
    """

    patience = 10.0

    def wait(
        self, gen: Generator[Wait, Ready | int, T], interval: float = _LOOK_EVERY, timeout: float | None = None
    ) -> T:
        return super().wait(self._limited(gen), min(interval, _LOOK_EVERY), timeout)

    def _limited(self, gen: Generator[Wait, Ready | int, T]) -> Generator[Wait, Ready | int, T]:
        until = time.monotonic() + self.patience
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until:
                    # What comes later belongs to a question nobody remembers.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer in {self.patience:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return cast("T", ended.value)


def connect(patience: float, arguments: tuple[Any, ...], options: dict[str, Any]) -> Connection:
    """Connect as psycopg would, to be patient for so many seconds."""
    connection = Connection.connect(*arguments, **options)
    connection.patience = patience
    return connection
