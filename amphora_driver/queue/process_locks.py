# SPDX-License-Identifier: Apache-2.0
"""Which processes of this host live.

Invariant: a process holds the lock of a file that bears its name for as long as it lives, and the kernel takes the lock
away with it, however it ends. So a name whose file can be locked is that of a dead one, and its leases are free before
they run out. That is a hint only: what a process that was taken for dead may still write is for the leases' epochs.

A name says which kernel its process runs under, and only names of one's own are looked at. Another host may have the
same directory mounted, and its locks may not reach this one. What an earlier boot left stays: those leases run out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Callable

_SUFFIX = ".lives"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# So many of its digits: enough to tell the hosts of a deployment apart.
_BOOT_DIGITS = 13


class Presence:
    """One process's sign of life; a context manager.

    Args:
        directory: of this host, where all its processes have theirs.
        name: `process_name()` of this one.
        boot: what this kernel calls the time since it started; read from it if None.
    """

    def __init__(self, directory: str, name: str, boot: str | None = None) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = directory
        # Shared by all containers of a host, and by no two hosts.
        self._ours = f".{(boot or _BOOT.read_text(encoding='ascii').strip())[:_BOOT_DIGITS]}{_SUFFIX}"
        self._path = Path(directory, quote(name, safe=":") + self._ours)
        # Locked before it has its name: nobody ever finds it free.
        fresh = self._path.with_suffix(".new")
        self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        fresh.rename(self._path)

    def bury(self, free: Callable[[str], object]) -> list[str]:
        """Have `free` called with the name of each process of this host that is dead; returns the names.

        One for which that fails is found again next time.
        """
        buried = []
        for path in sorted(Path(self._directory).glob(f"*{self._ours}")):
            if path != self._path and _is_free(path):
                name = unquote(path.name.removesuffix(self._ours))
                free(name)
                path.unlink(missing_ok=True)
                buried.append(name)
        return buried

    def close(self) -> None:
        """It ends well: nothing of it is left."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def __enter__(self) -> Presence:
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
