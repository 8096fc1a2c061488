# SPDX-License-Identifier: Apache-2.0
"""What systemd is told of a daemon: the text of its unit.

Invariant: a word of a command line reaches the daemon exactly as it is here, whatever is in it; no unit depends on the
agent's, so that nothing ends with the agent. Pure. Sources: systemd.service(5), systemd.exec(5), systemd.kill(5),
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
# The kernel takes others for memory first (proc(5), oom_score_adj: -1000 would be never).
OOM_SCORE = -900
OPEN_FILES = 1048576
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_ESCAPED = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_FIRST_PRINTABLE, _DELETE = " ", "\x7f"


@dataclass(frozen=True)
class Confinement:
    """What a daemon may do besides what all of them may. Source: systemd.exec(5), capabilities(7).

    Attributes:
        user: that it runs as; None is root with these capabilities and no others.
        capabilities: without ``CAP_``; a user of its own has them from the start.
        families: of the sockets it opens, without ``AF_``.
        calls: what it may ask of the kernel besides systemd's set ``@system-service``.
        directory: below /run, its own, and the only place where it writes; None: it writes nothing; the default is the
            agent's run directory.
        sets: whether it changes settings of its network namespace (/proc/sys/net).
        compiles: whether it makes machine code while it runs.
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
# A daemon that is not here may write in the agent's run directory, and nothing else.
CONFINEMENTS: Mapping[str, Confinement] = {
    # The master stays root to open ports and files again at each reload; its workers go into an empty directory and
    # become `haproxy`. PCRE2 compiles regular expressions.
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
    """A daemon as systemd runs it.

    Attributes:
        namespace: the network namespace it runs in; None is the machine's own.
        script: what is run before its start, after it and after its end (`templates/daemon.sh`).
        state: the directory of what is known of it.
        run: the agent's run directory.
        health: the file that says whether it serves.
        delay: waited before it is started again, in seconds.
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
    """The unit of a service, told apart from those that packages of the same daemons bring.

    Raises:
        ServiceError: it cannot be a unit's name.
    """
    if not _NAME.fullmatch(service):
        raise ServiceError(f"run {service!r}", "that is no name of a service")
    return f"{service if service.startswith(PREFIX) else PREFIX + service}.service"


def quoted(word: str) -> str:
    """A word of a command line, for a line that expands no variables (the prefix ``:``).

    Raises:
        ServiceError: the kernel has no such words.
    """
    if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ServiceError("write a command line", "a word has a character that no argument can have")
    return '"' + "".join(map(_escaped, word)) + '"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPED:
        return _ESCAPED[letter]
    return f"\\x{ord(letter):02x}" if letter < _FIRST_PRINTABLE or letter == _DELETE else letter


def _plain(path: Path) -> str:
    """A path for a line that takes the rest of itself for one."""
    text = str(path)
    if not text.isprintable() or text != text.strip():
        raise ServiceError("write a unit", f"{text!r} cannot be named in one")
    return text.replace("%", "%%")


def _command(words: Sequence[object]) -> str:
    return " ".join(quoted(str(word)) for word in words)


def render(unit: Unit) -> str:
    """The text of a unit file.

    Restarts are systemd's (at once, or after the delay); the growing pauses between deaths in quick succession are the
    script's, because systemd has them from version 254 on only.
    """
    script = ("/bin/sh", unit.script)
    before = "later" if unit.delay else "begin"
    # The script is run with all rights, in no namespace of its own: what it writes is the agent's, and each of its
    # three runs is spared the preparation of a file system.
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
        # Only the first process is asked to end, and ends its own. What is left of it after that, or after its death,
        # would share the ports with its successor.
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
        # It continues with the files of its predecessor, and other processes open its sockets there.
        yield from (f"RuntimeDirectory={bounds.directory}", "RuntimeDirectoryMode=0711", "RuntimeDirectoryPreserve=yes")
    elif bounds.directory is not None:
        yield f"ReadWritePaths={_plain(run)}"


class Change(Enum):
    """What is different in a unit's text."""

    NONE = "nothing"
    NEW = "there was no such unit"
    CARE = "what is done for it, which one that runs takes over"
    COMMAND = "its command, which one that runs cannot take over"


def change_of(before: str | None, text: str) -> Change:
    """What is different in a unit's text from what it was; None if there was none."""
    if before is None:
        return Change.NEW
    if before == text:
        return Change.NONE
    return Change.CARE if _command_of(before) == _command_of(text) else Change.COMMAND


def _command_of(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.startswith(("ExecStart=", "NetworkNamespacePath=")))
