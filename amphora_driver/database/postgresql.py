# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL connections with a limit on the time for an answer.

Invariant: an answer that takes longer than the connection's time-out ends the connection. The server's own limits
(statement_timeout) need a running server process. TCP time-outs need a host that does not answer: the kernel of a host
with a stopped server process still acknowledges every packet.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

import psycopg
from psycopg.waiting import Ready, Wait

T = TypeVar("T")
_POLL_SECONDS = 0.5


class Connection(psycopg.Connection[Any]):
    """A connection that fails if an answer takes longer than `answer_timeout` seconds.

    psycopg waits in `wait` only. Its generator yields the event to wait for, and receives whether the event came.
    """

    answer_timeout = 10.0

    def wait(
        self, gen: Generator[Wait, Ready | int, T], interval: float = _POLL_SECONDS, timeout: float | None = None
    ) -> T:
        return super().wait(self._limited(gen), min(interval, _POLL_SECONDS), timeout)

    def _limited(self, gen: Generator[Wait, Ready | int, T]) -> Generator[Wait, Ready | int, T]:
        deadline = time.monotonic() + self.answer_timeout
        try:
            event = next(gen)
            while True:
                ready = yield event
                if not ready and time.monotonic() > deadline:
                    # After a time-out, psycopg would treat a late answer as the answer to the next statement. So the
                    # connection is closed.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer in {self.answer_timeout:.0f} s")
                event = gen.send(ready)
        except StopIteration as ended:
            return cast("T", ended.value)


def connect_with_timeout(answer_timeout: float, arguments: tuple[Any, ...], options: dict[str, Any]) -> Connection:
    """Connect as psycopg does, with a limit in seconds on the time for an answer."""
    connection = Connection.connect(*arguments, **options)
    connection.answer_timeout = answer_timeout
    return connection
