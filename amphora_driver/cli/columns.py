# SPDX-License-Identifier: Apache-2.0
"""Values that read differently for a person and for a program.

Invariant: JSON and YAML get numbers, lists and ISO 8601 times that can be computed with; a table gets words.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cliff.columns import FormattableColumn

# Longest line of a request's outcome in a table; the whole text is in JSON.
_LONGEST = 100


class Moment(FormattableColumn):
    """Seconds since 1970, or None."""

    def human_readable(self) -> str:
        return "" if self._value is None else _utc(self._value).strftime("%Y-%m-%d %H:%M:%S UTC")

    def machine_readable(self) -> str | None:
        return None if self._value is None else _utc(self._value).isoformat()


class Age(FormattableColumn):
    """The time since a moment (seconds since 1970), or None if it never came."""

    def human_readable(self) -> str:
        return "never" if self._value is None else f"{self._seconds()} s ago"

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        # Clocks of two machines differ a little: nothing was heard in the future.
        return round(max(0.0, time.time() - float(self._value)), 1)


class Left(FormattableColumn):
    """The time until a moment (seconds since 1970), or None if none is set."""

    def human_readable(self) -> str:
        return "" if self._value is None else f"{self._seconds()} s"

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        # What is over is due now.
        return round(max(0.0, float(self._value) - time.time()), 1)


class Said(FormattableColumn):
    """What an amphora said in its last heartbeat, or None if it did not say."""

    def human_readable(self) -> str:
        return {True: "yes", False: "no"}.get(self._value, "")

    def machine_readable(self) -> bool | None:
        return None if self._value is None else bool(self._value)


class Partners(FormattableColumn):
    """The amphorae that one knows to be its partners."""

    def human_readable(self) -> str:
        return "\n".join(f"{one.get('id')} at {one.get('address')}" for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


class Requests(FormattableColumn):
    """Accepted calls as dictionaries, newest first."""

    def human_readable(self) -> str:
        rows: Sequence[Mapping[str, Any]] = self._value
        return "\n".join(_request(row) for row in rows)

    def machine_readable(self) -> list[dict[str, Any]]:
        times = ("accepted_at", "applied_at")
        return [
            {name: Moment(value).machine_readable() if name in times else value for name, value in row.items()}
            for row in self._value
        ]


class Counts(FormattableColumn):
    """How many of each kind."""

    def human_readable(self) -> str:
        return ", ".join(f"{number} {kind}" for kind, number in self._value.items()) or "nothing"

    def machine_readable(self) -> dict[str, int]:
        return dict(self._value)


class Chosen(FormattableColumn):
    """What flavor and availability zone chose, by name."""

    def human_readable(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._value.items()) or "as configured"

    def machine_readable(self) -> dict[str, Any]:
        return dict(self._value)


class Ports(FormattableColumn):
    """What an amphora is plugged into, as recorded."""

    def human_readable(self) -> str:
        return "\n".join(_port(one.get("port", {})) for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)


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
