# SPDX-License-Identifier: Apache-2.0
"""The namespaces of the benchmark, and the programs in them.

    client ── switch ── amphora, plain HAProxy ── switch ── members

The network is that of `tests/dataplane/amphora_lab.py`. The members' namespace is the gateway of the amphora. It has
one address for each member, and one HAProxy that answers for all of them. The balancers run on the first half of the
processors, the client and the members on the second half, so that the balancer is the limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from amphora_lab import Network, descendants, eventually, ip
from served import Lab, Served
from throwaway_authority import Authority

from amphora_agent.network import sysctls

PLAIN, OTHER = "198.51.100.6", "198.51.100.7"
"""The addresses of plain HAProxies. The second one is for comparisons of two configurations."""
MEMBER_PORT, UDP_MEMBER_PORT = 80, 5353
MEDIUM_BYTES, LARGE_BYTES = 20_000, 262_144
_GATEWAY = "198.51.100.1"
_MEMBERS = """\
global
    stats socket {folder}/members.sock mode 600
    maxconn 4000
    nbthread 1
    tune.bufsize 300000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend members
    bind 0.0.0.0:{port}
    http-request return status 200 content-type application/octet-stream file {folder}/large if {{ path /large }}
    http-request return status 200 content-type text/plain file {folder}/medium if {{ path /medium }}
    http-request return status 200 content-type text/plain file {folder}/small
"""


def member_address(number: int) -> str:
    """Return the address of a member; all of 10.99.0.0/16 is in the members' namespace."""
    return f"10.99.{number // 250}.{1 + number % 250}"


def processors() -> tuple[set[int], set[int]]:
    """Return the processors of the balancers, and those of the client and the members."""
    found = sorted(os.sched_getaffinity(0))
    half = max(1, len(found) // 2)
    return set(found[:half]), set(found[half:] or found)


def processor_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of running processes, with the precision of the scheduler."""
    found = 0
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):
                found += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return found / 1e9


def _tasks(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


class Place:
    """The network with a real amphora, the namespace of a plain HAProxy, and the members."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.balancing, self.loading = processors()
        self._closing = contextlib.ExitStack()
        mine = os.sched_getaffinity(0)
        self._closing.callback(os.sched_setaffinity, 0, mine)
        try:
            # The amphora inherits the processors of this thread.
            os.sched_setaffinity(0, self.balancing)
            (folder / "amphora").mkdir()
            self.lab = Lab(f"pl{os.getpid()}", folder / "amphora", Authority("controllers"), failpoints=False)
            self._closing.callback(self.lab.close)
            for task in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(task.name), self.loading)
            self.served = Served(self.lab)
            self._closing.callback(self.served.close)
            self._build()
        except BaseException:
            self.close()
            raise

    @property
    def network(self) -> Network:
        return self.lab.network

    def _build(self) -> None:
        members, client = self.network.name("mem"), self.network.name("cl")
        for name in list(self.network.members):
            self.network.stop_member(name)
        ip(f"netns add {self.network.name('plain')}")
        self._closing.callback(_delete, self.network.name("plain"))
        ip(f"-n {self.network.name('plain')} link set lo up")
        plain = self.network.thread("plain")
        sysctls.apply_settings(plain)
        self.network.connect("plain", "vip", [f"{PLAIN}/24", f"{OTHER}/24"])
        ip(
            f"-n {self.network.name('plain')} route add default via {_GATEWAY}",
            f"-n {members} addr add {_GATEWAY}/24 dev eth0",
            f"-n {members} route add local 10.99.0.0/16 dev lo",
        )
        for namespace in (members, client):
            sysctls.apply_settings(self.network.thread("mem" if namespace == members else "cl"))
        (self.folder / "small").write_bytes(b"x" * 1024)
        (self.folder / "medium").write_bytes(b"x" * MEDIUM_BYTES)
        (self.folder / "large").write_bytes(b"x" * LARGE_BYTES)
        self._closing.enter_context(self.haproxy("mem", "members", _MEMBERS.format(folder=self.folder, port=80)))

    def close(self) -> None:
        self._closing.close()

    def inside(self, short: str, command: Sequence[str], *, balancing: bool = False, **more) -> subprocess.Popen:
        """Start a program in a namespace, on the processors of its side."""
        chosen = ",".join(map(str, sorted(self.balancing if balancing else self.loading)))
        before = ["setpriv", "--pdeathsig", "KILL", "--", "taskset", "--cpu-list", chosen]
        return subprocess.Popen(
            [*before, "nsenter", f"--net=/run/netns/{self.network.name(short)}", "--", *command], text=True, **more
        )

    @contextlib.contextmanager
    def haproxy(self, short: str, name: str, text: str) -> Iterator[PlainHaproxy]:
        """Run a HAProxy with a configuration that names the socket NAME.sock in the folder."""
        file = self.folder / f"{name}.cfg"
        file.write_text(text, encoding="ascii")
        with (self.folder / f"{name}.log").open("w") as log:
            command = ["haproxy", "-db", "-f", str(file)]
            process = self.inside(short, command, balancing=short == "plain", stdout=log, stderr=log)
            running = PlainHaproxy(process, self.folder / f"{name}.sock")
            try:
                eventually(running.answers, f"HAProxy {name} answers")
                yield running
            finally:
                process.terminate()
                process.wait()

    def amphora_pids(self) -> list[int]:
        return descendants(self.lab.amphora.init())


class PlainHaproxy:
    """A running HAProxy without an agent."""

    def __init__(self, process: subprocess.Popen, path: Path) -> None:
        self.process = process
        self._path = path

    def answers(self) -> bool:
        assert self.process.poll() is None, f"HAProxy ended, see {self._path.with_suffix('.log')}"
        with contextlib.suppress(OSError):
            return bool(self.ask("show info"))
        return False

    def ask(self, question: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            connection.sendall(question.encode() + b"\n")
            with connection.makefile("rb") as answer:
                return answer.read().decode()


def _delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def pause(until: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, until - time.monotonic()))
