# SPDX-License-Identifier: Apache-2.0
"""HAProxy's sockets, asked one question at a time.

Invariant: imports next to nothing. The responder (amphora_agent/responder) is a process of its own, and what is
imported here it pays for in memory.
"""

from __future__ import annotations

import socket

from amphora_agent.errors import HaproxyError

ANSWER_SECONDS = 10.0


class Socket:
    """One of HAProxy's sockets: a connection for each question.

    Args:
        path: of the socket.
        half_close: the master's socket of 2.6 answers to the end only after its peer has said its last word; the
            worker's one takes that for a farewell.
    """

    def __init__(self, path: object, *, half_close: bool = False) -> None:
        self._path = path
        self._half_close = half_close

    def ask(self, question: str, shown: str = "", *, seconds: float = ANSWER_SECONDS, most: int | None = None) -> str:
        """Ask and return the answer.

        Args:
            question: a command, or several with semicolons between them.
            shown: what errors say instead of the question, if that holds a secret.
            seconds: to wait for each piece of the answer.
            most: bytes; what comes after them is not read.

        Raises:
            HaproxyError: nobody answers.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(seconds)
                connection.connect(str(self._path))
                connection.sendall(question.encode() + b"\n")
                if self._half_close:
                    connection.shutdown(socket.SHUT_WR)
                parts, size = [], 0
                while (most is None or size < most) and (data := connection.recv(65536)):
                    parts.append(data)
                    size += len(data)
        except OSError as error:
            raise HaproxyError(f"ask HAProxy '{shown or question}'", f"no answer: {error}") from error
        return b"".join(parts).decode(errors="replace")

    def order(self, command: str, success: str = "") -> None:
        """Give a command, or several with semicolons between them, whose answer is known.

        Raises:
            HaproxyError: the answer is another one.
        """
        answer = self.ask(command).strip()
        if answer != success:
            raise HaproxyError(f"have HAProxy do '{command}'", answer or "it said nothing")
