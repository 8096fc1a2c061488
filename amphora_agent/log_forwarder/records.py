# SPDX-License-Identifier: Apache-2.0
"""Log lines: received datagrams, RFC 5424 messages, and JSON lines.

Invariant: the text of a line is data. A rendered line has no control character, so a line never becomes two lines or a
different message. The ids in structured data come from the settings of the agent or match the pattern of an id. The
module is pure.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from amphora_agent.services.output_lines import CHECKER, HAPROXY, is_admin

LONGEST_LINE = 8192
"""Maximum length of a received line in bytes."""
# Syslog facilities (RFC 5424, 6.2.1) of HAProxy and of the L4 daemon, which send to the same port.
_SENDERS = {16: HAPROXY, 17: CHECKER}
FLOW_FACILITY, ADMIN_FACILITY = 16, 17
_INFO, _LOWEST = 6, 7
_PRIORITY = re.compile(rb"<(\d{1,3})>")
# A line of a daemon as journald forwards it: "<30>Nov 24 13:40:00 name[12]: text". The supervisor omits the time and
# the process id.
_ADMIN = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?(?P<name>[^\s\[\]:]{1,64})(?:\[(?P<process>\d{1,10})\])?:"
    r" ?(?P<text>.*)",
    re.DOTALL,
)
# First words of lines of Python's logging and of HAProxy, with their syslog severities.
_LEVELS = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2, "[NOTICE]": 5, "[WARNING]": 4, "[ALERT]": 1}
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Characters that need a backslash in a value of structured data (RFC 5424, 6.3.3).
_PARAMETER, _BACKSLASH = re.compile(r'(["\\\]])'), r"\\\1"
_NOT_PRINTABLE = re.compile(r"[^!-~]")
_SEVERITIES = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")


@dataclass(frozen=True)
class Source:
    """The amphora that the lines come from. Ids are empty for a warm spare."""

    hostname: str
    amphora_id: str
    project_id: str = ""
    load_balancer_id: str = ""


@dataclass(frozen=True)
class Record:
    """One line. ``listener`` is empty for an administrative line; ``time`` is in seconds since 1970."""

    severity: int
    application: str
    process: str
    text: str
    is_flow: bool
    listener: str
    time: float


def parse_loopback(data: bytes, source: Source, now: float) -> Record | None:
    """Return a flow of HAProxy or of the L4 daemon.

    None for other lines: HAProxy also writes its messages to its output, which the journal or the supervisor forwards.
    """
    found = _PRIORITY.match(data)
    if found is None:
        return None
    facility, severity = divmod(int(found[1]), 8)
    application = _SENDERS.get(facility)
    if application is None or severity != _INFO:
        return None
    text = _escape(data[found.end() :].decode(errors="replace").rstrip("\n\0"))
    return Record(severity, application, "-", text, True, _listener(text, source), now)


def parse_admin(data: bytes, now: float) -> Record | None:
    """Return a line of the journal or of the supervisor; None for a flow, which the loopback port has too."""
    found = _PRIORITY.match(data)
    parts = None if found is None else _ADMIN.fullmatch(data[found.end() :].decode(errors="replace"))
    if found is None or parts is None:
        return None
    name, text = parts["name"], _escape(parts["text"].rstrip("\n\0"))
    if not text or not is_admin(name, text):
        return None
    severity = int(found[1]) & _LOWEST
    if severity == _INFO:
        severity = _LEVELS.get(text.partition(" ")[0], severity)
    return Record(severity, _NOT_PRINTABLE.sub("_", name)[:48], parts["process"] or "-", text, False, "", now)


def _listener(text: str, source: Source) -> str:
    """Return the listener of a flow: the first word, after the ids of project and load balancer.

    The ids may be missing.
    The controller renders each log format with the listener before all values of a client.
    """
    for known in (source.project_id, source.load_balancer_id):
        if known and text.startswith(f"{known} "):
            text = text[len(known) + 1 :]
    word = text.partition(" ")[0]
    return word if _ID.fullmatch(word) else ""


def _escape(text: str) -> str:
    """Replace each control or format character by # and its octal number, as rsyslog does."""
    return text if text.isprintable() else "".join(one if one.isprintable() else f"#{ord(one):03o}" for one in text)


class Renderer:
    """Renders the lines of one amphora."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._host = _NOT_PRINTABLE.sub("_", source.hostname)[:255] or "-"
        ids = {"id": source.amphora_id, "project": source.project_id, "loadbalancer": source.load_balancer_id}
        # Structured data need an enterprise number. This project has none and uses 32473, the number for examples (RFC
        # 5612).
        self._data = "[amphora@32473" + "".join(
            f' {name}="{_PARAMETER.sub(_BACKSLASH, value)}"' for name, value in ids.items() if value
        )
        self._second, self._date = -1, ""

    def syslog(self, record: Record) -> bytes:
        """Return the line as an RFC 5424 message, without framing."""
        facility, kind = (FLOW_FACILITY, "flow") if record.is_flow else (ADMIN_FACILITY, "-")
        listener = f' listener="{record.listener}"' if record.listener else ""
        return (
            f"<{facility * 8 + record.severity}>1 {self._time(record.time)} {self._host} {record.application} "
            f"{record.process} {kind} {self._data}{listener}] {record.text}"
        ).encode(errors="replace")

    def json(self, record: Record) -> bytes:
        """Return the line as one JSON object with a line end."""
        document = {
            "timestamp": self._time(record.time),
            "kind": "flow" if record.is_flow else "admin",
            "severity": _SEVERITIES[record.severity],
            "host": self._host,
            "application": record.application,
            "amphora_id": self._source.amphora_id,
            "project_id": self._source.project_id,
            "load_balancer_id": self._source.load_balancer_id,
            "listener_id": record.listener,
            "message": record.text,
        }
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    def _time(self, seconds: float) -> str:
        """Return a time as in RFC 3339, with microseconds. Lines of one second share the work."""
        whole = int(seconds)
        if whole != self._second:
            self._second, self._date = whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
        return f"{self._date}.{int((seconds - whole) * 1_000_000):06}Z"
