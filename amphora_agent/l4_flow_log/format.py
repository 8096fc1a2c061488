# SPDX-License-Identifier: Apache-2.0
"""Lines of the flow log in HAProxy's log-format (configuration guide, 8.2.6), with more expressions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from amphora_agent.l4_flow_log.conntrack_events import SCTP, EndedFlow, FlowCounters

PROTOCOL_NAMES = {17: "UDP", SCTP: "SCTP"}
COMPLETED, MEMBER_GONE = "--", "D-"
"""Termination states as in HAProxy: the flow expired or both sides ended it; its member was removed or failed."""
_NANOSECONDS, _MILLISECOND = 10**9, 10**6
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_PIECE = re.compile(r"%%|%(?:\{(?P<flags>[^{}]*)\})?(?:(?P<name>[A-Za-z0-9]+)|\[(?P<expression>[^\[\]]*)\])")
_UNKNOWN = "-"


@dataclass(frozen=True)
class LogEntry:
    """The values of a line: the flow and its attribution. ``duration`` is in nanoseconds."""

    flow: EndedFlow
    listener: str
    pool: str
    member: str
    duration: int | None
    ended_by: str


def _start_time(entry: LogEntry) -> float:
    return (entry.flow.began or time.time_ns()) / _NANOSECONDS


def _date(seconds: time.struct_time) -> str:
    day = f"{seconds.tm_mday:02}/{_MONTHS[seconds.tm_mon - 1]}/{seconds.tm_year}"
    return f"{day}:{seconds.tm_hour:02}:{seconds.tm_min:02}:{seconds.tm_sec:02}"


def _local_date(entry: LogEntry) -> str:
    found = time.localtime(_start_time(entry))
    minutes = abs(found.tm_gmtoff) // 60
    return f"{_date(found)} {'-' if found.tm_gmtoff < 0 else '+'}{minutes // 60:02}{minutes % 60:02}"


def _milliseconds(entry: LogEntry) -> str:
    return f"{int(_start_time(entry) % 1 * 1000):03}"


def _duration(entry: LogEntry) -> str:
    return "-1" if entry.duration is None else str(entry.duration // _MILLISECOND)


def _count(counters: FlowCounters | None, field: str) -> str:
    return _UNKNOWN if counters is None else str(getattr(counters, field))


_VARIABLES: dict[str, Callable[[LogEntry], str]] = {
    "f": lambda entry: entry.listener,
    "ft": lambda entry: entry.listener,
    "b": lambda entry: f"{entry.pool}:{entry.listener}" if entry.pool else _UNKNOWN,
    "s": lambda entry: entry.member or _UNKNOWN,
    "ci": lambda entry: entry.flow.client[0],
    "cp": lambda entry: str(entry.flow.client[1]),
    "fi": lambda entry: entry.flow.destination[0],
    "fp": lambda entry: str(entry.flow.destination[1]),
    "si": lambda entry: entry.flow.member[0],
    "sp": lambda entry: str(entry.flow.member[1]),
    "t": lambda entry: f"{_date(time.localtime(_start_time(entry)))}.{_milliseconds(entry)}",
    "T": lambda entry: f"{_date(time.gmtime(_start_time(entry)))} +0000",
    "Tl": _local_date,
    "Ts": lambda entry: str(int(_start_time(entry))),
    "ms": _milliseconds,
    "B": lambda entry: _count(entry.flow.sent, "bytes"),
    "U": lambda entry: _count(entry.flow.received, "bytes"),
    "Tt": _duration,
    "Tu": _duration,
    "ts": lambda entry: entry.ended_by,
    "tsc": lambda entry: entry.ended_by,
}
_EXPRESSIONS: dict[str, Callable[[LogEntry], str]] = {
    "protocol": lambda entry: PROTOCOL_NAMES[entry.flow.protocol],
    "packets_in": lambda entry: _count(entry.flow.received, "packets"),
    "packets_out": lambda entry: _count(entry.flow.sent, "packets"),
}


class LogFormat:
    """A parsed log format: as for HAProxy, with the ids of project and load balancer inserted."""

    def __init__(self, text: str) -> None:
        self._pieces: list[str | Callable[[LogEntry], str]] = []
        quoted, at = False, 0
        for found in _PIECE.finditer(text):
            self._pieces.append(text[at : found.start()])
            at = found.end()
            if found[0] == "%%":
                self._pieces.append("%")
                continue
            flags = (found["flags"] or "").split(",")
            wanted = "+Q" in flags or (quoted and "-Q" not in flags)
            if found["name"] == "o":
                # The variable "%o" of HAProxy's log format has no value and only sets flags for all later variables.
                quoted = wanted
                continue
            read = _VARIABLES.get(found["name"] or "") or _EXPRESSIONS.get(found["expression"] or "")
            if read is None:
                self._pieces.append(_UNKNOWN)
            else:
                self._pieces += ['"', read, '"'] if wanted else [read]
        self._pieces.append(text[at:])

    def render(self, entry: LogEntry) -> str:
        """Return the line, without a line end."""
        return "".join(piece if isinstance(piece, str) else piece(entry) for piece in self._pieces)
