# SPDX-License-Identifier: Apache-2.0
"""Waking a process of this host without making it poll.

Invariant: a ring is a hint and carries nothing. Whoever hears it looks at the database; whoever misses it finds the
same there at the next look. So ringing never blocks, never fails loudly, and a full or dead socket is no trouble.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

from amphora_driver.errors import ConfigurationError

# The roles that can be woken.
CONTROLLER = "controller"
REPORTER = "reporter"

# sun_path is 108 bytes including the terminating zero.
_LONGEST_PATH = 107


def ring(directory: str, role: str) -> None:
    """Wake every process of this role on this host."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(f"{role}-"):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                try:
                    sender.sendto(b"!", entry.path)
                except ConnectionRefusedError:
                    # Its process died without hanging up.
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108 - scandir speaks in paths
                except OSError:
                    # Full: it has been rung already.
                    continue


class Doorbell:
    """One process's bell; a context manager, so that its socket does not outlive it."""

    def __init__(self, directory: str, role: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._path = Path(directory) / f"{role}-{os.getpid()}-{id(self):x}"
        if len(str(self._path)) > _LONGEST_PATH:
            raise ConfigurationError(
                f"listen on {self._path}",
                "the path is too long for a unix socket",
                "Set [queue] doorbell_dir to a shorter one.",
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(str(self._path))
        self._path.chmod(0o660)

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, at most so long; True if there was one. Rings that came together count as one."""
        readable, _, _ = select.select([self._socket], [], [], max(seconds, 0))
        if not readable:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
        return True

    def press(self) -> None:
        """Ring this very bell, from another thread of the same process."""
        # Also where no descriptor is left.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
        ):
            sender.sendto(b"!", str(self._path))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
