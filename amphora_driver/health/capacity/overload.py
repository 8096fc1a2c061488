# SPDX-License-Identifier: Apache-2.0
"""Decides what the health manager omits while it receives more heartbeats than it can process.

Invariant: statistics are omitted first, then statuses, and the times of heartbeats never. An omitted value loses
nothing but time: counters are absolute, and the next heartbeat repeats all statuses.
"""

from __future__ import annotations

import logging
import socket
import struct
from enum import IntEnum

LOG = logging.getLogger(__name__)

# Number of Linux's socket option SO_MEMINFO (since Linux 4.12), for which Python's socket module has no name. Of the
# nine numbers, the first is the used memory, the second its limit, and the last the number of lost datagrams.
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")
# Parts of the receive buffer that are in use when the omission of a part begins, and when all omissions end.
_STATISTICS_FROM, _STATUSES_FROM, _ENDS_BELOW = 0.25, 0.5, 0.1


class Omitted(IntEnum):
    """What the health manager omits; each value includes the lower ones."""

    NOTHING = 0
    STATISTICS = 1
    STATUSES = 2


_TEXTS = {
    Omitted.STATISTICS: "the health manager postpones statistics",
    Omitted.STATUSES: "the health manager postpones statistics, and reads only the times of heartbeats",
}


class OverloadMonitor:
    """The omissions of one receiver. `omitted` and `lost` may be read by any thread.

    Attributes:
        omitted: what is omitted now.
        lost: datagrams that the kernel could not store, since the start.
    """

    def __init__(self, *receiving: socket.socket) -> None:
        self._sockets = receiving
        self.omitted = Omitted.NOTHING
        self.lost = 0

    def measure(self) -> Omitted:
        """Measure the receive buffer, and return what to omit."""
        highest, lost = 0.0, 0
        for one in self._sockets:
            answer = one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            used, limit, *_, dropped = _MEMINFO.unpack(answer)
            highest, lost = max(highest, used / max(limit, 1)), lost + dropped
        self.lost = lost
        return self._decide(highest)

    def _decide(self, used: float) -> Omitted:
        before = self.omitted
        if used >= _STATUSES_FROM:
            self.omitted = Omitted.STATUSES
        elif used >= _STATISTICS_FROM:
            self.omitted = max(before, Omitted.STATISTICS)
        elif used < _ENDS_BELOW:
            self.omitted = Omitted.NOTHING
        if self.omitted > before:
            LOG.warning(
                "%s, because more heartbeats arrive than the health manager can process: %d %% of the receive buffer "
                "are in use; add a processor or a health manager, or increase [amp_health] interval",
                _TEXTS[self.omitted],
                100 * used,
            )
        elif self.omitted is Omitted.NOTHING and before:
            LOG.warning("the health manager processes complete heartbeats again, because its receive buffer is empty")
        return self.omitted
