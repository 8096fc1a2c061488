# SPDX-License-Identifier: Apache-2.0
"""PING checks: a member's address answers an ICMP echo request."""

from __future__ import annotations

from functools import partial
from socket import AddressFamily

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_checks.check import Check, OnResult, Target
from amphora_agent.network.icmp_echo import Pinger


class PingChecks:
    """Checks by ICMP echo."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._pinger = Pinger()
        for family, one in self._pinger.sockets.items():
            loop.add_reader(one, partial(self._on_readable, family))

    def start(self, target: Target, on_result: OnResult) -> Check:
        return _Echo(self._pinger, target.address, on_result)

    def _on_readable(self, family: AddressFamily) -> None:
        found = self._pinger.receive(family)
        if isinstance(found, _Echo):
            found.on_result(True, "it answers")

    def close(self) -> None:
        for one in self._pinger.sockets.values():
            self._loop.remove(one)
        self._pinger.close()


class _Echo:
    def __init__(self, pinger: Pinger, address: str, on_result: OnResult) -> None:
        self._pinger = pinger
        self.on_result = on_result
        self._key = pinger.send(address, self)

    def expire(self) -> tuple[bool, str]:
        self.end()
        return False, "no echo reply within the time"

    def end(self) -> None:
        self._pinger.cancel(self._key)
