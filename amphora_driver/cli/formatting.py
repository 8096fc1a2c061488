# SPDX-License-Identifier: Apache-2.0
"""Values that read differently for a person and for a program.

Invariant: JSON and YAML get numbers, lists and ISO 8601 times that can be computed with; a table gets words that can be
printed.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cliff.columns import FormattableColumn

from amphora_driver.cli.terminal_escape import plain

# Longest line of a request's outcome in a table; the whole text is in JSON.
_LONGEST = 100
_MINUTE, _HOUR, _DAYS = 60.0, 3600.0, 2 * 86400.0


class Moment(FormattableColumn):
    """Seconds since 1970, or None."""

    def human_readable(self) -> str:
        return "" if self._value is None else _utc(self._value).strftime("%Y-%m-%d %H:%M:%S UTC")

    def machine_readable(self) -> str | None:
        return None if self._value is None else _utc(self._value).isoformat()


class Age(FormattableColumn):
    """The time since a moment (seconds since 1970), or None if it never came.

    Args:
        value: the moment.
        never: what a table says where there is none.
    """

    def __init__(self, value: float | None, never: str = "never") -> None:
        super().__init__(value)
        self._never = never

    def human_readable(self) -> str:
        return self._never if self._value is None else f"{lasting(self._seconds())} ago"

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        # Clocks of two machines differ a little: nothing was heard in the future.
        return round(max(0.0, time.time() - float(self._value)), 1)


class Left(FormattableColumn):
    """The time until a moment (seconds since 1970), or None if none is set."""

    def human_readable(self) -> str:
        return "" if self._value is None else lasting(self._seconds())

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        # What is over is due now.
        return round(max(0.0, float(self._value) - time.time()), 1)


class Span(FormattableColumn):
    """How long something took or is lasting, in seconds; None if it has not begun or not ended."""

    def human_readable(self) -> str:
        return "" if self._value is None else lasting(self._value)

    def machine_readable(self) -> float | None:
        return None if self._value is None else round(float(self._value), 3)


class Plain(FormattableColumn):
    """A word or a number, or None: an empty field for a person."""

    def human_readable(self) -> str:
        return "" if self._value is None else plain(str(self._value), "\n")

    def machine_readable(self) -> Any:
        return self._value


class Listed(FormattableColumn):
    """Several words."""

    def human_readable(self) -> str:
        return ", ".join(plain(str(one)) for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


class Said(FormattableColumn):
    """What an amphora said in its last heartbeat, or None if it did not say."""

    def human_readable(self) -> str:
        return {True: "yes", False: "no"}.get(self._value, "")

    def machine_readable(self) -> bool | None:
        return None if self._value is None else bool(self._value)


class Partners(FormattableColumn):
    """The amphorae that one knows to be its partners."""

    def human_readable(self) -> str:
        return "\n".join(plain(f"{one.get('id')} at {one.get('address')}") for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


class Requests(FormattableColumn):
    """Accepted calls as dictionaries, newest first."""

    def human_readable(self) -> str:
        rows: Sequence[Mapping[str, Any]] = self._value
        return "\n".join(plain(_request(row)) for row in rows)

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_timed(row, "accepted_at", "applied_at") for row in self._value]


class Machines(FormattableColumn):
    """The amphorae of a load balancer as dictionaries, the oldest first."""

    def human_readable(self) -> str:
        return "\n".join(plain(_machine(row)) for row in self._value) or "none"

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_timed(row, "certificate_expires_at", "seen_at", "audited_at") for row in self._value]


class Failovers(FormattableColumn):
    """Fail-overs that go on, as dictionaries, the oldest first."""

    def human_readable(self) -> str:
        return "\n".join(plain(_failover(row)) for row in self._value) or "none"

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_timed(row, "silent_since", "begun_at", "served_at", "ended_at") for row in self._value]


class Counts(FormattableColumn):
    """How many of each kind."""

    def human_readable(self) -> str:
        return ", ".join(f"{number} {kind}" for kind, number in self._value.items()) or "nothing"

    def machine_readable(self) -> dict[str, int]:
        return dict(self._value)


class Chosen(FormattableColumn):
    """What flavor and availability zone chose, by name."""

    def human_readable(self) -> str:
        return "\n".join(plain(f"{name}: {value}") for name, value in self._value.items()) or "as configured"

    def machine_readable(self) -> dict[str, Any]:
        return dict(self._value)


class Ports(FormattableColumn):
    """What an amphora is plugged into, as recorded."""

    def human_readable(self) -> str:
        return "\n".join(plain(_port(one.get("port", {}))) for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


def lasting(seconds: float) -> str:
    """A time in seconds, as a person says it: never more than two units."""
    if seconds < _MINUTE:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if seconds < _HOUR:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if seconds < _DAYS else f"{days} d {hours % 24} h"


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)


def _timed(row: Mapping[str, Any], *times: str) -> dict[str, Any]:
    """A row with these of its values as ISO 8601 times."""
    return {name: Moment(value).machine_readable() if name in times else value for name, value in row.items()}


def _machine(row: Mapping[str, Any]) -> str:
    generation = f"confirmed {row['confirmed']}"
    if row["heard"] is not None and row["heard"] != row["confirmed"]:
        generation += f" (says {row['heard']})"
    holds = ", had the VIPs" if row["silent"] else ", has the VIPs"
    words = [
        f"{row['id']} {row['role']} {row['state']}" + (holds if row["has_vips"] else ""),
        f"{generation}, heard {Age(row['seen_at']).human_readable()}",
    ]
    words += [f"{name}: {row[name]}" for name in ("silent", "verdict") if row[name]]
    # What was found stays: whether it still is so is another question.
    words += [f"{'drift' if row['drifts'] else 'last drift'}: {row['drift']}"] if row["drift"] else []
    words += [f"reason: {row['reason']}"] if row["reason"] else []
    words += [f"agent {row['agent_version']}"] if row["agent_version"] else []
    words += [f"image {row['image']}"] if row["image"] else []
    return ", ".join(words)


def _failover(row: Mapping[str, Any]) -> str:
    begun = f"{row['id']}: {row['cause']}, begun {Age(row['begun_at']).human_readable()}"
    served = "" if row["served_at"] is None else f", served again after {lasting(row['served_at'] - row['begun_at'])}"
    return f"{begun}{served}, amphora {row['amphora_id'] or 'all'} ({row['reason'] or 'no reason given'})"


def _request(row: Mapping[str, Any]) -> str:
    begin = f"{row['generation']}: {row['action']} {row['object_id']}, {Moment(row['accepted_at']).human_readable()}"
    if row["applied_at"] is None:
        end = "not applied yet"
    else:
        end = f"applied after {row['applied_at'] - row['accepted_at']:.2f} s"
    outcome = " ".join((row["outcome"] or "").split())
    return f"{begin}, {end}" + (f" ({outcome[:_LONGEST]})" if outcome else "")


def _port(port: Mapping[str, Any]) -> str:
    addresses = ", ".join(str(one.get("address")) for one in port.get("addresses", ()))
    return f"{port.get('mac')} {addresses} on network {port.get('network_id')}"
