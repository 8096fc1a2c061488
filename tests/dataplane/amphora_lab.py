# SPDX-License-Identifier: Apache-2.0
"""A network of namespaces with one amphora in it.

Invariant: every object is outside the root namespace and has the run's prefix in its name, and `close` removes it.
The namespaces use documentation addresses only (RFC 5737, RFC 3849).

    controller ── mgmt bridge ── amphora ── vip bridge ── members, client
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import preloaded_agent
from throwaway_authority import CLIENT, SERVER, Authority

from amphora_agent.failpoints import VARIABLE
from amphora_agent.network.namespace import Namespace

ROOT = Path(__file__).parents[2]
CONTROLLER, AMPHORA = "203.0.113.2", "203.0.113.11"
VIP, VIP6 = "198.51.100.5", "2001:db8:1::5"
FIXED, FIXED6 = "198.51.100.11", "2001:db8:1::11"
MEMBERS = {f"m{n}": f"198.51.100.10{n}" for n in (1, 2, 3)}
MAC = "02:00:00:00:5e:0b"
HEARTBEATS = 5555
# The time-out suits a machine that runs four pytest workers and other programs.
DEADLINE = 30.0
_CLONE_ALL = ("--pid", "--mount", "--uts", "--ipc", "--propagation", "private", "--mount-proc")


def ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


def eventually(condition, what: str, seconds: float = DEADLINE):
    """Poll until a condition holds and return its result, for conditions without events.

    The pauses grow, so that a long wait leaves the processors to the awaited process.
    """
    begin = time.monotonic()
    while not (result := condition()):
        waited = time.monotonic() - begin
        assert waited < seconds, f"not within {seconds} s: {what}"
        time.sleep(min(0.005 + waited / 50, 0.05))
    return result


class Member:
    """A small web server in the members' namespace that answers with its name."""

    def __init__(self, name: str, address: str) -> None:
        member = self
        self.requests = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path.startswith("/slow"):
                    time.sleep(1.0)  # the request stays in flight during a change
                if self.path != "/health":
                    member.requests += 1
                body = name.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_OPTIONS = do_GET  # noqa: N815

            def log_message(self, *_) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_) -> None:
                pass

        self._server = Server((address, 80), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Network:
    """Namespaces, bridges, members, and threads that run in the namespaces."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._made: list[str] = []
        self.members: dict[str, Member] = {}
        self._threads: dict[str, Namespace] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def name(self, short: str) -> str:
        return f"{self.prefix}-{short}"

    def thread(self, short: str) -> Namespace:
        if short not in self._threads:
            self._threads[short] = Namespace(Path("/run/netns") / self.name(short))
        return self._threads[short]

    def _build(self) -> None:
        for short in ("sw", "ctl", "mem", "cl", "amp"):
            ip(f"netns add {self.name(short)}")
            self._made.append(short)
            ip(f"-n {self.name(short)} link set lo up")
        switch = self.name("sw")
        for bridge in ("mgmt", "vip"):
            ip(
                f"-n {switch} link add {bridge} type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
                f"-n {switch} link set {bridge} up",
            )
        self.thread("sw").run(_no_filter)
        self.connect("ctl", "mgmt", [f"{CONTROLLER}/24"])
        self.connect("amp", "mgmt", [f"{AMPHORA}/24"])
        self.connect("mem", "vip", [f"{address}/24" for address in MEMBERS.values()])
        self.connect("cl", "vip", ["198.51.100.20/24", "2001:db8:1::20/64"])
        for name, address in MEMBERS.items():
            self.start_member(name, address)

    def connect(self, short: str, bridge: str, addresses) -> None:
        namespace, switch = self.name(short), self.name("sw")
        ip(
            f"-n {switch} link add {short} type veth peer name eth0 netns {namespace}",
            f"-n {switch} link set {short} master {bridge} up",
            f"-n {namespace} link set eth0 up",
        )
        for address in addresses:
            ip(f"-n {namespace} addr add {address} dev eth0" + (" nodad" if ":" in address else ""))

    def plug(self) -> None:
        """Give the amphora its interface on the VIP's network, as the compute backend does."""
        ip(
            f"-n {self.name('sw')} link add port type veth peer name new0 netns {self.name('amp')} address {MAC}",
            f"-n {self.name('sw')} link set port master vip up",
        )

    def unplug(self) -> None:
        subprocess.run(["ip", "-n", self.name("sw"), "link", "del", "port"], check=False, capture_output=True)

    def start_member(self, name: str, address: str) -> None:
        self.members[name] = self.thread("mem").run(Member, name, address)

    def stop_member(self, name: str) -> None:
        self.members.pop(name).close()

    def close(self) -> None:
        for member in self.members.values():
            member.close()
        for thread in self._threads.values():
            thread.close()
        for short in self._made:
            subprocess.run(["ip", "netns", "del", self.name(short)], check=False, capture_output=True)


def _no_filter() -> None:
    for file in Path("/proc/sys/net/bridge").glob("bridge-nf-call-*tables"):
        file.write_text("0")


class Amphora:
    """The supervisor, the agent and HAProxy, started as the compute backend starts them.

    Args:
        forked: fork supervisor and agent from a process that has imported their modules, if possible.
    """

    def __init__(
        self,
        network: Network,
        directory: Path,
        authority: Authority,
        interval: float = 0.5,
        log_level: str = "INFO",
        place: str = "amp",
        address: str = AMPHORA,
        audit: float | None = 3600.0,
        *,
        forked: bool = True,
    ) -> None:
        self.network = network
        self.place = place
        self.address = address
        self.id = str(uuid.uuid4())
        self.load_balancer_id = str(uuid.uuid4())
        self.key = os.urandom(32)
        self.authority = authority
        self._directory = directory
        self._forked = forked
        self.failpoints = True
        self._process: subprocess.Popen | preloaded_agent.Outermost | None = None
        self._connection: http.client.HTTPSConnection | None = None
        for name in ("etc", "var", "points"):
            (directory / name).mkdir()
        etc = directory / "etc"
        (etc / "agent.conf").write_text(
            f"[agent]\namphora_id = {self.id}\nbind_address = {address}\nbind_port = 9443\nservices = supervisor\n"
            f"log_level = {log_level}\n"
            f"[heartbeat]\ninterval = {interval}\ntargets = {CONTROLLER}:{HEARTBEATS}, {CONTROLLER}:{HEARTBEATS + 1}\n"
            + ("" if audit is None else f"[audit]\ninterval = {audit}\n")
        )
        (etc / "server.pem").write_text(authority.issue(self.id, SERVER))
        (etc / "client_ca.pem").write_text(authority.pem)
        (etc / "heartbeat.key").write_text(self.key.hex())
        spec = {
            "hostname": f"amphora-{self.id[:8]}",
            "etc": str(etc),
            "var": str(directory / "var"),
            "python": sys.executable,
        }
        (directory / "spec.json").write_text(json.dumps(spec))
        self.client_certificate = self.write("client.pem", authority.issue("controller", CLIENT))

    @property
    def var(self) -> Path:
        return self._directory / "var"

    @property
    def points(self) -> Path:
        """The directory in which a test arms failpoints (`amphora_agent.failpoints`)."""
        return self._directory / "points"

    def write(self, name: str, content: str) -> Path:
        file = self._directory / name
        file.write_text(content)
        return file

    # -- processes ------------------------------------------------------------------------------------------

    def start(self) -> None:
        namespace = f"/run/netns/{self.network.name(self.place)}"
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({VARIABLE: str(self.points)} if self.failpoints else {})
        spec, log = self._directory / "spec.json", self._directory / "log"
        if self._forked and preloaded_agent.possible(sys.executable, environment):
            pid = preloaded_agent.boot(sys.executable, spec, namespace, environment, log, ends_with=os.getpid())
            self._process = preloaded_agent.Outermost(pid)
            return
        command = [
            # The amphora ends with this process even if this process ends without cleanup.
            *("setpriv", "--pdeathsig", "KILL", "--"),
            "nsenter",
            f"--net={namespace}",
            "--",
            "unshare",
            "--fork",
            "--kill-child=KILL",
            *_CLONE_ALL,
            "--",
            sys.executable,
            "-m",
            "amphora_agent.services.supervisor",
            str(spec),
        ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def init(self) -> int:
        """Return the supervisor's PID on the host."""
        file = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(eventually(lambda: file.read_text().split(), "the supervisor runs")[0])

    def supervisor(self, **request):
        path = f"/proc/{self.init()}/root/run/amphora-agent/supervisor.sock"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                return json.loads(lines.readline())

    def status(self, service: str):
        return self.supervisor(op="status", name=service)["services"].get(service)

    def agent_pid(self) -> int:
        return self.outside_pid(self.status("amphora-agent")["pid"])

    def outside_pid(self, inside: int) -> int:
        """Return the host PID of a process from its PID inside."""
        for process in descendants(self.init()):
            with suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{process}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and int(line.split()[-1]) == inside:
                        return process
        raise AssertionError(f"no process {inside} in the amphora")

    def ask_haproxy(self, question: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/{self.init()}/root/run/amphora-agent/haproxy.sock")
            connection.sendall(question.encode() + b"\n")
            with connection.makefile("rb") as answer:
                return answer.read().decode()

    def power_off(self) -> None:
        """Kill the amphora as in a power cut."""
        self.disconnect()
        if self._process is not None:
            left = [self._process.pid, *descendants(self._process.pid)]
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            eventually(lambda: not any(alive(pid) for pid in left), "the amphora's processes have ended")
            self._process = None

    def terminate(self) -> None:
        self.disconnect()
        os.kill(self.init(), signal.SIGTERM)
        self._process.wait(10)
        self._process = None

    def log(self) -> str:
        return (self._directory / "log").read_text()

    # -- the controller's side ------------------------------------------------------------------------------

    def tls(self, certificate: Path | None, trust: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=trust or self.authority.pem)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def call(self, method: str, path: str, body=None):
        """Send a request over the kept connection; return status and document."""
        return self.network.thread("ctl").run(self._call, method, path, body)

    def _call(self, method: str, path: str, body):
        for last in (False, True):
            if self._connection is None:
                self._connection = self.connection(self.tls(self.client_certificate))
            try:
                data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
                self._connection.request(method, path, data)
                with self._connection.getresponse() as answer:
                    return answer.status, json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                self._disconnect()
                if last:
                    raise
        return None

    def connection(self, context: ssl.SSLContext) -> http.client.HTTPSConnection:
        """Connect by address and expect the amphora's id in the certificate, as a controller does."""
        connection = http.client.HTTPSConnection(self.id, 9443, timeout=180, context=context)
        connection._create_connection = lambda *_: socket.create_connection((self.address, 9443), 180)
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def disconnect(self) -> None:
        self.network.thread("ctl").run(self._disconnect)

    def answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/v2/info")[0] == 200
        return False

    def push(self, generation: int, text: str | None, files: dict[str, str] | None = None, **changes):
        """Push a bundle, with `files` by name; `changes` replaces keys of the bundle."""
        return self.call("PUT", "/v2/bundle", self.bundle(generation, text, files, **changes))

    def bundle(self, generation: int, text: str | None, files: dict[str, str] | None = None, **changes):
        interface = {
            "mac": MAC,
            "name": "eth1",
            "mtu": 1500,
            "addresses": [f"{FIXED}/24", f"{FIXED6}/64"],
            "vips": [f"{VIP}/32", f"{VIP6}/128"],
            "routes": [{"destination": "0.0.0.0/0", "gateway": "198.51.100.1"}],
        }
        bundle = {
            "format": 1,
            "amphora_id": self.id,
            "load_balancer_id": self.load_balancer_id,
            "generation": generation,
            "haproxy": text,
            "files": [{"name": name, "content": content} for name, content in (files or {}).items()],
            "pings": {},
            "limits": {"connections": None, "threads": None, "drain": None, "workers": None},
            "allowed": [],
            "vrrp": None,
            "interfaces": [interface],
        }
        return {**bundle, **changes}


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def get(address: str = VIP, port: int = 80, path: str = "/", timeout: float = 10.0) -> tuple[int, str]:
    """Send a request on a new connection; return status and body."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        with connection.getresponse() as answer:
            return answer.status, answer.read().decode()
    finally:
        connection.close()


class Client:
    """A client that sends requests continuously from its namespace until it is closed."""

    def __init__(self, network: Network, threads: int = 2) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.latest = 0.0
        self._ending = threading.Event()
        self._lock = threading.Lock()
        place = Path("/run/netns") / network.name("cl")
        self._threads = [Namespace(place) for _ in range(threads)]
        self._begun = [0] * threads
        self._futures: list[Future] = [
            thread._thread.submit(self._loop, number) for number, thread in enumerate(self._threads)
        ]

    def _loop(self, number: int) -> None:
        while not self._ending.is_set():
            self._begun[number] += 1
            try:
                status, said = get()
            except (OSError, http.client.HTTPException) as error:
                status, said = 0, f"{type(error).__name__}: {error}"
            with self._lock:
                if status == 200:
                    self.answers[said] += 1
                else:
                    self.failures.append(f"{status} {said}"[:200])

    @property
    def total(self) -> int:
        return sum(self.answers.values())

    def forgive(self) -> None:
        """Clear the failures, including unreported ones."""
        begun = list(self._begun)
        eventually(lambda: all(now > was for now, was in zip(self._begun, begun, strict=True)), "requests have ended")
        self.failures.clear()

    def hears(self, name: str) -> None:
        """Wait for further answers of a member."""
        before = self.answers[name]
        eventually(lambda: self.answers[name] > before + 2, f"answers of {name}")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        for future in self._futures:
            future.result(30)
        for thread in self._threads:
            thread.close()
