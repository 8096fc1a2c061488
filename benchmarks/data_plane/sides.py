# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison: the amphora, and a plain HAProxy (for UDP a plain table of nftables).

Both serve the same members. `change` makes the next of five changes of one more member: it is added, gets another
weight, is disabled, enabled, and removed. The amphora gets a bundle for each change, as from a controller; the plain
HAProxy gets the command of its socket.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
from amphora_lab import VIP
from served import _PLUGGED
from under_load import Processes
from wanted import id_of

from amphora_driver.render import udp
from amphora_driver.render.bundle import BundleFile, Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.secret import Secret
from data_plane import kinds
from data_plane.kinds import CERTIFICATE, Changes, Kind
from data_plane.place import PLAIN, Place, PlainHaproxy, member_address, processor_seconds

STEPS = ("add", "weight", "disable", "enable", "remove")
_TICKS = os.sysconf("SC_CLK_TCK")
_GENERATION = 987_654_321


class Amphora:
    """A real amphora: supervisor, agent, HAProxy and the daemon for UDP."""

    name, address = "amphora", VIP

    def __init__(self, place: Place, certificate: str) -> None:
        self._place = place
        self._amphora = place.lab.amphora
        self._certificate = certificate
        self._template = b""
        self._states: dict[str, list[tuple[bytes, bytes]]] = {}
        self._steps: Iterator[str] = iter(())
        self.changing = ""
        self.haproxy: list[int] = []
        self.kind = kinds.HTTP

    @contextlib.contextmanager
    def serving(self, kind: Kind, members: int) -> Iterator[None]:
        """Serve a load balancer within the block."""
        self.kind = kind
        self._prepare(kind, members)
        self.push("remove")
        self._steps = itertools.cycle(STEPS)
        self.haproxy = [] if kind.udp else self._processes()
        try:
            yield
        finally:
            # Without a listener, HAProxy ends: the next kind begins without a replaced worker.
            status, answer = self._amphora.push(next(self._place.lab.generations), None)
            assert status == 200, answer

    def _processes(self) -> list[int]:
        found = Processes(self._amphora)
        workers = found.workers
        assert len(workers) == 1
        return [found.master, *workers]

    def _prepare(self, kind: Kind, members: int) -> None:
        tree = kinds.tree(kind, members)
        rendered, virtual = render(tree), udp.virtual_servers(tree)
        assert not rendered.refused
        assert not virtual.refused
        secrets = {CERTIFICATE: self._certificate}
        files = tuple(
            BundleFile(name=one.name, content=Secret((one.content or secrets[one.secret.ref]).encode()))
            for one in rendered.files
        )
        content = Served(text=rendered.text, files=files, virtual=virtual.servers)
        self._template = bundle(tree, _GENERATION, self._amphora.id, (_PLUGGED,), content)
        member = id_of("member", f"member {members}")
        pool = f"{id_of('pool', 'pool')}:{id_of('listener', kind.port)}"
        self.changing = f"{pool}/{member}"
        if kind.udp:
            self._states = _of_udp(next(one for one in virtual.servers[0].members if one.id == member))
        else:
            self._states = _of_haproxy(next(line for line in rendered.text.split("\n") if member in line.split()))

    def select(self) -> None:
        """Do nothing: nothing has to change before a slice."""

    def body(self, step: str) -> bytes:
        """Return the body of a push in which the changing member is as after this step."""
        old, new = next(each for each in self._states[step] if each[0] in self._template)
        made = self._template.replace(old, new, 1)
        number = next(self._place.lab.generations)
        return made.replace(str(_GENERATION).encode(), str(number).encode(), 1)

    def push(self, step: str, body: bytes | None = None) -> str:
        """Push the state after a step; return how the agent changed HAProxy."""
        status, answer = self._amphora.call("PUT", "/v2/bundle", body or self.body(step))
        assert status == 200, answer
        return answer["how"]

    def change(self) -> None:
        how = self.push(next(self._steps))
        assert how == "runtime", how

    def ask(self, question: str) -> str:
        return self._amphora.ask_haproxy(question)

    def limit(self) -> int:
        """Return the limit of connections that the agent gives HAProxy. It depends on the limit of open files."""
        return int(re.findall(r"^Maxconn: (\d+)$", self.ask("show info"), re.MULTILINE)[0])

    def others_seconds(self) -> float:
        """Return the processor time of the amphora without HAProxy: agent, supervisor, checks of configurations."""
        found = [pid for pid in self._place.amphora_pids() if pid not in self.haproxy]
        ended = 0
        for pid in found:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
                ended += int(fields[13]) + int(fields[14])
        return processor_seconds(found) + ended / _TICKS


def _of_haproxy(line: str) -> dict[str, list[tuple[bytes, bytes]]]:
    """Return, for each step, the part of the template and its replacement."""
    assert " weight 1" in line
    heavy = line.replace(" weight 1", " weight 7")
    whole = (json.dumps(line)[1:-1] + "\\n").encode()
    after = {"add": line, "weight": heavy, "disable": f"{heavy} disabled", "enable": heavy}
    found = {step: [(whole, (json.dumps(text)[1:-1] + "\\n").encode())] for step, text in after.items()}
    return {**found, "remove": [(whole, b"")]}


def _of_udp(member: udp.VirtualMember) -> dict[str, list[tuple[bytes, bytes]]]:
    whole = msgspec.json.encode(member)
    heavy = whole.replace(b'"weight":1,', b'"weight":7,')
    disabled = heavy.replace(b'"enabled":true', b'"enabled":false')
    found = {"add": whole, "weight": heavy, "disable": disabled, "enable": heavy}
    # In a list of JSON, the separator is before or after an entry.
    removed = [(b"," + whole, b""), (whole + b",", b"")]
    return {**{step: [(whole, text)] for step, text in found.items()}, "remove": removed}


class Plain:
    """A plain HAProxy, or for UDP a plain table of nftables, which has no changes.

    Beside an amphora, the plain HAProxy has the same limit of connections, from which HAProxy derives how many idle
    connections to members it keeps.
    """

    name = "plain"

    def __init__(
        self,
        place: Place,
        address: str = PLAIN,
        changes: Changes | None = None,
        name: str = "plain",
        beside: Amphora | None = None,
    ) -> None:
        self.name, self.address = name, address
        self._place = place
        self._changes = changes
        self._beside = beside
        self._running: PlainHaproxy | None = None
        self._steps: Iterator[str] = iter(())
        self._changing = ""
        self.haproxy: list[int] = []
        self.kind = kinds.HTTP

    @contextlib.contextmanager
    def serving(self, kind: Kind, members: int) -> Iterator[None]:
        """Serve the same members within the block."""
        self.kind = kind
        if kind.udp:
            with self._forwarding(kind, members):
                yield
            return
        folder, changes = str(self._place.folder), self._changes or Changes()
        if self._beside is not None:
            changes = replace(changes, maxconn=self._beside.limit())
        text = kinds.plain(kind, members, address=self.address, folder=folder, name=self.name, changes=changes)
        with self._place.haproxy("plain", self.name, text) as running:
            self._running, self.haproxy = running, [running.process.pid]
            self._steps = itertools.cycle(STEPS)
            self._changing = f"add server back/changing {member_address(members)}:{kinds.MEMBER_PORT} weight 1"
            yield

    def select(self) -> None:
        """Set the offloads of the interface before a slice, if this side has a value of its own."""
        if self._changes is not None and self._changes.offloads:
            command = ["ethtool", "-K", "eth0", *self._changes.offloads]
            assert self._place.inside("plain", command, stdout=subprocess.DEVNULL).wait() == 0

    @contextlib.contextmanager
    def _forwarding(self, kind: Kind, members: int) -> Iterator[None]:
        self._running, self.haproxy = None, []
        table = f"plain_{self.name}"
        self._nft(kinds.plain_datagrams(kind, members, self.address, table))
        forwarding = ["sysctl", "-qw", "net.ipv4.ip_forward=1"]
        assert self._place.inside("plain", forwarding).wait() == 0
        try:
            yield
        finally:
            self._nft(f"delete table ip {table}\n")

    def _nft(self, text: str) -> None:
        process = self._place.inside("plain", ["nft", "-f", "-"], stdin=subprocess.PIPE)
        process.communicate(text)
        assert process.returncode == 0

    def change(self) -> None:
        if self._running is None:
            return
        name = "back/changing"
        step = next(self._steps)
        self.ask(
            {
                "add": f"{self._changing}; enable server {name}",
                "weight": f"set server {name} weight 7",
                "disable": f"set server {name} state maint",
                "enable": f"set server {name} state ready",
                "remove": f"set server {name} state drain; set server {name} state maint",
            }[step]
        )
        if step == "remove":
            deadline = time.monotonic() + 1
            while "deleted" not in self.ask(f"del server {name}") and time.monotonic() < deadline:
                time.sleep(0.002)

    def ask(self, question: str) -> str:
        assert self._running is not None
        return self._running.ask(question)

    def others_seconds(self) -> float:
        return 0.0


def handshakes(side: Amphora | Plain) -> int:
    """Return the number of TLS connections since the start of the worker."""
    return int(re.findall(r"^CumSslConns: (\d+)$", side.ask("show info"), re.MULTILINE)[0])
