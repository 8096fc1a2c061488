# SPDX-License-Identifier: Apache-2.0
"""Cache of the heartbeat keys of all amphorae.

Invariant: the content of datagrams never decides which keys are read, nor how often. A datagram of an unknown amphora
requests one read of all new keys, at most one in each `interval` seconds. So datagrams with invented ids do not delay a
new amphora.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from amphora_driver.errors import AmphoraDriverError, HeartbeatRefused
from amphora_driver.health.heartbeat_codec import AmphoraKey, format_amphora_id, raw_amphora_id
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

KeyReader = Callable[[AbstractSet[str]], Mapping[str, Secret]]
"""Reads the keys of all amphorae except the given ones, by amphora id."""

# A deleted amphora may still send heartbeats. The health manager remembers up to _MAX_UNKNOWN unknown ids for
# _UNKNOWN_TTL seconds, and refuses their heartbeats without a read of the database.
_UNKNOWN_TTL, _MAX_UNKNOWN = 10.0, 10_000
# Up to _MAX_WAITING heartbeats of new amphorae wait while their keys are read. The first heartbeat of an amphora is
# shorter than _MAX_WAITING_SIZE bytes.
_MAX_WAITING, _MAX_WAITING_SIZE = 1000, 4096


class KeyCache:
    """Keys in memory. `run` reads new keys at most once per `interval`. `notify` announces datagrams."""

    def __init__(self, read_keys: KeyReader, notify: Callable[[], None], interval: float) -> None:
        self._read_keys = read_keys
        self._notify = notify
        self._interval = interval
        # The dictionary key is the amphora id as 16 bytes, as in a datagram.
        self._known: dict[bytes, AmphoraKey] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        # The latest heartbeat datagram of each amphora without a known key.
        self._waiting: dict[str, tuple[bytes, str]] = {}
        self._ready: deque[tuple[bytes, str]] = deque()
        self._lock = threading.Lock()
        self._requested = threading.Event()
        self._stopped = threading.Event()

    def find(self, raw_id: bytes) -> AmphoraKey | None:
        """Return the key of the amphora whose id has these bytes; None if it is not in memory."""
        return self._known.get(raw_id)

    def await_key(self, raw_id: bytes, datagram: memoryview, sender: str, *, retried: bool) -> None:
        """Keep a datagram until the keys are read. A `retried` datagram comes from `pop_ready`.

        Raise HeartbeatRefused if the amphora is unknown, its key is unreadable, or too many datagrams wait.
        """
        amphora_id = format_amphora_id(raw_id)
        with self._lock:
            if self._unknown.get(amphora_id, 0.0) > time.monotonic():
                raise _key_refused(amphora_id, "this amphora is not in the database", "unknown")
            if retried:
                raise _key_refused(amphora_id, "its key could not be read", "lookup")
            self._requested.set()
            full = amphora_id not in self._waiting and len(self._waiting) >= _MAX_WAITING
            if full or len(datagram) > _MAX_WAITING_SIZE:
                raise _key_refused(amphora_id, "too many datagrams wait for their keys", "busy")
            self._waiting[amphora_id] = (bytes(datagram), sender)

    def pop_ready(self) -> tuple[bytes, str] | None:
        """Return a datagram that has waited for a read, and its source address; None if no datagram is left."""
        return self._ready.popleft() if self._ready else None

    def add(self, keys: Mapping[str, Secret]) -> None:
        with self._lock:
            for amphora_id, key in keys.items():
                self._known[raw_amphora_id(amphora_id)] = AmphoraKey(amphora_id, key)
                self._unknown.pop(amphora_id, None)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        with self._lock:
            for amphora_id in amphora_ids:
                self._known.pop(raw_amphora_id(amphora_id), None)

    def stop(self) -> None:
        self._stopped.set()
        self._requested.set()

    def run(self) -> None:
        """Read new keys on request, until `stop`."""
        while True:
            self._requested.wait()
            if self._stopped.is_set():
                return
            self._requested.clear()
            self._read_new_keys()
            self._stopped.wait(self._interval)

    def _read_new_keys(self) -> None:
        with self._lock:
            # An amphora has a row before its first heartbeat. The ids are copied before the read, so an id without a
            # row in the result is unknown.
            requested, known = set(self._waiting), {key.amphora_id for key in self._known.values()}
        try:
            found = self._read_keys(known)
        except AmphoraDriverError as error:
            LOG.warning(
                "the health manager could not read the keys of new amphorae and tries again at the next heartbeat "
                "of a new amphora: %s",
                error,
            )
        except Exception:
            # An error must not end the only thread that reads heartbeat keys.
            LOG.exception(
                "the health manager could not read the keys of new amphorae because of an unexpected error and "
                "tries again at the next heartbeat of a new amphora"
            )
        else:
            self.add(found)
            self._record_unknown(requested - found.keys())
        with self._lock:
            for amphora_id in requested:
                self._ready.append(self._waiting.pop(amphora_id))
        self._notify()

    def _record_unknown(self, amphora_ids: AbstractSet[str]) -> None:
        until = time.monotonic() + _UNKNOWN_TTL
        with self._lock:
            for amphora_id in amphora_ids:
                self._unknown.pop(amphora_id, None)
                self._unknown[amphora_id] = until
            while len(self._unknown) > _MAX_UNKNOWN:
                self._unknown.popitem(last=False)


def _key_refused(amphora_id: str, happened: str, reason: str) -> HeartbeatRefused:
    return HeartbeatRefused(f"verify a heartbeat of amphora {amphora_id}", happened, reason=reason)
