# SPDX-License-Identifier: Apache-2.0
"""HAProxy's sockets: one connection for each question.

Invariant: this module imports almost nothing, because the responder is a process of its own with little memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from amphora_agent.errors import HaproxyError

ANSWER_SECONDS = 10.0


class Socket:
    """One of HAProxy's sockets.

    With `half_close` the client shuts down its sending side after the question. The master of HAProxy 2.6 completes its
    answer only then; a worker would close the connection.
    """

    def __init__(self, path: object, *, half_close: bool = False) -> None:
        self._path = path
        self._half_close = half_close

    def ask(
        self,
        question: str,
        shown: str = "",
        *,
        seconds: float = ANSWER_SECONDS,
        most: int | None = None,
        between: Callable[[], None] | None = None,
    ) -> str:
        """Send one or several commands, with semicolons between them; return the answer.

        Errors contain `shown` instead of a question with a secret. Each part of the answer has a time-out in `seconds`.
        An answer ends after `most` bytes. Raises HaproxyError without an answer. `between` is called before each part
        is read. HAProxy continues a long answer only when its former parts are read.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(seconds)
                connection.connect(str(self._path))
                connection.sendall(question.encode() + b"\n")
                if self._half_close:
                    connection.shutdown(socket.SHUT_WR)
                parts, size = [], 0
                while most is None or size < most:
                    if between is not None:
                        between()
                    if not (data := connection.recv(65536)):
                        break
                    parts.append(data)
                    size += len(data)
        except OSError as error:
            raise HaproxyError(f"send '{shown or question}' to HAProxy", f"no answer: {error}") from error
        return b"".join(parts).decode(errors="replace")

    def order(self, command: str, success: str = "") -> None:
        """Send commands as `ask` does; raise HaproxyError if the answer differs from `success`."""
        answer = self.ask(command).strip()
        if answer != success:
            raise HaproxyError(f"run the command '{command}' in HAProxy", answer or "the answer is empty")
