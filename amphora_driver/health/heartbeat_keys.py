# SPDX-License-Identifier: Apache-2.0
"""The heartbeat keys of all amphorae, in memory.

Invariant: nothing that arrives decides which keys are read, or how often. A datagram of an unknown amphora causes one
reading of all new keys, at most one in each `pause` seconds. So datagrams with invented ids delay no new amphora.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from amphora_driver.errors import AmphoraDriverError, HeartbeatRefused
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

Keys = Callable[[AbstractSet[str]], Mapping[str, Secret]]
"""Reads the keys of all amphorae but those that it is given, by amphora id."""

# Seconds for which an amphora without a row is refused without another reading: a removed amphora goes on sending.
_UNKNOWN_AGE = 10.0
_MOST_UNKNOWN = 10_000
# Datagrams that wait for a reading, one for each amphora, and bytes of each. The first one of an amphora is short.
_MOST_WAITING = 1000
_LONGEST_WAITING = 4096


class KeyRing:
    """Keys in memory, and the thread that reads new ones.

    Args:
        keys: called in the thread of `run`; may raise. The next datagram of an unknown amphora repeats the call.
        wake: called after `next_ready` has something new.
        pause: seconds between two readings.
    """

    def __init__(self, keys: Keys, wake: Callable[[], None], pause: float) -> None:
        self._read = keys
        self._wake = wake
        self._pause = pause
        self._known: dict[str, Secret] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        # A later datagram of an amphora says more than an earlier one.
        self._waiting: dict[str, tuple[bytes, str]] = {}
        self._ready: deque[tuple[bytes, str]] = deque()
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopped = threading.Event()

    def get(self, amphora_id: str, datagram: memoryview, sender: str, *, waited: bool) -> Secret | None:
        """The key; None if the datagram waits for the next reading.

        Args:
            sender: the address that the datagram came from, returned by `next_ready`.
            waited: the datagram has waited before.

        Raises:
            HeartbeatRefused: there is no such amphora; or the keys could not be read; or too many datagrams wait.
        """
        key = self._known.get(amphora_id)
        if key is not None:
            return key
        with self._lock:
            if self._unknown.get(amphora_id, 0.0) > time.monotonic():
                raise _no_key(amphora_id, "no such amphora is recorded", "unknown")
            if waited:
                raise _no_key(amphora_id, "its key could not be read", "lookup")
            self._wanted.set()
            full = amphora_id not in self._waiting and len(self._waiting) >= _MOST_WAITING
            if full or len(datagram) > _LONGEST_WAITING:
                raise _no_key(amphora_id, "too many datagrams wait for their keys", "busy")
            self._waiting[amphora_id] = (bytes(datagram), sender)
        return None

    def next_ready(self) -> tuple[bytes, str] | None:
        """A datagram that has waited for a reading, and its sender."""
        return self._ready.popleft() if self._ready else None

    def learn(self, keys: Mapping[str, Secret]) -> None:
        """Remember these keys."""
        with self._lock:
            self._known.update(keys)
            for amphora_id in keys:
                self._unknown.pop(amphora_id, None)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop the keys of these amphorae."""
        with self._lock:
            for amphora_id in amphora_ids:
                self._known.pop(amphora_id, None)

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()
        self._wanted.set()

    def run(self) -> None:
        """Read new keys when they are wanted, until `stop`."""
        while True:
            self._wanted.wait()
            if self._stopped.is_set():
                return
            self._wanted.clear()
            self._look()
            self._stopped.wait(self._pause)

    def _look(self) -> None:
        with self._lock:
            # Only what waits already is judged: the row of an amphora is written before its first datagram.
            asked, known = set(self._waiting), set(self._known)
        try:
            found = self._read(known)
        except AmphoraDriverError as error:
            LOG.warning("Could not read the heartbeat keys of new amphorae, trying again: %s", error)
        except Exception:
            # This thread is the only one that reads keys: it must survive a defect of a database client.
            LOG.exception("Could not read the heartbeat keys of new amphorae, trying again")
        else:
            self.learn(found)
            self._note_unknown(asked - found.keys())
        with self._lock:
            for amphora_id in asked:
                self._ready.append(self._waiting.pop(amphora_id))
        self._wake()

    def _note_unknown(self, amphora_ids: AbstractSet[str]) -> None:
        until = time.monotonic() + _UNKNOWN_AGE
        with self._lock:
            for amphora_id in amphora_ids:
                self._unknown.pop(amphora_id, None)
                self._unknown[amphora_id] = until
            while len(self._unknown) > _MOST_UNKNOWN:
                self._unknown.popitem(last=False)


def _no_key(amphora_id: str, happened: str, reason: str) -> HeartbeatRefused:
    return HeartbeatRefused(f"check a heartbeat of amphora {amphora_id}", happened, reason=reason)
