# SPDX-License-Identifier: Apache-2.0
"""Column values with one form for tables and one for JSON and YAML, and safe output to a terminal.

Invariant: JSON and YAML contain numbers, lists and ISO 8601 times. A table contains short printable text.

Invariant: names, reasons, configurations and the reports of amphorae are untrusted, and a terminal executes control
sequences (ECMA-48). Unprintable characters are written as JSON escapes (RFC 8259, section 7), so JSON output stays
equivalent.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO, cast

from cliff.columns import FormattableColumn

# Longest outcome of a request in a table; JSON contains the whole text.
_MAX_OUTCOME = 100
_MINUTE, _HOUR, _DAYS = 60.0, 3600.0, 2 * 86400.0
# The unprintable characters with which commands separate lines and columns.
_LAYOUT = "\n\t"


# --- output to a terminal -------------------------------------------------------------------------------------------


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""Return the text with each unprintable character as an escape such as `\u001b`.

    Args:
        text: untrusted text.
        keep: unprintable characters that stay unchanged.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape(one) for one in text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class EscapingStream:
    """Wraps a text stream and escapes unprintable characters in everything that is written.

    Args:
        stream: standard output or standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the escaped text; return the number of characters before the escape."""
        self._stream.write(escape_unprintable(text, _LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escaping_stream(stream: TextIO) -> TextIO:
    """Return the stream wrapped in an `EscapingStream`."""
    return cast("TextIO", EscapingStream(stream))


# --- column values --------------------------------------------------------------------------------------------------


class Timestamp(FormattableColumn):
    """A time in seconds since 1970, or None."""

    def human_readable(self) -> str:
        return "" if self._value is None else _utc(self._value).strftime("%Y-%m-%d %H:%M:%S UTC")

    def machine_readable(self) -> str | None:
        return None if self._value is None else _utc(self._value).isoformat()


class Age(FormattableColumn):
    """Seconds that have passed since a time, or None for an event that has not happened.

    Args:
        value: the time in seconds since 1970.
        never: text of a table for None.
    """

    def __init__(self, value: float | None, never: str = "never") -> None:
        super().__init__(value)
        self._never = never

    def human_readable(self) -> str:
        return self._never if self._value is None else f"{format_duration(self._seconds())} ago"

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        # The clocks of two hosts differ slightly; an age is never negative.
        return round(max(0.0, time.time() - float(self._value)), 1)


class Remaining(FormattableColumn):
    """Seconds until a time (seconds since 1970), 0 if it has passed; or None."""

    def human_readable(self) -> str:
        return "" if self._value is None else format_duration(self._seconds())

    def machine_readable(self) -> float | None:
        return None if self._value is None else self._seconds()

    def _seconds(self) -> float:
        return round(max(0.0, float(self._value) - time.time()), 1)


class Duration(FormattableColumn):
    """A duration in seconds, or None without a start or an end."""

    def human_readable(self) -> str:
        return "" if self._value is None else format_duration(self._value)

    def machine_readable(self) -> float | None:
        return None if self._value is None else round(float(self._value), 3)


class Value(FormattableColumn):
    """A text or a number, or None: an empty field in a table."""

    def human_readable(self) -> str:
        return "" if self._value is None else escape_unprintable(str(self._value), "\n")

    def machine_readable(self) -> Any:
        return self._value


class ValueList(FormattableColumn):
    """Several texts."""

    def human_readable(self) -> str:
        return ", ".join(escape_unprintable(str(one)) for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


class YesNo(FormattableColumn):
    """A boolean of an amphora's last heartbeat, or None if the heartbeat does not contain it."""

    def human_readable(self) -> str:
        return {True: "yes", False: "no"}.get(self._value, "")

    def machine_readable(self) -> bool | None:
        return None if self._value is None else bool(self._value)


class Partners(FormattableColumn):
    """The VRRP peers that an amphora knows."""

    def human_readable(self) -> str:
        return "\n".join(escape_unprintable(f"{one.get('id')} at {one.get('address')}") for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


class Requests(FormattableColumn):
    """Accepted provider calls as dictionaries, newest first."""

    def human_readable(self) -> str:
        rows: Sequence[Mapping[str, Any]] = self._value
        return "\n".join(escape_unprintable(_describe_request(row)) for row in rows)

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_with_iso_times(row, "accepted_at", "applied_at") for row in self._value]


class Amphorae(FormattableColumn):
    """The amphorae of a load balancer as dictionaries, oldest first."""

    def human_readable(self) -> str:
        return "\n".join(escape_unprintable(_describe_amphora(row)) for row in self._value) or "none"

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_with_iso_times(row, "certificate_expires_at", "seen_at", "audited_at") for row in self._value]


class Failovers(FormattableColumn):
    """Fail-overs in progress as dictionaries, oldest first."""

    def human_readable(self) -> str:
        return "\n".join(escape_unprintable(_describe_failover(row)) for row in self._value) or "none"

    def machine_readable(self) -> list[dict[str, Any]]:
        return [_with_iso_times(row, "silent_since", "begun_at", "served_at", "ended_at") for row in self._value]


class Counts(FormattableColumn):
    """Numbers by kind."""

    def human_readable(self) -> str:
        return ", ".join(f"{number} {kind}" for kind, number in self._value.items()) or "nothing"

    def machine_readable(self) -> dict[str, int]:
        return dict(self._value)


class Profile(FormattableColumn):
    """The values that the flavor and the availability zone set, by name."""

    def human_readable(self) -> str:
        lines = (escape_unprintable(f"{name}: {value}") for name, value in self._value.items())
        return "\n".join(lines) or "as configured"

    def machine_readable(self) -> dict[str, Any]:
        return dict(self._value)


class Ports(FormattableColumn):
    """The network ports of an amphora, as the database has them."""

    def human_readable(self) -> str:
        return "\n".join(escape_unprintable(_describe_port(one.get("port", {}))) for one in self._value)

    def machine_readable(self) -> list[Any]:
        return list(self._value)


def format_duration(seconds: float) -> str:
    """Return a duration as text with at most two units."""
    if seconds < _MINUTE:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if seconds < _HOUR:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if seconds < _DAYS else f"{days} d {hours % 24} h"


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)


def _with_iso_times(row: Mapping[str, Any], *times: str) -> dict[str, Any]:
    """Return the row with these values as ISO 8601 times."""
    return {name: Timestamp(value).machine_readable() if name in times else value for name, value in row.items()}


def _describe_amphora(row: Mapping[str, Any]) -> str:
    generation = f"confirmed {row['confirmed']}"
    if row["heard"] is not None and row["heard"] != row["confirmed"]:
        generation += f" (reports {row['heard']})"
    holds = ", had the VIPs" if row["silent"] else ", has the VIPs"
    words = [
        f"{row['id']} {row['role']} {row['state']}" + (holds if row["has_vips"] else ""),
        f"{generation}, last heartbeat {Age(row['seen_at']).human_readable()}",
    ]
    words += [f"{name}: {row[name]}" for name in ("silent", "verdict") if row[name]]
    # The text of the last drift stays after the repair.
    words += [f"{'drift' if row['drifts'] else 'last drift'}: {row['drift']}"] if row["drift"] else []
    words += [f"reason: {row['reason']}"] if row["reason"] else []
    words += [f"agent {row['agent_version']}"] if row["agent_version"] else []
    words += [f"image {row['image']}"] if row["image"] else []
    return ", ".join(words)


def _describe_failover(row: Mapping[str, Any]) -> str:
    begun = f"{row['id']}: {row['cause']}, begun {Age(row['begun_at']).human_readable()}"
    served = ""
    if row["served_at"] is not None:
        served = f", served again after {format_duration(row['served_at'] - row['begun_at'])}"
    return f"{begun}{served}, amphora {row['amphora_id'] or 'all'} ({row['reason'] or 'no reason given'})"


def _describe_request(row: Mapping[str, Any]) -> str:
    accepted = Timestamp(row["accepted_at"]).human_readable()
    begin = f"{row['generation']}: {row['action']} {row['object_id']}, {accepted}"
    if row["applied_at"] is None:
        end = "not applied yet"
    else:
        end = f"applied after {row['applied_at'] - row['accepted_at']:.2f} s"
    outcome = " ".join((row["outcome"] or "").split())
    return f"{begin}, {end}" + (f" ({outcome[:_MAX_OUTCOME]})" if outcome else "")


def _describe_port(port: Mapping[str, Any]) -> str:
    addresses = ", ".join(str(one.get("address")) for one in port.get("addresses", ()))
    return f"{port.get('mac')} {addresses} on network {port.get('network_id')}"
