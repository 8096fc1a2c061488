# SPDX-License-Identifier: Apache-2.0
"""Numbers that are unique among the running tests of this machine.

They are for names that are too short for a process id. Invariant: a lock of the process holds the number and ends with
the process. The files stay, so that no process locks a file that another process has just removed.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCKS = Path("/run/lock/amphora-tests")
_MOST = 1000


@contextmanager
def number(free=lambda _: True) -> Iterator[int]:
    """Yield a number below 1000 that is reserved inside the block.

    Args:
        free: returns whether the last holder of a number, which may have been killed, has left no remains.
    """
    _LOCKS.mkdir(parents=True, exist_ok=True)
    for candidate in range(_MOST):
        with (_LOCKS / str(candidate)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if free(candidate):
                yield candidate
                return
    raise AssertionError(f"all {_MOST} numbers are taken: see {_LOCKS}")
