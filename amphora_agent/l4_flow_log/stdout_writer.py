# SPDX-License-Identifier: Apache-2.0
"""Lines for whoever reads this process's standard output.

Invariant: nobody is waited for. Lines that nobody takes are kept as far as there is room, and then dropped and counted;
a line is whole or not there.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

MOST_UNSENT = 1 << 18
# A pipe takes so much in one piece, or nothing.
_PIECE = 4096


class Outlet:
    """Where lines go.

    Args:
        descriptor: what they are written to. It is shared with others, and stays as it is for them.
    """

    def __init__(self, descriptor: int = 1) -> None:
        mode = os.fstat(descriptor).st_mode
        self._socket: socket.socket | None = None
        self._file = -1
        self._unsent = bytearray()
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(descriptor))
        elif stat.S_ISFIFO(mode):
            # Opened once more: whether it waits belongs to what is shared.
            self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        else:
            self._file = os.dup(descriptor)

    @property
    def full(self) -> bool:
        """Whether something waits to be taken."""
        return bool(self._unsent)

    def write(self, lines: Sequence[str]) -> int:
        """Write lines, and what is left of others; how many of these were dropped."""
        dropped = 0
        for line in lines:
            if len(self._unsent) < MOST_UNSENT:
                self._unsent += line.encode(errors="replace") + b"\n"
            else:
                dropped += 1
        with suppress(OSError):
            while self._unsent:
                del self._unsent[: self._send(bytes(self._unsent[:_PIECE]))]
        return dropped

    def _send(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        return os.write(self._file, data)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._file)
