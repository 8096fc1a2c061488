# SPDX-License-Identifier: Apache-2.0
"""Whether a member's port of UDP is there: a datagram is sent, and nobody says that there is no such port.

Invariant: silence is up, as Octavia has it, if the datagram has left; but what was heard since the check before counts
as this one's answer, whether it was said to us (too late for that check) or to a client
(`amphora_agent.l4_checks.icmp_errors`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from amphora_agent.l4.event_loop import Loop, roomy
from amphora_agent.l4_checks import conntrack_lookup, error_queue
from amphora_agent.l4_checks.check import Check, Done, Target
from amphora_agent.l4_checks.icmp_errors import Evidence
from amphora_agent.l4_checks.neighbor_probe import Neighbours

# One that is empty is the end of the input to some programs. A line's end is nothing to those that log lines.
QUESTION = b"\n"
_LARGEST = 512
# Of members that are gone by now there may be some left.
_MOST_HEARD = 4096


class UdpChecks:
    """Checks by a datagram."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._asked: dict[str, set[_Datagram]] = {}  # by address
        self._heard: dict[tuple[str, int], tuple[float, str]] = {}
        self._neighbours = Neighbours()
        try:
            self._evidence = Evidence(loop, self._overheard, conntrack_lookup.exists)
        except OSError:
            self._neighbours.close()
            raise

    def begin(self, asked: Target, done: Done) -> Check:
        when, happened = self._heard.pop(asked.place, (0.0, ""))
        check = _Datagram(self._loop, asked, done, self._late, self._forget, self._neighbours)
        self._asked.setdefault(asked.address, set()).add(check)
        # A host that has gone says nothing: its link address is asked for beside its port.
        self._neighbours.prove(asked.address)
        if happened and when >= time.monotonic() - asked.monitor.interval:
            self._loop.at(0.0, lambda: check.say(False, happened))
        return check

    def _overheard(self, address: str, port: int, happened: str) -> None:
        for check in list(self._asked.get(address, ())):
            if port == 0 or (check.asked.direct and port == check.asked.port):
                check.happened(happened)

    def _late(self, place: tuple[str, int], happened: str) -> None:
        """Something was heard while no check waits: the next one will want to know."""
        if len(self._heard) >= _MOST_HEARD:
            self._heard.clear()
        self._heard[place] = time.monotonic(), happened

    def _forget(self, check: _Datagram) -> None:
        known = self._asked.get(check.asked.address, set())
        known.discard(check)
        if not known:
            self._asked.pop(check.asked.address, None)

    def close(self) -> None:
        self._evidence.close()
        self._neighbours.close()


class _Datagram:
    """One question. Its socket stays until the next one: errors may be late."""

    def __init__(
        self,
        loop: Loop,
        asked: Target,
        done: Done,
        late: Callable[[tuple[str, int], str], None],
        forget: Callable[[_Datagram], None],
        neighbours: Neighbours,
    ) -> None:
        self.asked = asked
        self._loop = loop
        self._done: Done | None = done
        self._late = late
        self._forget = forget
        self._neighbours = neighbours
        self._socket = roomy(socket.socket(asked.family, socket.SOCK_DGRAM))
        try:
            error_queue.ask_for(self._socket)
            self._socket.connect(asked.place)
            self._socket.send(QUESTION)
        except OSError:
            self._socket.close()
            raise
        loop.read(self._socket, self._hear)

    def _hear(self) -> None:
        happened = [what for what, *_ in error_queue.read(self._socket)]
        with suppress(OSError):
            self._socket.recv(_LARGEST)
            self.say(True, "it answers")
        if happened:
            self.happened(happened[-1])

    def happened(self, what: str) -> None:
        """It is not there."""
        if self._done is None:
            self._late(self.asked.place, what)
        else:
            self.say(False, what)

    def say(self, good: bool, seen: str) -> None:
        """Give the verdict, if there is none yet."""
        done, self._done = self._done, None
        if done is not None:
            done(good, seen)

    def expire(self) -> tuple[bool, str]:
        self._done = None
        if self._neighbours.is_lost(self.asked.address):
            return False, "host unreachable"
        return True, "nobody says that it is not there"

    def end(self) -> None:
        self._done = None
        self._forget(self)
        self._loop.forget(self._socket)
        self._socket.close()
