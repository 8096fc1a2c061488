# SPDX-License-Identifier: Apache-2.0
"""Which processes of this host live.

Invariant: a process holds the lock of a file that bears its name for as long as it lives, and the kernel takes the lock
away with it, however it ends. So a name whose file can be locked is that of a dead one, and its leases are free before
they run out. That is a hint only: what a process that was taken for dead may still write is for the leases' epochs.
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


class Presence:
    """One process's sign of life; a context manager.

    Args:
        directory: of this host, where all its processes have theirs.
        name: `process_name()` of this one.
    """

    def __init__(self, directory: str, name: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._path = Path(directory, quote(name, safe=":") + _SUFFIX)
        # Locked before it has its name: nobody ever finds it free.
        fresh = self._path.with_suffix(".new")
        self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        fresh.rename(self._path)

    def bury(self, free: Callable[[str], object]) -> list[str]:
        """Have `free` called with the name of each process that is dead; returns the names.

        One for which that fails is found again next time.
        """
        buried = []
        for path in sorted(Path(self._directory).glob(f"*{_SUFFIX}")):
            if path != self._path and _is_free(path):
                name = unquote(path.name.removesuffix(_SUFFIX))
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
