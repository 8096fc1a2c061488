# SPDX-License-Identifier: Apache-2.0
"""The text of a daemon's systemd unit.

Invariant: each argument reaches the daemon unchanged, with any characters. No unit depends on the unit of the agent, so
that no daemon stops with the agent. The module is pure. Sources: systemd.service(5), systemd.syntax(7).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from amphora_agent.errors import ServiceError
from amphora_agent.services.template_files import load_template

PREFIX = "amphora-"
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_ESCAPED = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_FIRST_PRINTABLE, _DELETE = " ", "\x7f"


@dataclass(frozen=True)
class Confinement:
    """The rights of a daemon beyond the limits of all daemons. Source: systemd.exec(5), capabilities(7).

    A daemon without a ``user`` runs as root with these capabilities only; another user has them as ambient
    capabilities. ``capabilities`` omit the prefix ``CAP_``, ``families`` of sockets the prefix ``AF_``. ``calls`` are
    system calls besides systemd's set ``@system-service``.

    ``directory`` is the only writable directory, below /run; None for no writable directory, empty for the run
    directory of the agent. ``sets``: the daemon changes settings of its network namespace. ``compiles``: it generates
    machine code.
    """

    user: str | None = None
    capabilities: tuple[str, ...] = ()
    families: tuple[str, ...] = ("UNIX",)
    calls: tuple[str, ...] = ()
    directory: str | None = ""
    sets: bool = False
    compiles: bool = False


CHECKER_USER, RESPONDER_USER, LOG_FORWARDER_USER = "amphora-checker", "amphora-responder", "amphora-logs"
_IP = ("UNIX", "INET", "INET6")
_PACKETS = (*_IP, "NETLINK", "PACKET")
_NETWORK_CAPABILITIES = ("NET_ADMIN", "NET_RAW")
_MASTER_CAPABILITIES = ("KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
# A daemon without an entry has no Linux capability, and may write to the agent's run directory only.
CONFINEMENTS: Mapping[str, Confinement] = {
    # HAProxy's master opens ports and files as root at each reload, and its workers change to the user `haproxy`. PCRE2
    # compiles regular expressions to machine code, which needs executable memory.
    "haproxy": Confinement(None, _MASTER_CAPABILITIES, _IP, calls=("chroot",), compiles=True),
    "keepalived": Confinement(None, _NETWORK_CAPABILITIES, _PACKETS),
    "amphora-responder": Confinement(RESPONDER_USER, ("NET_RAW",), _IP, directory=None),
    "amphora-checker": Confinement(
        CHECKER_USER, _NETWORK_CAPABILITIES, _PACKETS, directory="amphora-agent/checker", sets=True
    ),
    "amphora-log-forwarder": Confinement(LOG_FORWARDER_USER, (), _IP, directory="amphora-agent/log-forwarder"),
}


@dataclass(frozen=True)
class Unit:
    """A daemon as a systemd unit.

    ``namespace`` is the path of its network namespace; None for the namespace of the machine. systemd runs ``script``
    (`templates/daemon.sh`) before the start, after the start and after the exit. ``state`` is the directory of its
    state files, ``run`` the run directory of the agent. ``delay`` is in seconds before a restart. ``leftovers`` are
    removed before a start.
    """

    name: str
    argv: tuple[str, ...]
    namespace: Path | None
    script: Path
    state: Path
    run: Path
    health: Path | None = None
    delay: float = 0.0
    leftovers: tuple[Path, ...] = ()


def unit_name(service: str) -> str:
    """Return the unit of a service, with a prefix that no Debian package uses; raises ServiceError."""
    if not _NAME.fullmatch(service):
        raise ServiceError(f"run {service!r}", "this is not a valid name of a service")
    return f"{service if service.startswith(PREFIX) else PREFIX + service}.service"


def quoted(word: str) -> str:
    """Quote an argument for a command line with the prefix ``:``; raises ServiceError."""
    if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ServiceError("write a command line", "an argument contains a NUL character or half of a surrogate pair")
    return '"' + "".join(map(_escaped, word)) + '"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPED:
        return _ESCAPED[letter]
    return f"\\x{ord(letter):02x}" if letter < _FIRST_PRINTABLE or letter == _DELETE else letter


def _plain(path: Path) -> str:
    """Return a path for a setting whose value is the rest of the line."""
    text = str(path)
    if not text.isprintable() or text != text.strip():
        raise ServiceError("write a unit", f"the path {text!r} contains characters that systemd does not permit there")
    return text.replace("%", "%%")


def _command(words: Sequence[object]) -> str:
    return " ".join(quoted(str(word)) for word in words)


def render_unit(unit: Unit) -> str:
    """Return the text of a unit file. The script adds the back-off, which systemd has only since 254."""
    bounds = CONFINEMENTS.get(unit.name, Confinement())
    return load_template("daemon.service.j2").render(
        unit=unit,
        bounds=bounds,
        command=_command,
        plain=_plain,
        script=["/bin/sh", unit.script],
        delay_milliseconds=round(unit.delay * 1000),
        capabilities=" ".join(f"CAP_{name}" for name in bounds.capabilities),
    )


class UnitChange(Enum):
    """The difference between two texts of a unit."""

    NONE = "no difference"
    NEW = "there was no unit"
    POLICY = "supervision, which applies to a running daemon"
    COMMAND = "the command, which needs a restart of a running daemon"


def compare_units(before: str | None, text: str) -> UnitChange:
    """Compare the text of a unit with its former text; None means that there was no unit."""
    if before is None:
        return UnitChange.NEW
    if before == text:
        return UnitChange.NONE
    return UnitChange.POLICY if _command_of(before) == _command_of(text) else UnitChange.COMMAND


def _command_of(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.startswith(("ExecStart=", "NetworkNamespacePath=")))
