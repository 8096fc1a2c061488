# SPDX-License-Identifier: Apache-2.0
"""The control socket of the L4 daemon: a line of JSON as request, and a line or text as answer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from amphora_agent.errors import AgentError, ConfigurationRefused
from amphora_agent.l4.event_loop import EventLoop, Timer, make_nonblocking
from amphora_agent.l4.stderr_log import log

TIMEOUT_SECONDS = 10.0
MAX_REQUEST_BYTES = 64 << 20
_READ_BYTES = 1 << 18
_BACKLOG = 32
# Pause in seconds after a failed accept(), which would otherwise fail in a busy loop.
_PAUSE_SECONDS = 0.1

HandleRequest = Callable[[dict[str, Any]], dict[str, Any] | str]


class ControlSocket:
    """A listening socket with a file ``mode``.

    An existing socket at ``path`` belongs to an ended process and is replaced. ``handle_request`` returns the answer to
    a request; it raises AgentError, ValueError, KeyError or TypeError.
    """

    def __init__(self, loop: EventLoop, path: str, handle_request: HandleRequest, mode: int = 0o600) -> None:
        self._loop = loop
        self._path = path
        self._handle_request = handle_request
        self.connections: set[_Connection] = set()
        self._pause_timer: Timer | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 (pathlib needs a megabyte)
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
        loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # accept() fails when the L4 daemon has reached its limit of open files. So the control socket pauses.
            log(f"the control socket of the L4 daemon accepts no connections for {_PAUSE_SECONDS} s: {error}")
            self._loop.remove(self._listener)
            listen = partial(self._loop.add_reader, self._listener, self._accept)
            self._pause_timer = self._loop.call_at(time.monotonic() + _PAUSE_SECONDS, listen)
            return
        ready = make_nonblocking(connection)
        self.connections.add(_Connection(self._loop, ready, self))

    def reply(self, line: bytes) -> bytes:
        try:
            answer = self._handle_request(json.loads(line))
        except AgentError as error:
            document = {name: getattr(error, name) for name in ("wanted", "happened", "remedy", "object_id")}
            answer = {"error": {**document, "refused": isinstance(error, ConfigurationRefused)}}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"error": _unexpected_error(error, refused=True)}
        except Exception as error:  # noqa: BLE001 (checks continue after any error)
            answer = {"error": _unexpected_error(error, refused=False)}
            import traceback  # noqa: PLC0415 (rarely needed, saves memory)

            log(
                "the L4 daemon failed to process a request of the agent because of an unexpected error, "
                f"and continues: {''.join(traceback.format_exception(error)).rstrip()}"
            )
        if isinstance(answer, str):
            return answer.encode()
        return json.dumps(answer, separators=(",", ":")).encode() + b"\n"

    def close(self) -> None:
        for connection in list(self.connections):
            connection.end()
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.remove(self._listener)
        self._listener.close()


class _Connection:
    def __init__(self, loop: EventLoop, connection: socket.socket, server: ControlSocket) -> None:
        self._loop = loop
        self._socket = connection
        self._server = server
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._timer: Timer = loop.call_at(time.monotonic() + TIMEOUT_SECONDS, self.end)
        loop.add_reader(connection, self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data or len(self._received) > MAX_REQUEST_BYTES:
            self.end()
        elif data.endswith(b"\n"):
            self._loop.remove(self._socket)
            # The request is complete, so its timer ends. A new timer limits the time for the answer.
            self._timer.cancel()
            self._unsent = memoryview(self._server.reply(bytes(self._received)))
            self._timer = self._loop.call_at(time.monotonic() + TIMEOUT_SECONDS, self.end)
            self._received.clear()
            self._loop.add_writer(self._socket, self._write)
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
        self._loop.remove(self._socket)
        self._socket.close()
        self._server.connections.discard(self)


def _unexpected_error(error: Exception, *, refused: bool) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    return {"wanted": "serve UDP and SCTP listeners", "happened": text, "remedy": "", "refused": refused}
