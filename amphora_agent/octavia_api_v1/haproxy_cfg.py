# SPDX-License-Identifier: Apache-2.0
"""The HAProxy configuration that Octavia's worker uploads, as the text of a bundle.

Invariant: pure. A line of the result is the same line of the upload, kept, rewritten or emptied: what HAProxy says
about "line 12" is true of both. What belongs to a machine (`global`, `peers`, the exporter of metrics) is not in the
result; what is none of this and no section of a load balancer stays, for `haproxy.configuration` to refuse, and what is
no directive of Octavia's template, for `directives` to refuse.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from amphora_agent.bundle import Host
from amphora_agent.errors import RequestRefused
from amphora_agent.haproxy import config_parser
from amphora_agent.haproxy.config_file import RESPONDER_PORT
from amphora_agent.haproxy.config_parser import AGENT_PREFIX
from amphora_agent.haproxy.stick_table_sync import PEERS
from amphora_agent.octavia_api_v1.certificates import bundle_name

# What the worker's template has for the metrics of HAProxy; ours is `AGENT_PREFIX` + "metrics".
_EXPORTERS = {("frontend", "prometheus-exporter-internal-endpoint"), ("backend", "prometheus-exporter-internal")}
_EXPORTER = "prometheus-exporter-internal"
_MACHINE = {"global", "peers"}
_FILE = re.compile(r"(?<=\s)(crt-list|crt|ca-file|crl-file)([ \t]+)(/\S+)")
_PEERS_WORD = re.compile(r"[ \t]peers[ \t]+\S+")
_ELSEWHERE = re.compile(r"[ \t](?:addr|port)[ \t]+\S+")
_LARGEST_PORT = 65535
_PING = ["http-check send meth GET uri-lf '/ping/%[srv_name]'", "option httpchk"]


@dataclass(frozen=True)
class Translation:
    """What an upload comes to.

    ``connections`` is the limit of the whole process, ``files`` are the uploaded files that the text names, ``ports``
    those that it listens on, ``pings`` the addresses to ask by member.
    """

    text: str
    connections: int | None
    threads: int | None
    files: frozenset[str]
    ports: frozenset[int]
    pings: dict[str, Host]


@dataclass
class _Found:
    """What has been seen so far."""

    connections: int | None = None
    threads: int | None = None
    files: set[str] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    pings: dict[str, Host] = field(default_factory=dict)


def translate(uploaded: str, load_balancer_id: str) -> Translation:
    """Turn an upload into the text of a bundle.

    Args:
        load_balancer_id: whose files it may name.

    Raises:
        RequestRefused: it names a file of another load balancer, or has a section of the machine twice.
    """
    found = _Found()
    lines: list[str] = []
    machine: set[str] = set()
    for kind, name, section in _sections(uploaded.split("\n")):
        if kind in machine:
            raise RequestRefused("Invalid request", f"line {len(lines) + 1}: a second '{kind}' section")
        machine |= {kind} & _MACHINE
        lines += _section(kind, name, section, load_balancer_id, found)
    return Translation(
        text="\n".join(lines),
        connections=found.connections,
        threads=found.threads,
        files=frozenset(found.files),
        ports=frozenset(found.ports),
        pings=found.pings,
    )


def draining(text: str) -> frozenset[tuple[str, str]]:
    """The members of a translated text that get no new sessions: backend and name of each server of no weight."""
    servers = config_parser.parse(text).servers
    return frozenset(key for key, server in servers.items() if server.weight == 0)


def _sections(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Each section with its kind, its name and all its lines; what comes before the first one has no kind."""
    kind, name, section = "", "", list[str]()
    for line in lines:
        words = line.split()
        if words and not line[0].isspace() and not line.startswith("#"):
            yield kind, name, section
            kind, name, section = words[0], " ".join(words[1:]), []
        section.append(line)
    yield kind, name, section


def _section(kind: str, name: str, lines: list[str], load_balancer_id: str, found: _Found) -> list[str]:
    if kind == "global":
        _limits(lines, found)
    if kind in _MACHINE or (kind, name) in _EXPORTERS:
        return [""] * len(lines)
    pinged = kind == "backend" and any(line.split()[:2] == ["option", "external-check"] for line in lines)
    return [_line(line, load_balancer_id, found, pinged=pinged) for line in lines]


def _limits(lines: list[str], found: _Found) -> None:
    for line in lines:
        words = line.split()
        if len(words) == 2 and words[1].isdecimal() and int(words[1]) > 0:
            if words[0] == "maxconn":
                found.connections = int(words[1])
            if words[0] == "nbthread":
                found.threads = int(words[1])


def _line(line: str, load_balancer_id: str, found: _Found, *, pinged: bool) -> str:
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


def _named(match: re.Match[str], load_balancer_id: str, found: _Found) -> str:
    keyword, blank, path = match.groups()
    name = path.rpartition("/")[2]
    found.files.add(name)
    return f"{keyword}{blank}{bundle_name(path, load_balancer_id)}"


def _pinged(line: str, words: list[str], found: _Found) -> str:
    """A member that the agent asks for its echo, at the address that the monitor names if it names one."""
    text = words[words.index("addr") + 1] if "addr" in words[:-1] else words[2].rpartition(":")[0]
    try:
        found.pings[words[1]] = ipaddress.ip_address(text.strip("[]"))
    except ValueError as error:
        raise RequestRefused("Invalid request", f"member {words[1]} cannot be asked for an echo: {error}") from error
    return f"{_ELSEWHERE.sub('', line)} addr 127.0.0.1 port {RESPONDER_PORT}"
