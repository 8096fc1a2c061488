# SPDX-License-Identifier: Apache-2.0
"""Memory that forked processes share: a region with a lock, and tables with a fixed number of entries.

Invariant: the kernel releases the lock of a killed process. A process that is killed during a write leaves at most one
entry with a part of the old values. The users of a table bound each value that they read. A process that stops while it
has the lock blocks no other process for longer than `LOCK_TIMEOUT`.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

LOG = logging.getLogger(__name__)
# Seconds to wait for the lock. A process holds the lock for microseconds, unless the process is stopped or frozen.
LOCK_TIMEOUT = 2.0
# Seconds between two attempts to take the lock.
_LOCK_PAUSE = 0.001
KEY_BYTES = 16
# Format of an entry: the key, the time of the last use, and two values.
_ENTRY = struct.Struct(f"={KEY_BYTES}sddQ")
_FREE = bytes(KEY_BYTES)
# Number of places for a key in its table. If all places are in use, the key replaces the entry with the oldest use.
_PLACES = 8


class SharedMemory:
    """A region of memory. Processes that are forked later share it."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("amphora-cluster-api")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._threads = threading.Lock()
        # This process uses its own copy of the memory while another process holds the lock too long.
        self._copy: mmap.mmap | None = None

    @contextmanager
    def locked(self) -> Iterator[mmap.mmap]:
        """Return the region, and exclude all other threads and processes.

        While another process keeps the lock, return a copy of this process, whose changes are lost afterwards.
        """
        # The file lock excludes other processes, but not the other threads of this process. So threads need a second
        # lock.
        with self._threads:
            if not self._take_lock():
                yield self._private_copy()
                return
            self._copy = None
            try:
                yield self._memory
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def is_shared(self, memory: mmap.mmap) -> bool:
        """Return whether other processes see the changes of a region that `locked` has returned."""
        return memory is self._memory

    def peek(self) -> bytes:
        """Return the content without the lock. An aligned number of eight bytes is complete: old or new."""
        return self._memory[:]

    def _take_lock(self) -> bool:
        # The first thread that cannot get the lock makes the copy. Later threads find the copy and do not wait for the
        # lock.
        deadline = time.monotonic() + (LOCK_TIMEOUT if self._copy is None else 0.0)
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOCK_PAUSE)
            else:
                return True

    def _private_copy(self) -> mmap.mmap:
        if self._copy is None:
            LOG.warning(
                "another worker process of the API holds the lock of the shared memory for more than %g s, because "
                "that worker is stopped or gets no processor time; this worker counts failed authentications on its "
                "own; if the state lasts, continue or kill the other worker",
                LOCK_TIMEOUT,
            )
            self._copy = mmap.mmap(-1, len(self._memory))
            self._copy[:] = self._memory[:]
        return self._copy


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
