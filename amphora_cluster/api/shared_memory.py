# SPDX-License-Identifier: Apache-2.0
"""Memory that forked processes share: a region with a lock, and tables with a fixed number of entries.

Invariant: the kernel releases the lock of a killed process. A process that is killed during a write leaves at most one
entry with a part of the old values. The users of a table bound each value that they read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

KEY_BYTES = 16
# The key, the moment of the last use, and the two values of an entry.
_ENTRY = struct.Struct(f"={KEY_BYTES}sddQ")
_FREE = bytes(KEY_BYTES)
# A key has this number of places in its table. If all are in use, it replaces the entry without use for the longest
# time.
_PLACES = 8


class SharedMemory:
    """A region of memory. Processes that are forked later share it."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("amphora-cluster-api")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._threads = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[mmap.mmap]:
        """Return the region, and exclude all other threads and processes."""
        # The lock of the file excludes other processes only, so the threads of this process need another lock.
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield self._memory
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


class Entry(msgspec.Struct, frozen=True):
    """The values of an entry."""

    number: int = 0
    moment: float = 0.0


class SharedTable:
    """A table in a region of memory. The caller holds the lock of the region.

    Args:
        entries: the largest number of entries; a multiple of 8.
        offset: the place of the table in its region.
    """

    def __init__(self, entries: int, offset: int = 0) -> None:
        self._buckets = entries // _PLACES
        self._offset = offset

    @property
    def end(self) -> int:
        """The first place behind the table."""
        return self._offset + self._buckets * _PLACES * _ENTRY.size

    def get(self, memory: mmap.mmap, key: bytes) -> Entry | None:
        """Return the entry of a key."""
        for place in self._places(key):
            found, _, moment, number = _ENTRY.unpack_from(memory, place)
            if found == key:
                return Entry(number, moment)
        return None

    def put(self, memory: mmap.mmap, key: bytes, entry: Entry, now: float) -> None:
        """Record the entry of a key."""
        places = [(_ENTRY.unpack_from(memory, place), place) for place in self._places(key)]
        same = [place for (found, *_), place in places if found == key]
        _, oldest = min((0.0 if found == _FREE else used, place) for (found, used, *_), place in places)
        _ENTRY.pack_into(memory, same[0] if same else oldest, key, now, entry.moment, entry.number)

    def remove(self, memory: mmap.mmap, key: bytes) -> None:
        """Remove the entry of a key, if there is one."""
        for place in self._places(key):
            if memory[place : place + KEY_BYTES] == key:
                memory[place : place + KEY_BYTES] = _FREE

    def _places(self, key: bytes) -> range:
        begin = self._offset + int.from_bytes(key[:8], "big") % self._buckets * _PLACES * _ENTRY.size
        return range(begin, begin + _PLACES * _ENTRY.size, _ENTRY.size)
