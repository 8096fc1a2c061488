# SPDX-License-Identifier: Apache-2.0
"""Wake-up of processes on the same host through datagram sockets.

Invariant: a wake-up is a hint without content. The receiver reads the database; a receiver that misses the wake-up
finds the same work at its next poll. Sending therefore never blocks or raises, and a full or dead socket is ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

from amphora_driver.errors import ConfigurationError

CONTROLLER = "controller"
REPORTER = "reporter"

# Longest path of a Unix socket in bytes, without the terminating zero (unix(7)).
_LONGEST_PATH = 107


def wake_role(directory: str, role: str) -> None:
    """Wake up every process of this role on this host."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(f"{role}-"):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                try:
                    sender.sendto(b"!", entry.path)
                except ConnectionRefusedError:
                    # A refused connection means that the owner of the socket has died, so its file is removed.
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108 - scandir returns paths
                except OSError:
                    # A full socket already contains a message that wakes its process, so the error is ignored.
                    continue


class WakeupSocket:
    """Receives the wake-ups of one process. A context manager that removes the socket at its end."""

    def __init__(self, directory: str, role: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._path = Path(directory) / f"{role}-{os.getpid()}-{id(self):x}"
        if len(str(self._path)) > _LONGEST_PATH:
            raise ConfigurationError(
                f"listen on {self._path}",
                "the path is too long for a unix socket",
                "Set [amp_queue] socket_dir to a shorter one.",
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(str(self._path))
        self._path.chmod(0o660)

    def wait(self, seconds: float) -> bool:
        """Wait for a wake-up; True if there was one. Several pending wake-ups count as one."""
        readable, _, _ = select.select([self._socket], [], [], max(seconds, 0))
        if not readable:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
        return True

    def wake(self) -> None:
        """Wake up the waiting thread, from another thread of the same process."""
        # Without a free file descriptor, no message is sent. The process then finds the work at its next poll.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sender:
            sender.sendto(b"!", str(self._path))

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> WakeupSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
