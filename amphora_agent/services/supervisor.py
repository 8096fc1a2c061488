# SPDX-License-Identifier: Apache-2.0
"""The first process of an amphora in namespaces: it starts, restarts and stops the daemons.

Invariant: all processes of the amphora descend from this process and end with it. The exit of a daemon ends no other
daemon, and the supervisor restarts each wanted daemon. The module imports few modules of the standard library only,
because each amphora in namespaces has its own supervisor. A virtual machine has systemd instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from amphora_agent.paths import Paths
from amphora_agent.services.health_file import HealthFile, Probe
from amphora_agent.services.output_lines import is_admin, to_datagram

# Type checkers regard TYPE_CHECKING as true. At run time, the name skips the import of `typing`, which needs memory.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNET = 0x40000000
MS_BIND = 4096
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
AGENT = "amphora-agent"
HEALTHY_SECONDS = 5.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
# The back-off of the agent has a lower limit, because the amphora cannot be changed without the agent. An agent that
# exits during each start, for example for lack of memory, uses less than half of a processor.
LONGEST_AGENT_BACKOFF = 1.0
STOP_SECONDS = 5.0
ANSWER_SECONDS = 2.0
SHUTDOWN_SECONDS = 3.0
LOG_LINES = 200
LINE_BYTES = 4096
REQUEST_BYTES = 65536
MOST_KEPT = 64


class Service:
    """One daemon: its wanted state and its observed state. Times are in seconds of the monotonic clock."""

    def __init__(self, name: str, argv: list[str], *, inner: bool, restart: bool) -> None:
        self.name = name
        self.argv = argv
        self.inner = inner
        self.restart = restart
        self.restart_delay = 0.0
        self.leftovers: list[str] = []
        self.policy: dict[str, Any] = {}
        self.health: HealthFile | None = None
        self.wanted = True
        self.missed = False
        self.pid: int | None = None
        self.starts = 0
        self.started = 0.0
        self.quick_deaths = 0
        self.due: float | None = None
        self.kill_at: float | None = None
        self.last_exit: int | None = None
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.waiting: list[socket.socket] = []

    def status(self) -> dict[str, Any]:
        names = ("argv", "inner", "restart", "wanted", "pid", "starts", "last_exit")
        return {name: getattr(self, name) for name in names}


def restart_backoff(name: str, quick_deaths: int) -> float:
    """Return the seconds before the restart of a daemon, after this number of early exits in succession."""
    if quick_deaths == 0:
        return 0.0
    longest = LONGEST_AGENT_BACKOFF if name == AGENT else LONGEST_BACKOFF
    # The exponent is bounded: after a thousand exits, the power would exceed the range of a float.
    return min(longest, FIRST_BACKOFF * 2.0 ** min(quick_deaths - 1, 16))


class Machine:
    """The private file system, host name and network namespace of the amphora."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._libc = ctypes.CDLL(None, use_errno=True)

    def build(self, spec: dict[str, Any]) -> None:
        """Mount the private file systems and create the network namespace of the load balancer."""
        # The mounts below may hide the source directories. So the supervisor opens these directories first.
        sources = [(os.open(spec[name], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), name) for name in ("etc", "var")]
        self._mount("tmpfs", self._paths.root / "run", "tmpfs", "mode=755,size=64m")
        for (source, name), place in zip(sources, (self._paths.etc, self._paths.var), strict=True):
            self._make_private(place.parent, name)
            place.mkdir(exist_ok=True)
            self._mount(f"/proc/self/fd/{source}", place)
            os.close(source)
        self._paths.run.mkdir(parents=True, mode=0o700)
        self._paths.empty.mkdir(mode=0o755)
        socket.sethostname(spec["hostname"])
        self._inner_namespace()

    def _make_private(self, directory: Path, name: str) -> None:
        """Mount an overlay: writes to this directory of the host go to the memory of the amphora."""
        upper, work = (self._paths.private / name / part for part in ("upper", "work"))
        for part in (upper, work):
            part.mkdir(parents=True, mode=0o755)
        self._mount("overlay", directory, "overlay", f"lowerdir={directory},upperdir={upper},workdir={work}")

    def _mount(self, source: str, place: Path, kind: str | None = None, options: str | None = None) -> None:
        """Mount a file system; without a kind, bind a directory."""
        words = [None if word is None else os.fsencode(word) for word in (source, place, kind, options)]
        flags = ctypes.c_ulong(MS_BIND if kind is None else 0)
        self._check(self._libc.mount(*words[:3], flags, words[3]), f"mount {source} on {place}")

    def _inner_namespace(self) -> None:
        """Create the load balancer's network namespace under its usual name, with its loopback up."""
        place = self._paths.inner_namespace
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o444)
        outer = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check(self._libc.unshare(CLONE_NEWNET), "create a network namespace")
            self._mount("/proc/self/ns/net", place)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                request = struct.pack("16sH14x", b"lo", 0)
                flags = struct.unpack("16sH14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
                fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
            self._check(self._libc.setns(outer, CLONE_NEWNET), "return to the management namespace")
        finally:
            os.close(outer)

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"Could not {what}: {os.strerror(number)}")


class Supervisor:
    """Starts, watches and ends services; answers the control socket. One thread handles all events."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._services: dict[str, Service] = {}
        self._arrived: list[int] = []
        self._kept: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._ending: float | None = None
        self._log_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._log_socket.setblocking(False)
        self._unforwarded = 0
        self._handlers: dict[str, Callable[[socket.socket, dict[str, Any]], dict[str, Any] | None]] = {
            name: getattr(self, f"_on_{name}")
            for name in ("start", "stop", "dismiss", "signal", "status", "log", "keep", "kept", "drop")
        }
        self._catch_signals()
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.bind(os.fspath(paths.supervisor_socket))
        paths.supervisor_socket.chmod(0o600)
        self._control.listen(32)
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._accept)

    def _catch_signals(self) -> None:
        """Turn signals into bytes on a pipe, so that they wake the selector and interrupt nothing."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, partial(self._on_signals, reader))

    def start(self, service: Service) -> None:
        self._services[service.name] = service
        self._spawn(service)

    def _spawn(self, service: Service) -> None:
        prefix = ["nsenter", f"--net={self._paths.inner_namespace}", "--"] if service.inner else []
        argv = prefix + service.argv
        reader, writer = os.pipe2(os.O_CLOEXEC)
        service.due = None
        service.started = time.monotonic()
        service.starts += 1
        for leftover in service.leftovers:
            Path(leftover).unlink(missing_ok=True)
        output = [(os.POSIX_SPAWN_DUP2, writer, number) for number in (1, 2)]
        actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), *output]
        signals = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE]
        try:
            service.pid = os.posix_spawnp(
                argv[0], argv, os.environ, setsigmask=[], setpgroup=0, setsigdef=signals, file_actions=actions
            )
        except OSError as error:
            os.close(reader)
            service.log.append(f"could not be started: {error}")
            self._died(service, None)
            return
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self._selector.register(reader, selectors.EVENT_READ, partial(self._drain, service, reader, bytearray()))
        if service.health is not None:
            service.health.started(service.pid)

    def _drain(self, service: Service, reader: int, incomplete: bytearray) -> None:
        """Keep the last lines of a daemon's output in bounded memory.

        `incomplete` is the beginning of the next line. Only a line feed ends a line. So the text of a client in the
        middle of a line never becomes a line of the daemon.
        """
        try:
            data = os.read(reader, LINE_BYTES)
        except BlockingIOError:
            return
        *ended, rest = (bytes(incomplete) + data).split(b"\n")
        if not data:
            self._selector.unregister(reader)
            os.close(reader)
            ended = [rest] if rest else []
        # A line of more than LINE_BYTES bytes loses its end.
        incomplete[:] = rest[:LINE_BYTES]
        lines = [line[:LINE_BYTES].decode(errors="replace") for line in ended]
        service.log.extend(lines)
        self._forward(service.name, lines)

    def _forward(self, name: str, lines: list[str]) -> None:
        """Send administrative lines to the log forwarder, if it runs. Never waits."""
        for line in filter(partial(is_admin, name), lines):
            try:
                if self._unforwarded:
                    missing = f"{self._unforwarded} lines are missing, because the log forwarder was too slow"
                    self._log_socket.sendto(to_datagram("supervisor", missing), os.fspath(self._paths.admin_log_socket))
                    self._unforwarded = 0
                self._log_socket.sendto(to_datagram(name, line), os.fspath(self._paths.admin_log_socket))
            except BlockingIOError:
                self._unforwarded += 1
            except OSError:
                # Without a log target, no log forwarder runs, and the lines are dropped.
                return

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for service in self._services.values():
                    if service.pid == ended[0]:
                        self._died(service, os.waitstatus_to_exitcode(ended[1]))

    def _died(self, service: Service, code: int | None) -> None:
        if service.health is not None:
            service.health.exited(wanted=service.wanted or service.missed)
        service.pid, service.last_exit, service.kill_at = None, code, None
        for waiter in service.waiting:
            self._answer(waiter, {"ok": True, "last_exit": code})
        service.waiting.clear()
        if not (service.wanted and service.restart) or self._ending is not None:
            return
        lived = time.monotonic() - service.started
        service.quick_deaths = 0 if lived > HEALTHY_SECONDS else service.quick_deaths + 1
        backoff = max(restart_backoff(service.name, service.quick_deaths), service.restart_delay)
        service.due = time.monotonic() + backoff
        last = service.log[-1] if service.log else ""
        self._log(
            f"daemon {service.name} exited with {code} after {lived:.1f} s, and the supervisor restarts it "
            f"in {backoff:.1f} s. Last line of the daemon: {last}"
        )

    def _log(self, line: str) -> None:
        sys.stderr.write(f"supervisor: {line}\n")
        sys.stderr.flush()
        self._forward("supervisor", [line])

    def _accept(self) -> None:
        connection, _ = self._control.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._receive, connection, bytearray()))

    def _receive(self, connection: socket.socket, buffer: bytearray) -> None:
        data, arrived, *_ = socket.recv_fds(connection, REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        self._arrived += arrived
        buffer += data
        if data and b"\n" not in buffer and len(buffer) < REQUEST_BYTES:
            return
        self._selector.unregister(connection)
        answer: dict[str, Any] | None
        try:
            request = json.loads(buffer)
            answer = self._handlers[request["op"]](connection, request)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        while self._arrived:
            # The handler has not taken this file descriptor of the request.
            os.close(self._arrived.pop())
        if answer is not None:
            self._answer(connection, answer)

    def _answer(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        try:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError as error:
            self._log(f"the supervisor could not send an answer to a client on the control socket: {error}")
        finally:
            connection.close()

    def _on_start(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        argv = [str(word) for word in request["argv"]]
        service = Service(str(request["name"]), argv, inner=bool(request["inner"]), restart=bool(request["restart"]))
        known, starts = self._services.get(service.name), True
        if known is not None and known.pid is not None:
            if (known.argv, known.inner) != (service.argv, service.inner):
                return {"ok": False, "error": "it runs with other arguments; stop it first"}
            dismissed, known.wanted, known.restart = not known.wanted, True, service.restart
            if dismissed and known.health is not None:
                known.health.started(known.pid)
            service, starts = known, False
        elif known is not None and known.due is not None and known.restart_delay and known.argv == service.argv:
            # The daemon has exited and is about to be restarted after a delay, so this request does not start it.
            service, starts = known, False
        elif known is not None:
            service.log, service.starts = known.log, known.starts
        self._set_policy(service, request.get("policy", {}))
        if starts:
            self.start(service)
        return {"ok": True, **service.status()}

    def _set_policy(self, service: Service, policy: dict[str, Any]) -> None:
        """Change the supervision of a daemon (`amphora_agent.services.control.ServicePolicy`)."""
        service.restart_delay = float(policy.get("restart_delay", 0.0))
        service.leftovers = [str(path) for path in policy.get("leftovers", [])]
        watched = {key: policy.get(key) for key in ("health", "probe")}
        if watched == service.policy:
            return
        service.policy = watched
        if service.health is not None:
            service.health.stop_probing()
        file = None if watched["health"] is None else Path(watched["health"])
        service.health = HealthFile(self._selector, file, watched["probe"] and Probe(**watched["probe"]))
        if service.pid is not None:
            service.health.started(service.pid)

    def _on_stop(self, connection: socket.socket, request: dict[str, Any]) -> dict[str, Any] | None:
        service = self._services[request["name"]]
        service.wanted, service.due, service.missed = False, None, bool(request.get("missed", False))
        if service.pid is None:
            if service.health is not None:
                service.health.exited(wanted=service.missed)
            return {"ok": True, "last_exit": service.last_exit}
        os.kill(service.pid, int(request.get("signal", signal.SIGTERM)))
        service.kill_at = time.monotonic() + STOP_SECONDS
        service.waiting.append(connection)
        return None

    def _on_dismiss(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        service = self._services[request["name"]]
        service.wanted, service.due, service.missed = False, None, False
        if service.health is not None:
            service.health.exited(wanted=False)
        return {"ok": True}

    def _on_signal(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        service = self._services[request["name"]]
        if service.pid is None:
            return {"ok": False, "error": "it does not run"}
        os.kill(service.pid, int(request["signal"]))
        return {"ok": True}

    def _on_status(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        names = [request["name"]] if "name" in request else list(self._services)
        return {"ok": True, "services": {n: self._services[n].status() for n in names if n in self._services}}

    def _on_log(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True, "lines": list(self._services[request["name"]].log)}

    def _on_keep(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        """Store the descriptor that came with the request."""
        name = str(request["name"])
        if not self._arrived or name in self._kept or len(self._kept) >= MOST_KEPT:
            return {"ok": False, "error": f"its name is in use, or {MOST_KEPT} descriptors are stored already"}
        self._kept[name] = self._arrived.pop()
        return {"ok": True}

    def _on_kept(self, connection: socket.socket, _: dict[str, Any]) -> None:
        """Answer with copies of all stored descriptors, in the order of the names."""
        answer = json.dumps({"ok": True, "names": list(self._kept)}).encode() + b"\n"
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            socket.send_fds(connection, [answer], list(self._kept.values()))

    def _on_drop(self, _: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        descriptor = self._kept.pop(str(request["name"]), None)
        if descriptor is not None:
            os.close(descriptor)
        return {"ok": True}

    def _on_signals(self, reader: int) -> None:
        numbers = os.read(reader, 512)
        self._reap()
        if self._ending is None and (signal.SIGTERM in numbers or signal.SIGINT in numbers):
            self._ending = time.monotonic() + SHUTDOWN_SECONDS
            for service in self._services.values():
                service.wanted, service.due = False, None
                if service.pid is not None:
                    os.kill(service.pid, signal.SIGTERM)

    def _run_timers(self) -> None:
        now = time.monotonic()
        for service in list(self._services.values()):
            if service.due is not None and service.due <= now:
                self._spawn(service)
            if service.health is not None:
                service.health.run_due(now)
            if service.kill_at is not None and service.kill_at <= now and service.pid is not None:
                service.kill_at = None
                os.kill(service.pid, signal.SIGKILL)

    def _next_timer(self) -> float | None:
        services = self._services.values()
        times = [t for s in services for t in (s.due, s.kill_at) if t is not None]
        times += [s.health.due for s in services if s.health is not None and s.health.due is not None]
        if self._ending is not None:
            times.append(self._ending)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def run(self) -> None:
        """Serve until SIGTERM. At the end of the process-id namespace the kernel kills the other processes."""
        while True:
            for key, _ in self._selector.select(self._next_timer()):
                key.data()
            self._run_timers()
            if self._ending is not None:
                alive = any(service.pid is not None for service in self._services.values())
                if not alive or time.monotonic() >= self._ending:
                    return


def main() -> None:
    """Run the supervisor; the argument is the path of the specification."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    paths = Paths()
    Machine(paths).build(spec)
    supervisor = Supervisor(paths)
    argv = [spec["python"], "-m", "amphora_agent.server"]
    supervisor.start(Service(AGENT, argv, inner=False, restart=True))
    supervisor.run()


if __name__ == "__main__":
    main()
