# SPDX-License-Identifier: Apache-2.0
"""Whose a flow was that has ended, how it ended, and how long it lasted.

Invariant: what is gone is known for a while: the end of a flow is told after the listener or the member has gone.
Whoever has the place of one that is gone has its flows, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from amphora_agent.l4 import eligible_members
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_flow_log.conntrack_events import SCTP, UDP, Ended
from amphora_agent.l4_flow_log.format import CUT, SILENT, Format, Line

_NUMBERS = {"UDP": UDP, "SCTP": SCTP}
_MOST_FORMER = 4096
_SECOND = 10**9
_SETTINGS = "/proc/sys/net/netfilter/nf_conntrack_"
# linux/netfilter/nf_conntrack_sctp.h
_STATES = (
    "",
    "closed",
    "cookie_wait",
    "cookie_echoed",
    "established",
    "shutdown_sent",
    "shutdown_recd",
    "shutdown_ack_sent",
    "heartbeat_sent",
)

_Place = tuple[int, str, int]
_End = tuple[str, int]


@dataclass
class _Listener:
    id: str
    pool: str
    format: Format | None
    members: dict[_End, str] = field(default_factory=dict)


class Owners:
    """Listeners and members by where they are."""

    def __init__(self) -> None:
        self._listeners: dict[_Place, _Listener] = {}
        self._formats: dict[str, Format] = {}
        # Whose flows go on; and of others, between which moments (in nanoseconds) they were ended.
        self._kept: set[tuple[_Place, _End]] = set()
        self._cut: dict[tuple[_Place, _End], tuple[int, int]] = {}
        self._begun: int | None = None

    def know(self, servers: Sequence[VirtualServer]) -> None:
        """These are about to be served."""
        present = set(_places(servers))
        if len(self._listeners) > _MOST_FORMER:
            self._listeners = {place: one for place, one in self._listeners.items() if place in present}
        for server in servers:
            members = {(str(one.address), one.port): one.id for one in server.members}
            for place in _places([server]):
                former = self._listeners.get(place)
                known = former.members if former is not None and former.id == server.id else {}
                if len(known) > _MOST_FORMER:
                    known = {}
                made = self._format(server.log_format)
                self._listeners[place] = _Listener(server.id, server.pool_id or "", made, {**known, **members})

    def _format(self, text: str | None) -> Format | None:
        if text is None:
            return None
        if text not in self._formats:
            self._formats[text] = Format(text)
        return self._formats[text]

    def follow(self, servers: Sequence[VirtualServer], up: eligible_members.States, begun: int, *, done: bool) -> None:
        """The kernel was told of these, from that moment until now.

        Args:
            done: whether it has done all of it: what it has not ended yet it will the next time.
        """
        begun = begun if self._begun is None else self._begun
        self._begun = None if done else begun
        if not done:
            return
        kept = {
            (place, (str(one.address), one.port))
            for server in servers
            for place in _places([server])
            for one in eligible_members.kept(server, up)
        }
        now = time.time_ns()
        for gone in self._kept - kept:
            self._cut.pop(gone, None)  # the newest stands last
            self._cut[gone] = begun, now
        for old in list(self._cut)[:-_MOST_FORMER]:
            del self._cut[old]
        self._kept = kept

    def line(self, flow: Ended, silences: Silences) -> str | None:
        """What is written of a flow; None where nobody wants it."""
        place = flow.protocol, *flow.place
        found = self._listeners.get(place)
        if found is None or found.format is None:
            return None
        moments = self._cut.get((place, flow.member))
        is_cut = moments is not None and flow.ended is not None and moments[0] <= flow.ended <= moments[1]
        lasted = None
        if flow.began is not None and flow.ended is not None:
            lasted = max(0, flow.ended - flow.began - (0 if is_cut else silences.of(flow)))
        member, how = found.members.get(flow.member, ""), CUT if is_cut else SILENT
        return found.format.line(Line(flow, found.id, found.pool, member, lasted, how))


class Silences:
    """How long the kernel remembers a flow of which nothing is heard: so long ago was its last packet."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, flow: Ended) -> int:
        """Nanoseconds."""
        if flow.protocol == UDP:
            return self._read("udp_timeout_stream" if flow.assured else "udp_timeout")
        state = _STATES[flow.state] if flow.state < len(_STATES) else ""
        return self._read(f"sctp_timeout_{state}") if state else 0

    def _read(self, name: str) -> int:
        if name not in self._known:
            try:
                with open(f"{_SETTINGS}{name}", encoding="ascii") as file:  # noqa: PTH123 (pathlib is a megabyte)
                    self._known[name] = int(file.read()) * _SECOND
            except (OSError, ValueError):
                self._known[name] = 0
        return self._known[name]


def _places(servers: Sequence[VirtualServer]) -> Iterator[_Place]:
    for server in servers:
        for address in server.addresses:
            yield _NUMBERS[server.protocol], str(address), server.port
