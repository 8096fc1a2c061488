# SPDX-License-Identifier: Apache-2.0
"""Start and stop of the sandbox.

Invariant: `up` and `down` are idempotent and continue after an interruption. A lock serializes their calls. After
`down`, only the state directory is left.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amphora_driver import config
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.compute.qemu import QemuCompute
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import Process, signal_and_wait
from amphora_driver.network.local import LocalNetwork
from sandbox import config_files, demo_hosts, forward_in, forward_out, topology, vm_wait
from sandbox.processes import Program, Supervision
from sandbox.settings import SandboxError

if TYPE_CHECKING:
    from sandbox.settings import Settings

Report = Callable[[str], None]
_READY_SECONDS = 60.0
_KILL_SECONDS = 5.0
# Flags of a listening socket in /proc/net/unix (__SO_ACCEPTCON).
_LISTENING = "00010000"
_NEEDED = {
    "haproxy": "haproxy",
    "keepalived": "keepalived",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "nft": "nftables",
}
_NEEDED_BY_QEMU = {config_files.PROGRAM: "qemu-system-x86", "qemu-img": "qemu-utils"}


class Stack:
    """One sandbox. `report` receives a message for each step, `note` progress messages of a long wait."""

    def __init__(self, settings: Settings, report: Report = lambda _: None, note: Report = lambda _: None) -> None:
        self.settings = settings
        self.supervision = Supervision(settings)
        self._report = report
        self._note = note

    def up(self) -> None:
        """Start everything that does not run; raises SandboxError with the log of a failed program."""
        _check_machine(self.settings)
        with self._locked():
            config_files.write(self.settings)
            with self._open_network() as network:
                migrate.upgrade(self.settings.database_url)
                topology.define_networks(network)
                topology.build_networks(self.settings, network)
                self._report("networks: management, vip, members; a client and three members")
                self._power_on(network)
            (self.settings.run / "sockets").mkdir(exist_ok=True, mode=0o700)
            programs = self.programs()
            # The programs start in parallel, because imports take most of the time of each start.
            started = [program for program in programs if self.supervision.start(program)]
            for program in started:
                self.supervision.wait_ready(program, _READY_SECONDS)
                self._report(f"{program.name} is ready")

    def down(self) -> None:
        """Stop and remove everything except the state directory."""
        with self._locked():
            ended = self.supervision.stop(*self.supervision.names())
            if ended:
                self._report(f"stopped: {', '.join(ended)}")
            if self.settings.driver_configuration.exists():
                with self._open_network() as network:
                    self._power_off(network)
            removed = namespaces.names(f"{self.settings.prefix}-")
            for name in removed:
                # A namespace may contain processes that the sandbox has not recorded, so all its processes are killed.
                if not signal_and_wait(namespaces.processes(name), signal.SIGKILL, _KILL_SECONDS):
                    raise SandboxError(f"remove the namespace {name}", "a process in it does not end after SIGKILL")
                namespaces.remove(name)
            if removed:
                self._report(f"namespaces removed: {', '.join(removed)}")

    def programs(self) -> list[Program]:
        """The programs, in the order in which `up` waits for them."""
        settings, control = self.settings, self.settings.control
        gunicorn = _python(
            *("gunicorn", "--bind", "fd://3", "--workers", "1", "--threads", "8", "--timeout", "120"),
            # gunicorn's default closes a connection after two idle seconds, and a request sent during the close would
            # be lost.
            *("--keep-alive", "300"),
            *("--no-control-socket", "--log-level", "warning", "sandbox.octavia_start:api()"),
        )
        neutron, agent = _python("sandbox.fake_neutron_api"), _python("sandbox.octavia_start")
        controller, health = _python("amphora_driver.controller.service"), _python("amphora_driver.health.service")
        api, network_api = settings.octavia_port, settings.network_port
        server, port = (sys.executable, "-S", demo_hosts.__file__), demo_hosts.MEMBER_PORT
        member_listens = _listens_on_port("tcp6", port)
        members = [
            Program(name, (*server, name, str(port)), namespace=settings.host(name), ready=member_listens)
            for name in topology.MEMBERS
        ]
        controller_listens = _has_notification_socket(settings.run, "controller")
        health_listens = _listens_on_port("udp", config_files.HEALTH_PORT)
        agent_listens = _listens_on_unix(settings.run, "status", "stats", "get")
        reporter_listens = _has_notification_socket(settings.run, "reporter")
        return [
            *members,
            *self._forward_out(),
            *self._forward_in(),
            Program("network-api", neutron, listen=network_api, ready=_answers_http(network_api)),
            Program("octavia-api", gunicorn, listen=api, ready=_answers_http(api)),
            Program("octavia-driver-agent", agent, ready=lambda one: agent_listens(one) and reporter_listens(one)),
            Program("amphora-controller", controller, namespace=control, ready=controller_listens),
            Program("amphora-health-manager", health, namespace=control, ready=health_listens),
        ]

    def _forward_out(self) -> list[Program]:
        """The forwarder to servers on this machine, if the settings contain any."""
        ports = forward_out.loopback_ports(self.settings.store_url, self.settings.broker_url)
        if not ports:
            return []
        control = self.settings.control
        argv = _python(forward_out.__name__, control, *(str(port) for port in ports))
        return [Program("forward-out", argv, ready=lambda _: forward_out.is_listening(control, ports))]

    def _forward_in(self) -> list[Program]:
        """The forwarder to the status page, if the page has a port. `up` does not wait for the forwarder."""
        settings = self.settings
        if not settings.status_port:
            return []
        argv = _python(forward_in.__name__, settings.control, str(config_files.STATUS_PORT))
        return [Program("status-page", argv, listen=settings.status_port)]

    def _compute_backends(self, network: LocalNetwork) -> tuple[NetnsCompute | QemuCompute, ...]:
        """All compute backends: a flavor can select each of them."""
        options = config.load([str(self.settings.driver_configuration)])
        # An older sandbox has no directory for virtual machines. Then, the QEMU backend is not used.
        qemu = [QemuCompute(options, network)] if self.settings.machines.exists() else []
        return (NetnsCompute(options, network), *qemu)

    def _power_on(self, network: LocalNetwork) -> None:
        booting = {}
        for compute in self._compute_backends(network):
            for amphora_id in compute.booted():
                if compute.power_on(amphora_id):
                    self._report(f"amphora {amphora_id} is powered on")
                    machine = compute.get(amphora_id) if isinstance(compute, QemuCompute) else None
                    if machine is not None and machine.management_address is not None:
                        booting[amphora_id] = machine.management_address
        if booting:
            self._note(f"virtual machines boot{', emulated' if config_files.uses_emulation(self.settings) else ''}")
            port = config.load([str(self.settings.driver_configuration)]).amp_agent.port
            vm_wait.wait_for_agents(self.settings, booting, port, self._note)
            self._report("virtual machines have booted")

    def _power_off(self, network: LocalNetwork) -> None:
        for compute in self._compute_backends(network):
            for amphora_id in compute.booted():
                compute.power_off(amphora_id)
                self._report(f"amphora {amphora_id} is powered off")

    @contextmanager
    def _open_network(self) -> Iterator[LocalNetwork]:
        database = Database(self.settings.database_url)
        try:
            yield LocalNetwork(config.load([str(self.settings.driver_configuration)]), database)
        finally:
            database.dispose()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.settings.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *words)


def _check_machine(settings: Settings) -> None:
    if os.geteuid() != 0:
        raise SandboxError("start the sandbox", "network namespaces need root", "Run it as root.")
    needed = {**_NEEDED, **(_NEEDED_BY_QEMU if settings.compute == "qemu" else {})}
    missing = sorted({package for tool, package in needed.items() if shutil.which(tool) is None})
    if missing:
        remedy = f"Install them: apt-get install {' '.join(missing)}"
        raise SandboxError("start the sandbox", f"{', '.join(missing)} is not installed", remedy)


def _answers_http(port: int) -> Callable[[Process], bool]:
    """The program answers a request. The request waits, because the inherited socket listens."""

    def ready(_: Process) -> bool:
        with (
            suppress(OSError, http.client.HTTPException),
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_SECONDS)) as connection,
        ):
            connection.request("GET", "/")
            return connection.getresponse().status < 400
        return False

    return ready


def _listens_on_unix(folder: Path, *names: str) -> Callable[[Process], bool]:
    """The program listens on unix sockets with these names.

    The check does not connect: octavia-driver-agent forks for a connection, and without a request the fork never ends.
    """
    wanted = {str(folder / f"{name}.sock") for name in names}
    return lambda process: wanted <= {path for path, flags in _unix_sockets(process) if flags == _LISTENING}


def _has_notification_socket(folder: Path, role: str) -> Callable[[Process], bool]:
    """The program has bound its notification socket. The file alone may belong to a dead process."""
    beginning = str(folder / "sockets" / f"{role}-")
    return lambda process: any(path.startswith(beginning) for path, _ in _unix_sockets(process))


def _unix_sockets(process: Process) -> list[tuple[str, str]]:
    """Path and flags of the unix sockets in the network namespace of the process."""
    return [(row[7], row[3]) for row in _net_table(process, "unix") if len(row) > 7]


def _listens_on_port(protocol: str, port: int) -> Callable[[Process], bool]:
    """The namespace of the program has a socket with this port."""
    return lambda process: any(row[1].endswith(f":{port:04X}") for row in _net_table(process, protocol))


def _net_table(process: Process, name: str) -> list[list[str]]:
    """The rows of a table in /proc/PID/net (proc(5)); none if the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/net/{name}").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line.split() for line in lines[1:]]
