# SPDX-License-Identifier: Apache-2.0
"""The process that writes a virtual machine's console to its file.

Invariant: the file never has more than `MOST` bytes, however much the guest writes to its serial port; what is given up
is the older half. A full disk costs lines, and never holds up the guest. The file is not made anew: nothing appears in
the machine's folder after its qemu has ended.

    python -I -S console.py [MOST] < what qemu says >> console.log
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

MOST = 1 << 20
_PIECE = 1 << 16


def copy_console(source: int, file: int, most: int = MOST) -> None:
    """Copy until the source ends.

    Args:
        source: the descriptor that is read.
        file: a descriptor of a regular file, opened for appending.
        most: bytes.
    """
    while data := os.read(source, min(_PIECE, most // 2)):
        with suppress(OSError):  # no room: the next ones are tried again
            size = os.fstat(file).st_size
            if size + len(data) > most:
                kept = _end(file, size, most // 2)
                os.ftruncate(file, 0)
                os.write(file, kept)
            os.write(file, data)


def _end(file: int, size: int, length: int) -> bytes:
    """The last bytes of a file that is open for writing only."""
    reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(reader, length, max(0, size - length))
    finally:
        os.close(reader)


if __name__ == "__main__":
    copy_console(0, 1, *map(int, sys.argv[1:]))
