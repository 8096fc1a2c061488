# SPDX-License-Identifier: Apache-2.0
"""Whether a member's address answers an ICMP echo.

Invariant: there is one socket for each family, however many members are asked (`amphora_agent.network.icmp_echo`).
"""

from __future__ import annotations

from functools import partial
from socket import AddressFamily

from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4_checks.check import Check, Done, Target
from amphora_agent.network.icmp_echo import Pinger


class PingChecks:
    """Checks by echoes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pinger = Pinger()
        for family, one in self._pinger.sockets.items():
            loop.read(one, partial(self._hear, family))

    def begin(self, asked: Target, done: Done) -> Check:
        return _Echo(self._pinger, asked.address, done)

    def _hear(self, family: AddressFamily) -> None:
        found = self._pinger.receive(family)
        if isinstance(found, _Echo):
            found.done(True, "it answers")

    def close(self) -> None:
        for one in self._pinger.sockets.values():
            self._loop.forget(one)
        self._pinger.close()


class _Echo:
    def __init__(self, pinger: Pinger, address: str, done: Done) -> None:
        self._pinger = pinger
        self.done = done
        self._mark = pinger.send(address, self)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no echo within the time"

    def end(self) -> None:
        self._pinger.cancel(self._mark)
