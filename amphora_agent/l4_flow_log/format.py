# SPDX-License-Identifier: Apache-2.0
"""A line of the flow log: HAProxy's log-format (configuration guide, 8.2.6), for a flow that HAProxy never saw.

Invariant: pure. A variable means what it means in HAProxy's own lines; what nothing here knows is "-". A line has no
line's end in it, whatever the format is.

Three expressions are ours: ``%[protocol]``, ``%[packets_in]`` (from the client), ``%[packets_out]``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from amphora_agent.l4_flow_log.conntrack_events import SCTP, Counted, Ended

NAMES = {17: "UDP", SCTP: "SCTP"}
SILENT, CUT = "--", "D-"
"""As HAProxy's termination states: nothing came any more (or both sides ended it); its member is not there any more."""
_NANOSECONDS, _MILLISECOND = 10**9, 10**6
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_PIECE = re.compile(r"%%|%(?:\{(?P<flags>[^{}]*)\})?(?:(?P<name>[A-Za-z0-9]+)|\[(?P<expression>[^\[\]]*)\])")
_NOTHING = "-"


@dataclass(frozen=True)
class Line:
    """What a line is made of: the flow, and whose it was. ``lasted`` is in nanoseconds."""

    flow: Ended
    listener: str
    pool: str
    member: str
    lasted: int | None
    how: str


def _when(line: Line) -> float:
    return (line.flow.began or time.time_ns()) / _NANOSECONDS


def _date(seconds: time.struct_time) -> str:
    day = f"{seconds.tm_mday:02}/{_MONTHS[seconds.tm_mon - 1]}/{seconds.tm_year}"
    return f"{day}:{seconds.tm_hour:02}:{seconds.tm_min:02}:{seconds.tm_sec:02}"


def _zone(seconds: time.struct_time) -> str:
    minutes = abs(seconds.tm_gmtoff) // 60
    return f"{'-' if seconds.tm_gmtoff < 0 else '+'}{minutes // 60:02}{minutes % 60:02}"


def _precise(line: Line) -> str:
    when = _when(line)
    return f"{_date(time.localtime(when))}.{int(when % 1 * 1000):03}"


def _local(line: Line) -> str:
    found = time.localtime(_when(line))
    return f"{_date(found)} {_zone(found)}"


def _lasted(line: Line) -> str:
    return "-1" if line.lasted is None else str(line.lasted // _MILLISECOND)


def _bytes(counted: Counted | None) -> str:
    return _NOTHING if counted is None else str(counted.bytes)


def _packets(counted: Counted | None) -> str:
    return _NOTHING if counted is None else str(counted.packets)


_VARIABLES: dict[str, Callable[[Line], str]] = {
    "f": lambda line: line.listener,
    "ft": lambda line: line.listener,
    "b": lambda line: f"{line.pool}:{line.listener}" if line.pool else _NOTHING,
    "s": lambda line: line.member or _NOTHING,
    "ci": lambda line: line.flow.client[0],
    "cp": lambda line: str(line.flow.client[1]),
    "fi": lambda line: line.flow.place[0],
    "fp": lambda line: str(line.flow.place[1]),
    "si": lambda line: line.flow.member[0],
    "sp": lambda line: str(line.flow.member[1]),
    "t": _precise,
    "T": lambda line: f"{_date(time.gmtime(_when(line)))} +0000",
    "Tl": _local,
    "Ts": lambda line: str(int(_when(line))),
    "ms": lambda line: f"{int(_when(line) % 1 * 1000):03}",
    "B": lambda line: _bytes(line.flow.sent),
    "U": lambda line: _bytes(line.flow.received),
    "Tt": _lasted,
    "Tu": _lasted,
    "ts": lambda line: line.how,
    "tsc": lambda line: line.how,
}
_EXPRESSIONS: dict[str, Callable[[Line], str]] = {
    "protocol": lambda line: NAMES[line.flow.protocol],
    "packets_in": lambda line: _packets(line.flow.received),
    "packets_out": lambda line: _packets(line.flow.sent),
}


class Format:
    """A format that was read once.

    Args:
        text: as an operator writes it for HAProxy, with the ids of project and load balancer in their places.
    """

    def __init__(self, text: str) -> None:
        self._pieces: list[str | Callable[[Line], str]] = []
        quoted, at = False, 0
        for found in _PIECE.finditer(text):
            self._pieces.append(text[at : found.start()])
            at = found.end()
            if found[0] == "%%":
                self._pieces.append("%")
                continue
            flags = (found["flags"] or "").split(",")
            wanted = "+Q" in flags or (quoted and "-Q" not in flags)
            if found["name"] == "o":  # flags of all that follow
                quoted = wanted
                continue
            self._pieces.append(_piece(found["name"], found["expression"], quoted=wanted))
        self._pieces.append(text[at:])

    def line(self, line: Line) -> str:
        """The line, without its end."""
        return "".join(piece if isinstance(piece, str) else piece(line) for piece in self._pieces)


def _piece(name: str | None, expression: str | None, *, quoted: bool) -> str | Callable[[Line], str]:
    known = _VARIABLES.get(name or "") or _EXPRESSIONS.get(expression or "")
    if known is None:
        return _NOTHING
    read = known
    return (lambda line: f'"{read(line)}"') if quoted else read
