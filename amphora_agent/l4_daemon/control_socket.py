# SPDX-License-Identifier: Apache-2.0
"""The checker's socket: a line of JSON each way (or a text for an answer), one question for each connection.

Invariant: who asks slowly, or does not take its answer, holds up nobody; who asks what is not known is told so.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from amphora_agent.errors import AgentError, ConfigurationRefused
from amphora_agent.l4.event_loop import Loop, Timer, roomy

LONGEST_SECONDS = 10.0
LARGEST_QUESTION = 64 << 20
_PIECE = 1 << 18
_BACKLOG = 32
# Who cannot take anybody in asks again after so long, instead of all the time.
_REST_SECONDS = 0.1

Answer = Callable[[dict[str, Any]], dict[str, Any] | str]


class Control:
    """Listens while it exists.

    Args:
        path: of the socket; one that is there already belonged to somebody who is gone.
        answer: what a question is answered with; raises AgentError, ValueError, KeyError, TypeError.
        mode: of the socket.
    """

    def __init__(self, loop: Loop, path: str, answer: Answer, mode: int = 0o600) -> None:
        self._loop = loop
        self._path = path
        self._answer = answer
        self._open: set[_Talk] = set()
        self._rest: Timer | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 (pathlib is a megabyte)
            before = os.umask(0o777 & ~mode)
            try:
                self._listener.bind(path)
            finally:
                os.umask(before)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        loop.read(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # all files that it may have are open, or those of the machine
            _say(f"nobody is let in for {_REST_SECONDS} s: {error}")
            self._loop.forget(self._listener)
            self._rest = self._loop.at(time.monotonic() + _REST_SECONDS, self._listen)
            return
        self._open.add(_Talk(self._loop, roomy(connection), self._reply, self._open.discard))

    def _listen(self) -> None:
        self._loop.read(self._listener, self._accept)

    def _reply(self, line: bytes) -> bytes:
        try:
            said = self._answer(json.loads(line))
        except AgentError as error:
            said = {"error": {**_plain(error), "refused": isinstance(error, ConfigurationRefused)}}
        except (ValueError, KeyError, TypeError) as error:
            said = {"error": _unforeseen(error, refused=True)}
        except Exception as error:  # noqa: BLE001 (members are checked whatever a question has done)
            said = {"error": _unforeseen(error, refused=False)}
            _complain(error)
        if isinstance(said, str):
            return said.encode()
        return json.dumps(said, separators=(",", ":")).encode() + b"\n"

    def close(self) -> None:
        for talk in list(self._open):
            talk.end()
        if self._rest is not None:
            self._rest.cancel()
        self._loop.forget(self._listener)
        self._listener.close()


class _Talk:
    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        reply: Callable[[bytes], bytes],
        ended: Callable[[_Talk], None],
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._reply = reply
        self._ended = ended
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._timer: Timer = loop.at(time.monotonic() + LONGEST_SECONDS, self.end)
        loop.read(connection, self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data or len(self._received) > LARGEST_QUESTION:
            self.end()
        elif data.endswith(b"\n"):
            self._loop.forget(self._socket)
            self._timer.cancel()  # how long it takes to find an answer is not the asker's fault
            self._unsent = memoryview(self._reply(bytes(self._received)))
            self._timer = self._loop.at(time.monotonic() + LONGEST_SECONDS, self.end)
            self._received.clear()
            self._loop.written(self._socket, self._write)
            self._write()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = memoryview(b"")
        if not self._unsent:
            self.end()

    def end(self) -> None:
        self._timer.cancel()
        self._loop.forget(self._socket)
        self._socket.close()
        self._ended(self)


def _plain(error: AgentError) -> dict[str, Any]:
    return {
        "wanted": error.wanted,
        "happened": error.happened,
        "remedy": error.remedy,
        "object_id": error.object_id,
    }


def _unforeseen(error: Exception, *, refused: bool) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    return {"wanted": "serve UDP and SCTP listeners", "happened": text, "remedy": "", "refused": refused}


def _complain(error: Exception) -> None:
    import traceback  # noqa: PLC0415 (seldom needed, and paid for in memory)

    _say("".join(traceback.format_exception(error)).rstrip())


def _say(text: str) -> None:
    sys.stderr.write(f"checker: {text}\n")
    sys.stderr.flush()
