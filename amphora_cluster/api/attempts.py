# SPDX-License-Identifier: Apache-2.0
"""The limit of failed authentications: pauses for source addresses and for groups.

A token has 256 random bits, so this limit does not protect tokens from guesses. It protects the database and the log: a
client with a wrong token, or an attacker, may send thousands of requests each second.

Invariants:
* The number of failures without a pause is limited for each source address, and for each group from all addresses.
  Each further failure begins a pause, and each pause is twice as long as the one before. The pause of a group is for
  addresses with a failure only.
* During a pause, a request is refused before the database is read.
* A caller that authenticated before is not limited, so that no client can lock it out. A token is known after its first
  use. A signed request shows only the id of its token. It is known for its source address only, and only until a
  request with this id and from this address fails.
* The numbers of addresses, groups and known callers are bounded. Those without use for a long time are forgotten.
* The worker processes of one host share the limits and the known callers. Each host counts for itself. While a stopped
  worker has the lock of the memory, each other worker counts for itself, from a copy.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import math
import mmap
import secrets
import time
from collections.abc import Callable

import msgspec

from amphora_cluster.api.shared_memory import KEY_BYTES, Entry, SharedMemory, SharedTable
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)
# After failed authentications, requests are refused for FIRST_PAUSE to LONGEST_PAUSE seconds. After FORGOTTEN_AFTER
# seconds without a failure, the count begins again.
FIRST_PAUSE, LONGEST_PAUSE, FORGOTTEN_AFTER = 1.0, 60.0, 600.0
# A group's limit is this multiple of an address's limit, because requests for a group come from many addresses.
GROUP_FACTOR = 10
MOST_SOURCES, MOST_CALLERS = 4096, 4096
_MOST_COUNTED = 2**32
# A user can use all addresses of an IPv6 network. So failures are counted for each IPv6 prefix of this length.
_IPV6_PREFIX = 64


class Throttled(AmphoraDriverError):
    """Too many authentications have failed: a request is refused for `seconds` without another one."""

    def __init__(self, seconds: float) -> None:
        happened = "too many authentications have failed, from this address or for this group"
        remedy = f"Send it again in {math.ceil(seconds)} s, with a valid token."
        super().__init__("authenticate the request", happened, remedy)
        self.seconds = seconds


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request.

    Args:
        source: the source address.
        group_id: the group in the path of the request.
        credential: the token, or for a signed request the id of the token with the source address.
    """

    source: str
    group_id: str
    credential: str


class FailedAttempts:
    """The failed authentications. Its methods are safe for threads and for processes.

    Processes that are forked later share it.

    Args:
        most: failures of one source address without a pause; 0 for no limit.
        clock: a monotonic clock in seconds, which all processes share.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        # Each entry of these tables has the number of failures and the end of the pause.
        addresses = SharedTable(MOST_SOURCES)
        groups = SharedTable(MOST_SOURCES, addresses.end)
        self._failures = {"address": addresses, "group": groups}
        self._known = SharedTable(MOST_CALLERS, groups.end)
        self._memory = SharedMemory(self._known.end)
        # With a random key, the digests in memory reveal nothing about tokens.
        self._key = secrets.token_bytes(32)

    def check(self, caller: Caller) -> None:
        """Raise Throttled if the caller is not known, and its address or group is in a pause."""
        digest = self._digest(f"{caller.group_id} {caller.credential}")
        now = self._clock()
        with self._memory.locked() as memory:
            if self._known.get(memory, digest) is not None:
                self._known.put(memory, digest, Entry(), now)
                return
            limits = self._limits(caller)
            found = [self._failures[kind].get(memory, self._digest(name)) for kind, name, _ in limits]
        if found and found[0] is None:
            # A request from an address without failures is permitted. Otherwise, clients at other addresses could lock
            # out a caller with a valid token.
            return
        pauses = [one.moment - now for one in found if one is not None]
        # A process that was killed during a write can leave a pause above LONGEST_PAUSE. Such a pause is ignored.
        left = max((seconds for seconds in pauses if seconds <= LONGEST_PAUSE), default=0.0)
        if left > 0:
            raise Throttled(left)

    def add_failure(self, caller: Caller) -> None:
        """Count a failed authentication, which may begin a pause."""
        digest = self._digest(f"{caller.group_id} {caller.credential}")
        with self._memory.locked() as memory:
            self._known.remove(memory, digest)
            paused = [self._count(memory, kind, name, free) for kind, name, free in self._limits(caller)]
        for kind, name, number, seconds in filter(None, paused):
            LOG.warning(
                "%d authentications failed for %s %s, so the API answers unknown callers of this address or group "
                "with status 429 for %g s",
                number, kind, printable(name, 64), seconds,
            )  # fmt: skip

    def add_success(self, caller: Caller) -> None:
        """Remember a caller with a valid token."""
        digest = self._digest(f"{caller.group_id} {caller.credential}")
        with self._memory.locked() as memory:
            self._known.put(memory, digest, Entry(), self._clock())

    def _limits(self, caller: Caller) -> tuple[tuple[str, str, int], ...]:
        if self._most <= 0:
            return ()
        return (
            ("address", network_of(caller.source), self._most),
            ("group", caller.group_id[:64], self._most * GROUP_FACTOR),
        )

    def _count(self, memory: mmap.mmap, kind: str, name: str, free: int) -> tuple[str, str, int, float] | None:
        """Count a failure; return the pause that it begins, if any."""
        now, failures, key = self._clock(), self._failures[kind], self._digest(name)
        before = failures.get(memory, key)
        fresh = before is None or now - before.moment > FORGOTTEN_AFTER
        number = 1 if before is None or fresh else min(before.number, _MOST_COUNTED) + 1
        seconds = 0.0
        if number > free:
            seconds = min(FIRST_PAUSE * 2 ** min(number - free - 1, 16), LONGEST_PAUSE)
        failures.put(memory, key, Entry(number, now + seconds), now)
        return (kind, name, number, seconds) if seconds else None

    def _digest(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(errors="replace"), key=self._key, digest_size=KEY_BYTES).digest()


def network_of(source: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address, as the name of a source."""
    try:
        address = ipaddress.ip_address(source.partition("%")[0])
    except ValueError:
        return source[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, _IPV6_PREFIX), strict=False))
