# SPDX-License-Identifier: Apache-2.0
"""Attribution of ended flows. Removed listeners and members stay known for flows that end later."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from amphora_agent.l4 import eligible_members
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_flow_log.conntrack_events import SCTP, UDP, EndedFlow
from amphora_agent.l4_flow_log.format import COMPLETED, MEMBER_GONE, LogEntry, LogFormat

_PROTOCOL_NUMBERS = {"UDP": UDP, "SCTP": SCTP}
_MAX_FORMER = 4096
_SECOND = 10**9
_SETTINGS = "/proc/sys/net/netfilter/nf_conntrack_"
# States of an SCTP flow in the order of linux/netfilter/nf_conntrack_sctp.h.
_SETUP_STATES = ("", "closed", "cookie_wait", "cookie_echoed", "established")
_SCTP_STATES = (*_SETUP_STATES, "shutdown_sent", "shutdown_recd", "shutdown_ack_sent", "heartbeat_sent")

_Destination = tuple[int, str, int]
_MemberAddress = tuple[str, int]


@dataclass
class _Listener:
    id: str
    pool: str
    format: LogFormat | None
    members: dict[_MemberAddress, str] = field(default_factory=dict)


class FlowAttribution:
    """Listeners and members by address and port."""

    def __init__(self) -> None:
        self._listeners: dict[_Destination, _Listener] = {}
        self._formats: dict[str, LogFormat] = {}
        # Members whose flows the kernel has continued to forward since the last change, including members without new
        # flows.
        self._retained: set[tuple[_Destination, _MemberAddress]] = set()
        # Members whose flows the kernel has ended, with the earliest and the latest possible time of the end in
        # nanoseconds since 1970.
        self._cut: dict[tuple[_Destination, _MemberAddress], tuple[int, int]] = {}
        self._begun: int | None = None

    def add_servers(self, servers: Sequence[VirtualServer]) -> None:
        """Add listeners and members, before they are served."""
        present = set(_destinations(servers))
        if len(self._listeners) > _MAX_FORMER:
            self._listeners = {place: one for place, one in self._listeners.items() if place in present}
        for server in servers:
            members = {(str(one.address), one.port): one.id for one in server.members}
            for place in _destinations([server]):
                former = self._listeners.get(place)
                known = former.members if former is not None and former.id == server.id else {}
                if len(known) > _MAX_FORMER:
                    known = {}
                text = server.log_format
                form = None if text is None else self._formats.setdefault(text, LogFormat(text))
                self._listeners[place] = _Listener(server.id, server.pool_id or "", form, {**known, **members})

    def servers_applied(
        self, servers: Sequence[VirtualServer], up: eligible_members.MemberHealth, begun: int, *, done: bool
    ) -> None:
        """Record members whose flows the kernel ended since `begun`. A failed change is not ``done``."""
        begun = begun if self._begun is None else self._begun
        self._begun = None if done else begun
        if not done:
            return
        retained = {
            (place, (str(one.address), one.port))
            for server in servers
            for place in _destinations([server])
            for one in eligible_members.retained_members(server, up)
        }
        now = time.time_ns()
        for gone in self._retained - retained:
            # The loop below deletes the first entries of `_cut`, which must be the oldest. So an existing entry of this
            # member moves to the end.
            self._cut.pop(gone, None)
            self._cut[gone] = begun, now
        for old in list(self._cut)[:-_MAX_FORMER]:
            del self._cut[old]
        self._retained = retained

    def render(self, flow: EndedFlow, timeouts: FlowTimeouts) -> str | None:
        """Return the line for a flow; None if its listener has no log."""
        place = flow.protocol, *flow.destination
        found = self._listeners.get(place)
        if found is None or found.format is None:
            return None
        period = self._cut.get((place, flow.member))
        is_cut = period is not None and flow.ended is not None and period[0] <= flow.ended <= period[1]
        duration = None
        if flow.began is not None and flow.ended is not None:
            duration = max(0, flow.ended - flow.began - (0 if is_cut else timeouts.of(flow)))
        member, ended_by = found.members.get(flow.member, ""), MEMBER_GONE if is_cut else COMPLETED
        return found.format.render(LogEntry(flow, found.id, found.pool, member, duration, ended_by))


class FlowTimeouts:
    """The kernel's time-outs for silent flows. An expired flow ended one time-out after its last packet."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, flow: EndedFlow) -> int:
        """Return the time-out of a flow in nanoseconds."""
        if flow.protocol == UDP:
            return self._read("udp_timeout_stream" if flow.assured else "udp_timeout")
        state = _SCTP_STATES[flow.state] if flow.state < len(_SCTP_STATES) else ""
        return self._read(f"sctp_timeout_{state}") if state else 0

    def _read(self, name: str) -> int:
        if name not in self._known:
            try:
                with open(f"{_SETTINGS}{name}", encoding="ascii") as file:  # noqa: PTH123 (pathlib needs a megabyte)
                    self._known[name] = int(file.read()) * _SECOND
            except (OSError, ValueError):
                self._known[name] = 0
        return self._known[name]


def _destinations(servers: Sequence[VirtualServer]) -> Iterator[_Destination]:
    for server in servers:
        for address in server.addresses:
            yield _PROTOCOL_NUMBERS[server.protocol], str(address), server.port
