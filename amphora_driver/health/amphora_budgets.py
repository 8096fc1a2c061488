# SPDX-License-Identifier: Apache-2.0
"""Token buckets that limit how much work one amphora causes in a health manager.

Invariant: only an amphora with a verified signature has a budget, so no amphora uses up another one's budget. An
amphora above its budget loses its own datagrams only.
"""

from __future__ import annotations

import msgspec

# One amphora may send DATAGRAMS_PER_SECOND heartbeat datagrams, and DATAGRAM_BURST at once. A report of ten thousand
# members needs twelve datagrams.
DATAGRAMS_PER_SECOND, DATAGRAM_BURST = 20.0, 200.0
# One amphora may send BYTES_PER_SECOND of decompressed data, and BYTE_BURST at once. Parsing a megabyte takes ten
# milliseconds of processor time.
BYTES_PER_SECOND, BYTE_BURST = float(1 << 20), float(8 << 20)


class _Buckets(msgspec.Struct):
    datagrams: float
    octets: float
    at: float


class AmphoraBudgets:
    """Two token buckets for each amphora. Not thread-safe, except for `forget`."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Buckets] = {}

    def take_datagram(self, amphora_id: str, now: float) -> bool:
        """Return whether the amphora may send one more datagram, and count the datagram if so."""
        buckets = self._buckets.get(amphora_id)
        if buckets is None:
            buckets = self._buckets[amphora_id] = _Buckets(DATAGRAM_BURST, BYTE_BURST, now)
        passed = now - buckets.at
        buckets.at = now
        buckets.datagrams = min(DATAGRAM_BURST, buckets.datagrams + passed * DATAGRAMS_PER_SECOND)
        buckets.octets = min(BYTE_BURST, buckets.octets + passed * BYTES_PER_SECOND)
        if buckets.datagrams < 1 or buckets.octets <= 0:
            return False
        buckets.datagrams -= 1
        return True

    def charge_bytes(self, amphora_id: str, octets: int) -> None:
        """Count the decompressed bytes of a datagram. An excess reduces the budget of later datagrams."""
        if (buckets := self._buckets.get(amphora_id)) is not None:
            buckets.octets -= octets

    def forget(self, amphora_id: str) -> None:
        self._buckets.pop(amphora_id, None)
