# SPDX-License-Identifier: Apache-2.0
"""How much of a health manager one amphora may use.

Invariant: pure memory. Only amphorae whose signature was checked have a budget, so none can use up another one's. An
amphora that is over its budget loses datagrams of its own.
"""

from __future__ import annotations

import msgspec

# Datagrams in a second, and at once. A report of ten thousand members is split into about a dozen; members that change
# are reported at once.
DATAGRAMS, MOST_DATAGRAMS = 20.0, 200.0
# Unpacked bytes in a second, and at once: reading a megabyte takes about ten milliseconds of a processor.
OCTETS, MOST_OCTETS = float(1 << 20), float(8 << 20)


class _Account(msgspec.Struct):
    datagrams: float
    octets: float
    at: float


class Budgets:
    """Token buckets, two for each amphora. For one thread."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def take(self, amphora_id: str, now: float) -> bool:
        """Whether one more datagram of this amphora may be unpacked; if so, it is counted.

        Args:
            now: on `time.monotonic()`'s clock.
        """
        account = self._accounts.get(amphora_id)
        if account is None:
            account = self._accounts[amphora_id] = _Account(MOST_DATAGRAMS, MOST_OCTETS, now)
        passed = now - account.at
        account.at = now
        account.datagrams = min(MOST_DATAGRAMS, account.datagrams + passed * DATAGRAMS)
        account.octets = min(MOST_OCTETS, account.octets + passed * OCTETS)
        if account.datagrams < 1 or account.octets <= 0:
            return False
        account.datagrams -= 1
        return True

    def charge(self, amphora_id: str, octets: int) -> None:
        """Count the unpacked bytes of a datagram. Bytes above the budget are deducted from later datagrams."""
        if (account := self._accounts.get(amphora_id)) is not None:
            account.octets -= octets

    def forget(self, amphora_id: str) -> None:
        """Drop the account of an amphora that is gone. May be called from another thread."""
        self._accounts.pop(amphora_id, None)
