# SPDX-License-Identifier: Apache-2.0
"""Non-blocking writer on standard output: complete lines, and at most `MAX_BACKLOG` unread bytes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

MAX_BACKLOG = 1 << 18
# Largest write in bytes that a pipe accepts completely or not at all (pipe(7), PIPE_BUF).
_PIPE_BYTES = 4096


class StdoutWriter:
    """Writes lines to a descriptor, which other processes share; its flags are not changed."""

    def __init__(self, descriptor: int = 1) -> None:
        mode = os.fstat(descriptor).st_mode
        self._socket: socket.socket | None = None
        self._file = -1
        self._unsent = bytearray()
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(descriptor))
        elif stat.S_ISFIFO(mode):
            # The pipe is opened a second time, because O_NONBLOCK on the existing descriptor would affect other
            # processes that share it.
            self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        else:
            self._file = os.dup(descriptor)

    @property
    def has_backlog(self) -> bool:
        return bool(self._unsent)

    def write(self, lines: Sequence[str]) -> int:
        """Write buffered lines and these; returns how many of these were dropped."""
        dropped = 0
        for line in lines:
            if len(self._unsent) < MAX_BACKLOG:
                self._unsent += line.encode(errors="replace") + b"\n"
            else:
                dropped += 1
        with suppress(OSError):
            while self._unsent:
                data = bytes(self._unsent[:_PIPE_BYTES])
                link = self._socket
                sent = os.write(self._file, data) if link is None else link.send(data, socket.MSG_DONTWAIT)
                del self._unsent[:sent]
        return dropped

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._file)
