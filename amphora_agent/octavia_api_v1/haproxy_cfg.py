# SPDX-License-Identifier: Apache-2.0
"""Conversion of an uploaded HAProxy configuration to the text of a bundle.

Invariant: no I/O. Each line of the upload is kept, rewritten or empty in the result, so that line numbers in HAProxy's
messages are right. Sections of the machine (`global`, `peers`, the metrics exporter) become empty.
`haproxy.config_parser` and `directives` refuse other unknown sections and directives.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from amphora_agent.bundle import Host
from amphora_agent.errors import RequestRefused
from amphora_agent.haproxy import config_parser
from amphora_agent.haproxy.config_file import PEERS, RESPONDER_PORT
from amphora_agent.haproxy.config_parser import AGENT_PREFIX
from amphora_agent.octavia_api_v1.uploads import bundle_name

# The agent removes these sections of Octavia's metrics exporter from the configuration, because the responder serves
# the metrics.
_EXPORTERS = {("frontend", "prometheus-exporter-internal-endpoint"), ("backend", "prometheus-exporter-internal")}
_EXPORTER = "prometheus-exporter-internal"
_MACHINE = {"global", "peers"}
_FILE = re.compile(r"(?<=\s)(crt-list|crt|ca-file|crl-file)([ \t]+)(/\S+)")
_PEERS_WORD = re.compile(r"[ \t]peers[ \t]+\S+")
_ELSEWHERE = re.compile(r"[ \t](?:addr|port)[ \t]+\S+")
_LARGEST_PORT = 65535
_PING = ["http-check send meth GET uri-lf '/ping/%[srv_name]'", "option httpchk"]


@dataclass
class Translation:
    """The result of a conversion.

    ``connections`` is the limit of the process. ``files`` are the uploaded files that the text names. ``ports`` are the
    ports of listeners. ``pings`` has the addresses of PING checks by member.
    """

    text: str = ""
    connections: int | None = None
    threads: int | None = None
    files: set[str] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    pings: dict[str, Host] = field(default_factory=dict)


def translate(uploaded: str, load_balancer_id: str) -> Translation:
    """Convert an upload to the text of a bundle.

    Raises RequestRefused if the text names a file of another load balancer, or repeats a section of the machine.
    """
    found = Translation()
    lines: list[str] = []
    machine: set[str] = set()
    for kind, name, section in _sections(uploaded.split("\n")):
        if kind in machine:
            raise RequestRefused("Invalid request", f"line {len(lines) + 1}: a second '{kind}' section")
        machine |= {kind} & _MACHINE
        lines += _section(kind, name, section, load_balancer_id, found)
    found.text = "\n".join(lines)
    return found


def draining(text: str) -> frozenset[tuple[str, str]]:
    """Return backend and name of each server with weight 0 in a converted text."""
    servers = config_parser.parse(text).servers
    return frozenset(key for key, server in servers.items() if server.weight == 0)


def _sections(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each section with kind, name and lines; lines before the first section have no kind."""
    kind, name, section = "", "", list[str]()
    for line in lines:
        words = line.split()
        if words and not line[0].isspace() and not line.startswith("#"):
            yield kind, name, section
            kind, name, section = words[0], " ".join(words[1:]), []
        section.append(line)
    yield kind, name, section


def _section(kind: str, name: str, lines: list[str], load_balancer_id: str, found: Translation) -> list[str]:
    if kind == "global":
        _limits(lines, found)
    if kind in _MACHINE or (kind, name) in _EXPORTERS:
        return [""] * len(lines)
    pinged = kind == "backend" and any(line.split()[:2] == ["option", "external-check"] for line in lines)
    return [_line(line, load_balancer_id, found, pinged=pinged) for line in lines]


def _limits(lines: list[str], found: Translation) -> None:
    for line in lines:
        words = line.split()
        if len(words) == 2 and words[1].isdecimal() and int(words[1]) > 0:
            if words[0] == "maxconn":
                found.connections = int(words[1])
            if words[0] == "nbthread":
                found.threads = int(words[1])


def _line(line: str, load_balancer_id: str, found: Translation, *, pinged: bool) -> str:
    words = line.split()
    first = words[0] if words else ""
    if first in ("bind", "server"):
        line = _FILE.sub(lambda match: _named(match, load_balancer_id, found), line)
    if first == "bind" and len(words) > 1:
        port = words[1].rpartition(":")[2]
        if port.isdecimal() and 1 <= int(port) <= _LARGEST_PORT:
            found.ports.add(int(port))
    if first == "default_backend" and words[1:] == [_EXPORTER]:
        return f"{_indent(line)}default_backend {AGENT_PREFIX}metrics"
    if first == "stick-table":
        return f"{_PEERS_WORD.sub('', line)} peers {PEERS}"
    if pinged and first == "external-check":
        return f"{_indent(line)}{_PING[0]}"
    if pinged and words[:2] == ["option", "external-check"]:
        return f"{_indent(line)}{_PING[1]}"
    if pinged and first == "server" and "check" in words[3:]:
        return _pinged(line, words, found)
    return line


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _named(match: re.Match[str], load_balancer_id: str, found: Translation) -> str:
    keyword, blank, path = match.groups()
    name = path.rpartition("/")[2]
    found.files.add(name)
    return f"{keyword}{blank}{bundle_name(path, load_balancer_id)}"


def _pinged(line: str, words: list[str], found: Translation) -> str:
    """Record a member with a PING check; the monitor's address has precedence over the member's."""
    text = words[words.index("addr") + 1] if "addr" in words[:-1] else words[2].rpartition(":")[0]
    try:
        found.pings[words[1]] = ipaddress.ip_address(text.strip("[]"))
    except ValueError as error:
        raise RequestRefused("Invalid request", f"the amphora cannot ping member {words[1]}: {error}") from error
    return f"{_ELSEWHERE.sub('', line)} addr 127.0.0.1 port {RESPONDER_PORT}"
