# SPDX-License-Identifier: Apache-2.0
"""The text of a daemon's systemd unit.

Invariant: each argument reaches the daemon unchanged, with any characters. No unit depends on the unit of the agent, so
that no daemon stops with the agent. Pure. Sources: systemd.service(5), systemd.exec(5), systemd.kill(5),
systemd.syntax(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from amphora_agent.errors import ServiceError

PREFIX = "amphora-"
STOP_SECONDS = 5
START_SECONDS = 60
# The kernel kills other processes first when memory is short (proc(5), oom_score_adj; -1000 means never).
OOM_SCORE = -900
OPEN_FILES = 1048576
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_ESCAPED = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_FIRST_PRINTABLE, _DELETE = " ", "\x7f"


@dataclass(frozen=True)
class Confinement:
    """The rights of a daemon beyond the limits of all daemons. Source: systemd.exec(5), capabilities(7).

    Attributes:
        user: the user of the process; None is root with these capabilities only.
        capabilities: without ``CAP_``; a user other than root has them as ambient capabilities.
        families: the address families of its sockets, without ``AF_``.
        calls: system calls besides systemd's set ``@system-service``.
        directory: the only writable directory, below /run; None for no writable directory; empty for the run directory
            of the agent.
        sets: whether it changes settings of its network namespace (/proc/sys/net).
        compiles: whether it generates machine code at run time.
    """

    user: str | None = None
    capabilities: tuple[str, ...] = ()
    families: tuple[str, ...] = ("UNIX",)
    calls: tuple[str, ...] = ()
    directory: str | None = ""
    sets: bool = False
    compiles: bool = False


CHECKER_USER, RESPONDER_USER = "amphora-checker", "amphora-responder"
_PACKETS = ("UNIX", "INET", "INET6", "NETLINK", "PACKET")
# A daemon without an entry has no capability and writes only to the run directory of the agent.
CONFINEMENTS: Mapping[str, Confinement] = {
    # The master stays root because it opens ports and files at each reload. Its workers change to an empty root
    # directory and to the user `haproxy`. PCRE2 compiles regular expressions to machine code.
    "haproxy": Confinement(
        capabilities=("KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT"),
        families=("UNIX", "INET", "INET6"),
        calls=("chroot",),
        compiles=True,
    ),
    "keepalived": Confinement(capabilities=("NET_ADMIN", "NET_RAW"), families=_PACKETS),
    "amphora-responder": Confinement(
        user=RESPONDER_USER, capabilities=("NET_RAW",), families=("UNIX", "INET", "INET6"), directory=None
    ),
    "amphora-checker": Confinement(
        user=CHECKER_USER,
        capabilities=("NET_ADMIN", "NET_RAW"),
        families=_PACKETS,
        directory="amphora-agent/checker",
        sets=True,
    ),
}
_CONFINED = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "ProtectHostname=yes",
    "ProtectClock=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)


@dataclass(frozen=True)
class Unit:
    """A daemon as a systemd unit.

    Attributes:
        namespace: the path of its network namespace; None is the namespace of the machine.
        script: the program that systemd runs before the start, after the start and after the exit
            (`templates/daemon.sh`).
        state: the directory of its state files.
        run: the run directory of the agent.
        health: its health file (`health_file`).
        delay: seconds before a restart.
        leftovers: files that are removed before a start.
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
    """Return the unit of a service.

    The prefix distinguishes it from the unit of the daemon's Debian package.

    Raises:
        ServiceError: the name is not valid.
    """
    if not _NAME.fullmatch(service):
        raise ServiceError(f"run {service!r}", "this is not a valid name of a service")
    return f"{service if service.startswith(PREFIX) else PREFIX + service}.service"


def quoted(word: str) -> str:
    """Quote an argument for a command line without variable expansion (the prefix ``:``).

    Raises:
        ServiceError: the argument contains a character that the kernel does not accept.
    """
    if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ServiceError("write a command line", "an argument contains a character that no argument can contain")
    return '"' + "".join(map(_escaped, word)) + '"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPED:
        return _ESCAPED[letter]
    return f"\\x{ord(letter):02x}" if letter < _FIRST_PRINTABLE or letter == _DELETE else letter


def _plain(path: Path) -> str:
    """Return a path for a setting whose value is the rest of the line."""
    text = str(path)
    if not text.isprintable() or text != text.strip():
        raise ServiceError("write a unit", f"the path {text!r} cannot be written in a unit")
    return text.replace("%", "%%")


def _command(words: Sequence[object]) -> str:
    return " ".join(quoted(str(word)) for word in words)


def render_unit(unit: Unit) -> str:
    """Return the text of a unit file.

    systemd restarts the daemon (at once or after the delay). The script adds the back-off between quick exits, because
    systemd supports it only from version 254.
    """
    script = ("/bin/sh", unit.script)
    before = "later" if unit.delay else "begin"
    # The script runs with all rights and without a mount namespace: it writes files of the agent, and each of its three
    # runs saves the setup of a file system.
    lines = [
        "[Unit]",
        f"Description={unit.name} of the amphora",
        "StartLimitIntervalSec=0",
        "[Service]",
        "Type=exec",
        *([] if unit.namespace is None else [f"NetworkNamespacePath={_plain(unit.namespace)}"]),
        f"ExecCondition=+:{_command((*script, before, unit.state, *unit.leftovers))}",
        f"ExecStart=:{_command(unit.argv)}",
        f"ExecStartPost=-+:{_command((*script, 'up', unit.state))}",
        f"ExecStopPost=-+:{_command((*script, 'end', unit.state, unit.health or ''))}",
        "Restart=always",
        f"RestartSec={round(unit.delay * 1000)}ms",
        f"TimeoutStartSec={START_SECONDS}",
        f"TimeoutStopSec={STOP_SECONDS}",
        # systemd sends SIGTERM to the first process only, which stops its children. A process that is left is killed:
        # it would share the ports with its successor.
        "KillMode=mixed",
        f"OOMScoreAdjust={OOM_SCORE}",
        "OOMPolicy=continue",
        f"LimitNOFILE={OPEN_FILES}",
        "LimitCORE=0",
        "TasksMax=infinity",
        "StandardInput=null",
        "StandardOutput=journal",
        "StandardError=journal",
        *_confined(CONFINEMENTS.get(unit.name, Confinement()), unit.run),
    ]
    return "\n".join(lines) + "\n"


def _confined(bounds: Confinement, run: Path) -> Iterator[str]:
    yield from _CONFINED
    capabilities = " ".join(f"CAP_{name}" for name in bounds.capabilities)
    yield f"CapabilityBoundingSet={capabilities}"
    if bounds.user is not None:
        yield from (f"User={bounds.user}", f"Group={bounds.user}", f"AmbientCapabilities={capabilities}")
    yield f"RestrictAddressFamilies={' '.join(f'AF_{name}' for name in bounds.families)}"
    yield f"SystemCallFilter={' '.join(('@system-service', *bounds.calls))}"
    if not bounds.compiles:
        yield "MemoryDenyWriteExecute=yes"
    if not bounds.sets:
        yield "ProtectKernelTunables=yes"
    if bounds.directory:
        # The daemon continues with the files of its predecessor; other processes open its sockets there.
        yield from (f"RuntimeDirectory={bounds.directory}", "RuntimeDirectoryMode=0711", "RuntimeDirectoryPreserve=yes")
    elif bounds.directory is not None:
        yield f"ReadWritePaths={_plain(run)}"


class UnitChange(Enum):
    """The difference between two texts of a unit."""

    NONE = "no difference"
    NEW = "there was no unit"
    POLICY = "supervision, which applies to a running daemon"
    COMMAND = "the command, which needs a restart of a running daemon"


def compare_units(before: str | None, text: str) -> UnitChange:
    """Compare the text of a unit with its former text (None if there was none)."""
    if before is None:
        return UnitChange.NEW
    if before == text:
        return UnitChange.NONE
    return UnitChange.POLICY if _command_of(before) == _command_of(text) else UnitChange.COMMAND


def _command_of(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.startswith(("ExecStart=", "NetworkNamespacePath=")))
