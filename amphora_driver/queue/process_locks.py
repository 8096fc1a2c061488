# SPDX-License-Identifier: Apache-2.0
"""Lock files that show which processes of this host are alive.

Invariant: a live process holds the lock of a file with its name. The kernel releases the lock when the process ends for
any reason. A file that another process can lock belongs to a dead process, whose leases are released before they
expire. A free lock is only a hint: if the process is alive after all, the epochs of the leases refuse its writes.

A file name includes the boot id of the kernel, and a process reads only files with its own boot id. Another host may
mount the same directory without shared locks. Files of an earlier boot stay; those leases expire.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

_SUFFIX = ".lives"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Number of digits of the kernel's boot id in the name of a lock file. These digits suffice to distinguish hosts.
_BOOT_DIGITS = 13


class ProcessLock:
    """The lock file of the process `name`, as a context manager; `boot` is the kernel's boot id."""

    def __init__(self, directory: str, name: str, boot: str | None = None) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = directory
        # The boot id identifies the host: all containers of a host have one boot id, and different hosts have different
        # ones.
        self._ours = f".{(boot or _BOOT.read_text(encoding='ascii').strip())[:_BOOT_DIGITS]}{_SUFFIX}"
        self._path = Path(directory, quote(name, safe=":") + self._ours)
        # The file is locked before it gets its final name, so another process never finds it unlocked.
        fresh = self._path.with_suffix(".new")
        self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        fresh.rename(self._path)

    def reap_dead(self, free: Callable[[str], object]) -> list[str]:
        """Call `free` with the name of each dead process of this host; return the names.

        If `free` raises, the next call finds the process again.
        """
        reaped = []
        for path in sorted(Path(self._directory).glob(f"*{self._ours}")):
            if path != self._path and _is_free(path):
                name = unquote(path.name.removesuffix(self._ours))
                free(name)
                path.unlink(missing_ok=True)
                reaped.append(name)
        return reaped

    def close(self) -> None:
        """Remove the file and release the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def __enter__(self) -> ProcessLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_free(path: Path) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return True
    return False
