# SPDX-License-Identifier: Apache-2.0
"""The status page: one document that needs nothing else.

Invariant: pure, from a view of the fleet to bytes. Every value goes through the template's escaping, and the policy
that is sent along lets no other style or script run than the two in this room, by their digests: what a tenant, a
backend or an amphora has written is text. Without scripts the page says the same; with them it replaces its parts by
newer ones.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amphora_driver.telemetry.alerts import Level, Notice, gathered, oldest_due, worst
from amphora_driver.telemetry.snapshot_cache import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amphora_driver.telemetry.fleet_snapshot import Balancer, Fleet, Machine
    from amphora_driver.telemetry.snapshot_cache import View

_HERE = Path(__file__).parent
_STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")
# No value can hold such a mark: it would be escaped.
_PART = re.compile(r"<!--(\w+)-->(.*?)<!--/\1-->", re.DOTALL)
# So much fits into a head; what is left out is said.
MOST_NOTICES = 40
MOST_ROWS = 100
LONGEST_QUERY = 200
_DAY = 86_400.0
_UNITS = ((_DAY, "d"), (3600.0, "h"), (60.0, "min"))
_MARKS = {Level.WELL: "✓", Level.WATCH: "!", Level.TROUBLE: "✕"}


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_digest(_STYLE)}",
        f"script-src {_digest(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """The process that answers.

    Attributes:
        kind: what it is there for.
        name: of the process.
        version: of its installation.
        interval: seconds between two heartbeats of an amphora.
        silent_after: seconds after which an amphora that is not heard is silent.
    """

    kind: str
    name: str
    version: str
    interval: float
    silent_after: float


class Share(msgspec.Struct, frozen=True):
    """A part of a bar: what, how many, in which colour, from where to where in per cent."""

    word: str
    number: int
    tone: str
    begin: float = 0.0
    width: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """A load balancer with its amphorae, and how bad the worst of it is."""

    balancer: Balancer
    amphorae: tuple[Machine, ...]
    level: Level


def document(view: View, who: Who, query: str = "") -> bytes:
    """The whole page.

    Args:
        view: what is shown.
        who: answers.
        query: part of a name, id or address of the load balancers to be listed.
    """
    return _TEMPLATE.render(**_said(view, who, query), style=_STYLE, script=_SCRIPT).encode()


def refreshed(view: View, whole: bytes) -> bytes:
    """What the page's script asks for: the parts of a whole page, as JSON."""
    parts = dict(_PART.findall(whole.decode()))
    level = _level(view)
    return msgspec.json.encode({"title": _title(view), "level": level.name.lower(), "parts": parts})


def facts(view: View, who: Who) -> bytes:
    """The same as facts, for programs."""
    level = _level(view)
    found = [{**msgspec.to_builtins(one), "level": one.level.name.lower()} for one in view.notices]
    shown = {
        "level": level.name.lower(),
        "trouble": view.trouble,
        "answered_by": {"kind": who.kind, "name": who.name, "version": who.version},
        "notices": found,
        "fleet": view.fleet,
    }
    return msgspec.json.encode(shown)


def _said(view: View, who: Who, query: str) -> dict[str, Any]:
    """Everything the template names."""
    fleet = view.fleet
    level = _level(view)
    shown, _things = gathered(view.notices)
    said: dict[str, Any] = {
        "view": view,
        "fleet": fleet,
        "who": who,
        "query": query[:LONGEST_QUERY],
        "level": level,
        "headline": _headline(view, level),
        "title": _title(view),
        "shown": shown[:MOST_NOTICES],
        "more": max(0, len(shown) - MOST_NOTICES),
        "now": 0.0 if fleet is None else fleet.at,
    }
    if fleet is not None:
        rows, total = _rows(fleet, view.notices, query.strip().lower()[:LONGEST_QUERY])
        said |= {
            "rows": rows,
            "matching": total,
            "balancer_shares": _balancer_shares(fleet),
            "amphora_shares": _amphora_shares(fleet),
            "heartbeat_shares": _heartbeat_shares(fleet, who),
            "queue_shares": _queue_shares(fleet),
            "oldest_heartbeat": max((fleet.at - heard_at(one) for one in _ready(fleet)), default=None),
            "oldest_due": oldest_due(fleet),
            "first_expiry": min(
                (one.certificate_expires_at for one in fleet.amphorae if one.certificate_expires_at), default=None
            ),
            "going": [one for one in fleet.failovers if one.ended_at is None],
            "names": {one.id: one.name for one in fleet.balancers if one.name},
            "versions": Counter(one.agent_version or "unknown" for one in fleet.amphorae),
            "owners": Counter(one.owner for one in fleet.balancers if one.owner),
        }
    return said


def _level(view: View) -> Level:
    return Level.TROUBLE if view.trouble is not None else worst(view.notices)


def _title(view: View) -> str:
    level = _level(view)
    return f"{_MARKS[level]} {_headline(view, level)} - amphorae"


def _headline(view: View, level: Level) -> str:
    if view.trouble is not None:
        return "The database does not answer"
    if level is Level.WELL:
        return "All is well"
    _shown, number = gathered(tuple(one for one in view.notices if one.level is level))
    if level is Level.TROUBLE:
        return "1 thing needs you" if number == 1 else f"{number} things need you"
    return "1 thing to watch" if number == 1 else f"{number} things to watch"


def _rows(fleet: Fleet, found: Iterable[Notice], query: str) -> tuple[list[Row], int]:
    """Load balancers that are asked for, those that need attention first; and how many there are."""
    levels: dict[str, Level] = {}
    for notice in found:
        if notice.id is not None:
            levels[notice.id] = max(notice.level, levels.get(notice.id, Level.WELL))
    machines: dict[str, list[Machine]] = {}
    for machine in fleet.amphorae:
        machines.setdefault(machine.load_balancer_id, []).append(machine)
    rows = []
    for balancer in fleet.balancers:
        mine = machines.get(balancer.id, [])
        words = (balancer.id, balancer.name or "", *balancer.addresses, *(one.id for one in mine))
        if query and not any(query in word.lower() for word in words):
            continue
        level = max(levels.get(one, Level.WELL) for one in (balancer.id, *(each.id for each in mine)))
        # Who serves first, who goes last.
        mine = sorted(mine, key=lambda one: (not one.holds_vip, one.state == "retiring"))
        rows.append(Row(balancer, tuple(mine), level))
    rows.sort(key=lambda row: (-row.level, row.balancer.state == "ACTIVE", row.balancer.name or row.balancer.id))
    return rows[:MOST_ROWS], len(rows)


def _ready(fleet: Fleet) -> list[Machine]:
    return [one for one in fleet.amphorae if one.state == "ready" and one.wanted]


def heard_at(machine: Machine) -> float:
    """When it was heard, or made: who never spoke is as old as it is."""
    return machine.heard_at or machine.created_at


def _balancer_shares(fleet: Fleet) -> list[Share]:
    states = Counter(one.state for one in fleet.balancers)
    pending = sum(number for state, number in states.items() if state.startswith("PENDING"))
    down = sum(one.operating == "ERROR" for one in fleet.balancers if one.state == "ACTIVE")
    return _bar(
        Share("active", states["ACTIVE"] - down, "well"),
        Share("active, nobody served", down, "watch"),
        Share("pending", pending, "busy"),
        Share("in error", states["ERROR"], "trouble"),
    )


def _amphora_shares(fleet: Fleet) -> list[Share]:
    ready = _ready(fleet)
    behind = sum(one.confirmed < one.wanted for one in ready)
    serving = [one for one in fleet.amphorae if one.wanted]
    return _bar(
        Share("serve the newest generation", len(ready) - behind, "well"),
        Share("behind", behind, "watch"),
        Share("booting", sum(one.state == "booting" for one in serving), "busy"),
        Share("retiring", sum(one.state == "retiring" for one in serving), "quiet"),
    )


def _heartbeat_shares(fleet: Fleet, who: Who) -> list[Share]:
    fresh, late, silent, never = 0, 0, 0, 0
    for one in _ready(fleet):
        age = fleet.at - heard_at(one)
        if one.heard_at is None:
            never += 1
        elif one.silence is not None or age > who.silent_after:
            silent += 1
        elif age > 2 * who.interval:
            late += 1
        else:
            fresh += 1
    return _bar(
        Share("heard in time", fresh, "well"),
        Share("late", late, "watch"),
        Share("silent", silent, "trouble"),
        Share("never heard", never, "quiet"),
    )


def _queue_shares(fleet: Fleet) -> list[Share]:
    worked = sum(one.owner is not None for one in fleet.balancers)
    left = [one for one in fleet.balancers if one.due and one.owner is None]
    due = sum(one.due_at <= fleet.at for one in left)
    return _bar(
        Share("worked on", worked, "well"),
        Share("due", due, "busy"),
        Share("wait for their time", len(left) - due, "quiet"),
    )


def _bar(*shares: Share) -> list[Share]:
    """With their places, in per cent; whoever is there is seen, however few."""
    whole = sum(one.number for one in shares)
    if not whole:
        return list(shares)
    widths = [max(1.5, 100 * one.number / whole) if one.number else 0.0 for one in shares]
    scale, begin, placed = 100 / sum(widths), 0.0, []
    for one, width in zip(shares, widths, strict=True):
        placed.append(msgspec.structs.replace(one, begin=begin, width=width * scale))
        begin += width * scale
    return placed


# --- words --------------------------------------------------------------------------------------------------------


def age(seconds: float | None) -> str:
    """A length of time in words: '4 s', '3 min', '2 h', '5 d'."""
    if seconds is None:
        return "never"
    seconds = max(0.0, seconds)
    for unit, word in _UNITS:
        if seconds >= unit * 2:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds:.1f} s" if 0.05 <= seconds < 10 else f"{seconds:.0f} s"


def moment(seconds: float) -> str:
    """A time in UTC, as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(seconds: float) -> str:
    """Its time of day."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M:%S")


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"age": age, "moment": moment, "clock": clock}
    made.globals |= {"Level": Level, "duration": duration, "heard_at": heard_at, "MARKS": _MARKS}
    return made


_TEMPLATE = _environment().get_template("page.html.j2")
