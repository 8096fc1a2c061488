# SPDX-License-Identifier: Apache-2.0
"""The process that writes the console output of a virtual machine to a file of limited size.

Invariant: the file never has more than `MOST` bytes, whatever the guest writes to its serial port. At the limit, the
older half is discarded. On a full disk, output is lost, but the guest does not block. The file is truncated, never
replaced: the machine's directory gets no new file after QEMU has ended.

    qemu … | python -I -S console.py [MOST] >> console.log
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

MOST = 1 << 20
_PIECE = 1 << 16


def copy_console(source: int, file: int, most: int = MOST) -> None:
    """Copy data from one descriptor to another until the end of the source.

    `file` is a regular file that is open for appending; its size never exceeds `most` bytes.
    """
    while data := os.read(source, min(_PIECE, most // 2)):
        # On a full disk, this block of console output is lost. The copy must continue, or the guest would block.
        with suppress(OSError):
            size = os.fstat(file).st_size
            if size + len(data) > most:
                kept = _end(file, size, most // 2)
                os.ftruncate(file, 0)
                os.write(file, kept)
            os.write(file, data)


def _end(file: int, size: int, length: int) -> bytes:
    """Return the last bytes of a file that is open for writing only."""
    reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(reader, length, max(0, size - length))
    finally:
        os.close(reader)


if __name__ == "__main__":
    copy_console(0, 1, *map(int, sys.argv[1:]))
