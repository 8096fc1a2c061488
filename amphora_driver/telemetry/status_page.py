# SPDX-License-Identifier: Apache-2.0
"""Renders the status page as one self-contained HTML document.

Invariant: the functions do no I/O. The template escapes every value, and the content security policy
permits only the style and the script of this package, by their digests. So text of a tenant, a backend or an amphora
never becomes code. Without scripts the page has the same contents; the script only updates its parts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amphora_driver.telemetry.alerts import Level, Notice, group_notices, oldest_due, worst_level
from amphora_driver.telemetry.process_groups import group_processes
from amphora_driver.telemetry.snapshot_cache import failover_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amphora_driver.telemetry.fleet_snapshot import AmphoraInfo, FleetSnapshot, LoadBalancerInfo, ProcessInfo
    from amphora_driver.telemetry.snapshot_cache import View

_HERE = Path(__file__).parent
_STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")
# HTML comments mark the parts of the page. The template escapes all values, so no value contains such a mark.
_PART = re.compile(r"<!--(\w+)-->(.*?)<!--/\1-->", re.DOTALL)
# Maximum numbers of notices and of load balancers on the page.
MAX_NOTICES = 40
MAX_ROWS = 100
MAX_QUERY = 200
_DAY = 86_400.0
_UNITS = ((_DAY, "d"), (3600.0, "h"), (60.0, "min"))
_MARKS = {Level.OK: "✓", Level.WARNING: "!", Level.CRITICAL: "✕"}


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_digest(_STYLE)}; script-src {_digest(_SCRIPT)}; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The process that answers.

    Attributes:
        interval: seconds between two heartbeats of an amphora.
        silent_after: seconds without a heartbeat after which an amphora is silent.
    """

    kind: str
    name: str
    version: str
    interval: float
    silent_after: float


class BarSegment(msgspec.Struct, frozen=True):
    """A segment of a bar: label, number, colour class, position and width in per cent."""

    label: str
    number: int
    tone: str
    begin: float = 0.0
    width: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """A load balancer with its amphorae, and the highest level of their notices."""

    balancer: LoadBalancerInfo
    amphorae: tuple[AmphoraInfo, ...]
    level: Level


class ProcessRow(msgspec.Struct, frozen=True):
    """A line of the list of processes.

    Attributes:
        process: a living process, or the newest of the dead processes without a successor.
        replaced: number of dead processes of the kind and host that were replaced, in one line of the group.
        missing: number of dead processes without a successor; 0 for a living process.
    """

    process: ProcessInfo
    replaced: int = 0
    missing: int = 0


def render_page(view: View, process: ProcessIdentity, query: str = "") -> bytes:
    """Return the complete page; `query` is part of a name, id or address of the load balancers to list."""
    return _TEMPLATE.render(**_template_values(view, process, query), style=_STYLE, script=_SCRIPT).encode()


def encode_parts(view: View, page: bytes) -> bytes:
    """Return the parts of a complete page as JSON, for the script of the page."""
    parts = dict(_PART.findall(page.decode()))
    return msgspec.json.encode({"title": _title(view), "level": _level(view).name.lower(), "parts": parts})


def encode_status(view: View, process: ProcessIdentity) -> bytes:
    """Return the view as JSON, for programs."""
    status = {
        "level": _level(view).name.lower(),
        "read_error": view.read_error,
        "answered_by": {"kind": process.kind, "name": process.name, "version": process.version},
        "notices": [{**msgspec.to_builtins(one), "level": one.level.name.lower()} for one in view.notices],
        "fleet": view.fleet,
    }
    return msgspec.json.encode(status)


def _template_values(view: View, process: ProcessIdentity, query: str) -> dict[str, Any]:
    fleet, level = view.fleet, _level(view)
    notices, _count = group_notices(view.notices)
    values: dict[str, Any] = {
        "view": view,
        "fleet": fleet,
        "process": process,
        "query": query[:MAX_QUERY],
        "level": level,
        "headline": _headline(view, level),
        "title": _title(view),
        "notices": notices[:MAX_NOTICES],
        "more_notices": max(0, len(notices) - MAX_NOTICES),
        "now": 0.0 if fleet is None else fleet.at,
    }
    if fleet is not None:
        rows, total = _rows(fleet, view.notices, query.strip().lower()[:MAX_QUERY])
        values |= {
            "rows": rows,
            "processes": list_process_rows(fleet.processes, fleet.at),
            "matching": total,
            "balancer_bar": _balancer_bar(fleet),
            "amphora_bar": _amphora_bar(fleet),
            "heartbeat_bar": _heartbeat_bar(fleet, process),
            "queue_bar": _queue_bar(fleet),
            "oldest_heartbeat": max((fleet.at - one.last_heartbeat for one in _ready(fleet)), default=None),
            "oldest_due": oldest_due(fleet),
            "first_expiry": min(filter(None, (one.certificate_expires_at for one in fleet.amphorae)), default=None),
            "open_failovers": [one for one in fleet.failovers if one.ended_at is None],
            "names": {one.id: one.name for one in fleet.balancers if one.name},
            "versions": Counter(one.agent_version or "unknown" for one in fleet.amphorae),
        }
    return values


def _level(view: View) -> Level:
    return Level.CRITICAL if view.read_error is not None else worst_level(view.notices)


def _title(view: View) -> str:
    level = _level(view)
    return f"{_MARKS[level]} {_headline(view, level)} - amphorae"


def _headline(view: View, level: Level) -> str:
    if view.read_error is not None:
        return "The database does not answer"
    if level is Level.OK:
        return "No problems"
    _grouped, count = group_notices(tuple(one for one in view.notices if one.level is level))
    if level is Level.CRITICAL:
        return "1 problem needs action" if count == 1 else f"{count} problems need action"
    return "1 warning" if count == 1 else f"{count} warnings"


def _rows(fleet: FleetSnapshot, notices: Iterable[Notice], query: str) -> tuple[list[Row], int]:
    """Return the first matching load balancers, the highest level first, and the number of all."""
    levels: dict[str, Level] = {}
    for notice in notices:
        if notice.id is not None:
            levels[notice.id] = max(notice.level, levels.get(notice.id, Level.OK))
    by_balancer = fleet.amphorae_by_balancer()
    rows = []
    for balancer in fleet.balancers:
        amphorae = by_balancer.get(balancer.id, [])
        words = (balancer.id, balancer.name or "", *balancer.addresses, *(one.id for one in amphorae))
        if query and not any(query in word.lower() for word in words):
            continue
        level = max(levels.get(one, Level.OK) for one in (balancer.id, *(each.id for each in amphorae)))
        # The amphora with the VIPs comes first, and retiring amphorae come last.
        amphorae = sorted(amphorae, key=lambda one: (not one.holds_vip, one.state == "retiring"))
        rows.append(Row(balancer, tuple(amphorae), level))
    rows.sort(key=lambda row: (-row.level, row.balancer.state == "ACTIVE", row.balancer.name or row.balancer.id))
    return rows[:MAX_ROWS], len(rows)


def list_process_rows(processes: Iterable[ProcessInfo], now: float) -> list[ProcessRow]:
    """Return a line for each living process, and one line for all missing processes of a kind and host."""
    rows = []
    for group in group_processes(processes, now):
        lines = [ProcessRow(one) for one in sorted(group.alive, key=lambda one: one.name)]
        if group.missing:
            lines.append(ProcessRow(group.missing[-1], missing=len(group.missing)))
        # The index 0 is safe: each replaced process has a successor that is alive or missing, so `lines` is not empty.
        lines[0] = msgspec.structs.replace(lines[0], replaced=len(group.replaced))
        rows += lines
    return rows


def _ready(fleet: FleetSnapshot) -> list[AmphoraInfo]:
    return [one for one in fleet.amphorae if one.state == "ready" and one.wanted]


def _balancer_bar(fleet: FleetSnapshot) -> list[BarSegment]:
    states = Counter(one.state for one in fleet.balancers)
    pending = sum(number for state, number in states.items() if state.startswith("PENDING"))
    down = sum(one.operating == "ERROR" for one in fleet.balancers if one.state == "ACTIVE")
    return _bar(
        BarSegment("active", states["ACTIVE"] - down, "ok"),
        BarSegment("active, no clients served", down, "warning"),
        BarSegment("pending", pending, "busy"),
        BarSegment("in error", states["ERROR"], "critical"),
    )


def _amphora_bar(fleet: FleetSnapshot) -> list[BarSegment]:
    ready = _ready(fleet)
    behind = sum(one.confirmed < one.wanted for one in ready)
    serving = [one for one in fleet.amphorae if one.wanted]
    return _bar(
        BarSegment("serve the newest generation", len(ready) - behind, "ok"),
        BarSegment("behind", behind, "warning"),
        BarSegment("booting", sum(one.state == "booting" for one in serving), "busy"),
        BarSegment("retiring", sum(one.state == "retiring" for one in serving), "quiet"),
    )


def _heartbeat_bar(fleet: FleetSnapshot, process: ProcessIdentity) -> list[BarSegment]:
    def state(one: AmphoraInfo) -> str:
        age = fleet.at - one.last_heartbeat
        if one.heard_at is None:
            return "none yet"
        if one.silence is not None or age > process.silent_after:
            return "silent"
        return "late" if age > 2 * process.interval else "in time"

    counted = Counter(map(state, _ready(fleet)))
    tones = {"in time": "ok", "late": "warning", "silent": "critical", "none yet": "quiet"}
    return _bar(*(BarSegment(label, counted[label], tone) for label, tone in tones.items()))


def _queue_bar(fleet: FleetSnapshot) -> list[BarSegment]:
    running = sum(one.owner is not None for one in fleet.balancers)
    pending = [one for one in fleet.balancers if one.due and one.owner is None]
    due = sum(one.due_at <= fleet.at for one in pending)
    return _bar(
        BarSegment("running", running, "ok"),
        BarSegment("due", due, "busy"),
        BarSegment("due later", len(pending) - due, "quiet"),
    )


def _bar(*segments: BarSegment) -> list[BarSegment]:
    """Set positions and widths of the segments. A nonempty segment has a minimum width, to be visible."""
    total = sum(one.number for one in segments)
    if not total:
        return list(segments)
    widths = [max(1.5, 100 * one.number / total) if one.number else 0.0 for one in segments]
    scale, begin, placed = 100 / sum(widths), 0.0, []
    for one, width in zip(segments, widths, strict=True):
        placed.append(msgspec.structs.replace(one, begin=begin, width=width * scale))
        begin += width * scale
    return placed


def format_age(seconds: float | None) -> str:
    """Return a duration as text: '4 s', '3 min', '2 h', '5 d'."""
    if seconds is None:
        return "never"
    seconds = max(0.0, seconds)
    for unit, word in _UNITS:
        if seconds >= unit * 2:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds:.1f} s" if 0.05 <= seconds < 10 else f"{seconds:.0f} s"


def _format_utc(seconds: float, pattern: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    """Return a UTC time, by default in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(pattern)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {
    "age": format_age,
    "timestamp": _format_utc,
    "time_of_day": partial(_format_utc, pattern="%H:%M:%S"),
}
_ENVIRONMENT.globals |= {"Level": Level, "failover_duration": failover_duration, "MARKS": _MARKS}
_TEMPLATE = _ENVIRONMENT.get_template("page.html.j2")
