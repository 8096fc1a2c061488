# SPDX-License-Identifier: Apache-2.0
"""Column values with one form for tables and one for JSON and YAML, and safe output to a terminal.

Invariant: JSON and YAML contain numbers, lists and ISO 8601 times. A table contains short printable text.

Invariant: names, reasons, configurations and the reports of amphorae are untrusted, and a terminal executes control
sequences (ECMA-48). The output has JSON escapes in place of unprintable characters (RFC 8259, section 7), so JSON
output stays equivalent.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast

from cliff.columns import FormattableColumn

# Maximum number of characters of the outcome of a request in a table. The JSON format has the whole text.
_MAX_OUTCOME = 100
_MINUTE, _HOUR, _DAYS = 60.0, 3600.0, 2 * 86400.0
# The output stream does not escape newlines and tabs, which separate the lines and columns of a table.
_LAYOUT = "\n\t"


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""Return the text with unprintable characters as escapes such as `\u001b`, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape(one) for one in text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class _EscapingStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the escaped text; return the number of characters before the escape."""
        self._stream.write(escape_unprintable(text, _LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escaping_stream(stream: TextIO) -> TextIO:
    """Wrap a text stream: the result escapes unprintable characters in everything that is written."""
    return cast("TextIO", _EscapingStream(stream))


class Value(FormattableColumn):
    """A text or a number, or None: an empty field in a table. Subclasses format other types."""

    def human_readable(self) -> str:
        return "" if self._value is None else self._text()

    def machine_readable(self) -> Any:
        return None if self._value is None else self._data()

    def _text(self) -> str:
        return escape_unprintable(str(self._value), "\n")

    def _data(self) -> Any:
        return self._value


class Timestamp(Value):
    """A time in seconds since 1970."""

    def _text(self) -> str:
        return self._utc().strftime("%Y-%m-%d %H:%M:%S UTC")

    def _data(self) -> str:
        return self._utc().isoformat()

    def _utc(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self._value, dt.timezone.utc)


class Duration(Value):
    """A duration in seconds, or None without a start or an end."""

    def _text(self) -> str:
        return format_duration(self._value)

    def _data(self) -> float:
        return round(float(self._value), 3)


class Remaining(Value):
    """Seconds until a time (seconds since 1970), 0 if it has passed; or None."""

    def _text(self) -> str:
        return format_duration(self._data())

    def _data(self) -> float:
        return round(max(0.0, float(self._value) - time.time()), 1)


class Age(Value):
    """Seconds since a time (seconds since 1970); a table shows `never` for None."""

    def __init__(self, value: float | None, never: str = "never") -> None:
        super().__init__(value)
        self._never = never

    def human_readable(self) -> str:
        return self._never if self._value is None else f"{format_duration(self._data())} ago"

    def _data(self) -> float:
        # The clocks of two hosts differ slightly, so a negative age counts as zero.
        return round(max(0.0, time.time() - float(self._value)), 1)


class YesNo(Value):
    """A boolean of an amphora's last heartbeat, or None if the heartbeat does not contain it."""

    def _text(self) -> str:
        return "yes" if self._value else "no"

    def _data(self) -> bool:
        return bool(self._value)


class ValueList(Value):
    """Several texts."""

    def _text(self) -> str:
        return ", ".join(escape_unprintable(str(one)) for one in self._value)

    def _data(self) -> list[Any]:
        return list(self._value)


class Counts(Value):
    """Numbers by kind."""

    def _text(self) -> str:
        return ", ".join(f"{number} {kind}" for kind, number in self._value.items()) or "nothing"

    def _data(self) -> dict[str, int]:
        return dict(self._value)


class Profile(Value):
    """The values that the flavor and the availability zone set, by name."""

    def _text(self) -> str:
        lines = (escape_unprintable(f"{name}: {value}") for name, value in self._value.items())
        return "\n".join(lines) or "as configured"

    def _data(self) -> dict[str, Any]:
        return dict(self._value)


class Rows(Value):
    """Dictionaries: one line for each in a table; with ISO 8601 times in JSON.

    A key `at` or `since`, or one that ends with `_at` or `_since`, is a time in seconds since 1970 or None.
    """

    empty = ""

    def describe(self, row: Any) -> str:
        """Return the line for a table."""
        raise NotImplementedError

    def _text(self) -> str:
        return "\n".join(escape_unprintable(self.describe(row)) for row in self._value) or self.empty

    def _data(self) -> list[dict[str, Any]]:
        # SQLAlchemy's column names belong to a subclass of str, which PyYAML cannot represent. So `str` converts the
        # names.
        return [{str(name): _iso_time(name, value) for name, value in row.items()} for row in self._value]


class Partners(Rows):
    """The VRRP peers that an amphora knows."""

    def describe(self, row: Mapping[str, Any]) -> str:
        return f"{row.get('id')} at {row.get('address')}"


class Ports(Rows):
    """The network ports of an amphora, as the database has them."""

    def describe(self, row: Mapping[str, Any]) -> str:
        port = row.get("port", {})
        addresses = ", ".join(str(one.get("address")) for one in port.get("addresses", ()))
        return f"{port.get('mac')} {addresses} on network {port.get('network_id')}"


class Requests(Rows):
    """Accepted provider calls, newest first."""

    def describe(self, row: Mapping[str, Any]) -> str:
        accepted, applied = row["accepted_at"], row["applied_at"]
        end = "not applied yet" if applied is None else f"applied after {applied - accepted:.2f} s"
        outcome = " ".join((row["outcome"] or "").split())
        words = (
            f"{row['generation']}: {row['action']} {row['object_id']}, {Timestamp(accepted).human_readable()}, {end}"
        )
        return words + (f" ({outcome[:_MAX_OUTCOME]})" if outcome else "")


class Amphorae(Rows):
    """The amphorae of a load balancer, oldest first."""

    empty = "none"

    def describe(self, row: Mapping[str, Any]) -> str:
        generation = f"confirmed {row['confirmed']}"
        if row["heard"] is not None and row["heard"] != row["confirmed"]:
            generation += f" (reports {row['heard']})"
        holds = ", had the VIPs" if row["silent"] else ", has the VIPs"
        # The database keeps the text of a drift after its repair. The label "last drift" marks such a text.
        drift = "drift" if row["drifts"] else "last drift"
        more = {
            "silent: ": row["silent"],
            "verdict: ": row["verdict"],
            f"{drift}: ": row["drift"],
            "reason: ": row["reason"],
            "agent ": row["agent_version"],
            "image ": row["image"],
        }
        words = [
            f"{row['id']} {row['role']} {row['state']}" + (holds if row["has_vips"] else ""),
            f"{generation}, last heartbeat {Age(row['seen_at']).human_readable()}",
            *(f"{name}{value}" for name, value in more.items() if value),
        ]
        return ", ".join(words)


class StatusReasons(Rows):
    """Objects of a load balancer with a status that needs an explanation, and the reason."""

    empty = "none: every object is ACTIVE, and ONLINE or NO_MONITOR"

    def describe(self, row: Mapping[str, Any]) -> str:
        since = "" if row["since"] is None else f", since {Timestamp(row['since']).human_readable()}"
        return f"{row['kind']} {row['id']} {row['provisioning']}, {row['operating']}{since}: {row['reason']}"


class Failovers(Rows):
    """Fail-overs in progress, oldest first."""

    empty = "none"

    def describe(self, row: Mapping[str, Any]) -> str:
        begun = f"{row['id']}: {row['cause']}, begun {Age(row['begun_at']).human_readable()}"
        served = ""
        if row["served_at"] is not None:
            served = f", served again after {format_duration(row['served_at'] - row['begun_at'])}"
        return f"{begun}{served}, amphora {row['amphora_id'] or 'all'} ({row['reason'] or 'no reason given'})"


def format_duration(seconds: float) -> str:
    """Return a duration as text with at most two units."""
    if seconds < _MINUTE:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if seconds < _HOUR:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if seconds < _DAYS else f"{days} d {hours % 24} h"


def _iso_time(name: str, value: Any) -> Any:
    return Timestamp(value).machine_readable() if name in ("at", "since") or name.endswith(("_at", "_since")) else value
