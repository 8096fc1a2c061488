# SPDX-License-Identifier: Apache-2.0
"""Virtual machines on their own switch, with clients and members beside them.

Invariant: the product's own compute backend boots the guests from the product's own config drive. A controller in its
own namespace calls their agents. Every name has a unique number, and `close` ends all parts.

    control ── management bridge ── guests ── the VIPs' bridge ── client, members
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
import uuid
from contextlib import suppress
from pathlib import Path

from amphora_lab import eventually
from peers import SocketFactory
from remote_shell import PORT as SHELL_PORT
from saved_guest import ResumedGuests
from throwaway_authority import CLIENT, SERVER, Authority
from wanted import NETWORK, SUBNET, SUBNET6

from amphora_agent.network.namespace import Namespace
from amphora_driver import config
from amphora_driver.compute.interface import BootRequest, MachineState
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.network import FixedAddress
from amphora_driver.network import bridges
from amphora_driver.network.interface import management_port
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.secret import Secret

MANAGEMENT, AGENT, HEARTBEATS = "management", 9443, 5555
CONTROLLER = "203.0.113.2"
# An emulated boot takes 30 s on an idle machine, and took 400 s beside seven other boots on two processors.
BOOT_SECONDS = 900.0
# The time-out of every other wait for a guest.
TIME_LIMIT = 300.0
_HOSTS = {
    "control": (MANAGEMENT, (CONTROLLER,)),
    "client": (NETWORK, ("198.51.100.20", "2001:db8:1::20")),
    "members": (NETWORK, ("198.51.100.110", "2001:db8:1::110")),
}
MORE_MEMBERS = tuple(
    f"{beginning}{number}" for number in range(111, 120) for beginning in ("198.51.100.", "2001:db8:1::")
)


class GuestLab:
    """One switch, its networks, and the guests on it.

    Args:
        folder: for disks, databases and logs.
        number: unique on this machine.
        images: folder of the images, as `[amp_compute_qemu] image_directory`.
    """

    def __init__(self, folder: Path, number: int, images: Path, **options: object) -> None:
        self.folder = folder
        self.prefix = f"i{number}"
        self.switch = f"{self.prefix}-switch"
        self._threads: dict[str, Namespace] = {}
        more = "".join(f"{name} = {value}\n" for name, value in options.items())
        file = folder / "guest_lab.conf"
        file.write_text(
            f"[amp_compute_qemu]\ndirectory = {folder}/machines\nprefix = {self.prefix}\n"
            f"image_directory = {images}\n{more}"
            f"[amp_network_local]\nswitch = {self.switch}\n"
        )
        self._database = Database(f"sqlite:///{folder}/guest_lab.sqlite")
        migrate.upgrade(self._database.url)
        self.network = LocalNetwork(config.load([str(file)]), self._database)
        self.compute = ResumedGuests(config.load([str(file)]), self.network)
        self.authority = Authority("controllers")
        self.client_certificate = folder / "client.pem"
        self.client_certificate.write_text(self.authority.issue("controller", CLIENT))
        self.guests: list[Guest] = []

    def build(self) -> None:
        for network_id in (MANAGEMENT, NETWORK):
            self.network.define_network(network_id, network_id, f"br-{network_id[:6]}")
        for subnet_id, network_id, beginning, first, last in (
            ("management-subnet", MANAGEMENT, "203.0.113.", 10, 200),
            (SUBNET, NETWORK, "198.51.100.", 10, 200),
            (SUBNET6, NETWORK, "2001:db8:1::", 10, 200),
        ):
            self.network.define_subnet(
                AddressRange(
                    id=subnet_id,
                    network_id=network_id,
                    name=subnet_id,
                    cidr=f"{beginning}/64" if ":" in beginning else f"{beginning}0/24",
                    gateway=None if network_id == MANAGEMENT else f"{beginning}1",
                    first=f"{beginning}{first}",
                    last=f"{beginning}{last}",
                )
            )
        self._switch = bridges.Switch(self.switch, MANAGEMENT)
        self._switch.ensure(self.network.networks(), self.network.subnets())
        for name, (network_id, addresses) in _HOSTS.items():
            self._host(name, network_id, addresses)
        self._add("members", MORE_MEMBERS)

    def _host(self, name: str, network_id: str, addresses: tuple[str, ...]) -> None:
        subnets = self.network.subnets(network_id)
        wanted = [
            FixedAddress(subnet_id=next(one.id for one in subnets if (":" in one.cidr) == (":" in each)), address=each)
            for each in addresses
        ]
        port = self.network.fixed_port(name, network_id, wanted)
        segment = next(one for one in self.network.networks() if one.id == network_id)
        place = namespaces.path(self.name(name))
        namespaces.ensure(self.name(name))
        self._switch.connect(port, segment, name, place, "eth0")
        bridges.configure_interface(place, "eth0", port, subnets)

    def _add(self, host: str, addresses: tuple[str, ...]) -> None:
        def work(kernel) -> None:
            index = kernel.link_lookup(ifname="eth0")[0]
            for address in addresses:
                bridges.add_address(kernel, index, address, 64 if ":" in address else 24)

        namespaces.run_with_netlink(namespaces.path(self.name(host)), work)

    def name(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def thread(self, host: str) -> Namespace:
        if host not in self._threads:
            self._threads[host] = Namespace(namespaces.path(self.name(host)))
        return self._threads[host]

    def socket_factory(self, host: str) -> SocketFactory:
        return SocketFactory(self.thread(host))

    def boot(self, tag: str | None = None) -> Guest:
        guest = Guest(self, tag)
        self.guests.append(guest)
        guest.boot()
        return guest

    def close(self) -> None:
        for guest in self.guests:
            guest.disconnect()
            keep = os.environ.get("AMPHORA_KEEP_LOGS")
            if keep:
                Path(keep, f"{guest.id}.log").write_text(guest.console())
        for amphora_id in self.compute.booted():
            self.compute.destroy(amphora_id)
        for thread in self._threads.values():
            thread.close()
        for name in namespaces.names(f"{self.prefix}-"):
            namespaces.remove(name)
        self._database.dispose()


class Guest:
    """One virtual machine, accessed by its controller and through `remote_shell`."""

    def __init__(self, guest_lab: GuestLab, tag: str | None) -> None:
        self.guest_lab = guest_lab
        self.id = str(uuid.uuid4())
        self.key = os.urandom(32)
        self.plugged: tuple[AttachedPort, ...] = ()
        self.began = 0.0
        # The number of checks for drift before a push, which the test of the push sets.
        self.checked = 0
        self._tag = tag
        self._connection: http.client.HTTPSConnection | None = None

    def __repr__(self) -> str:
        return f"guest {self.id[:8]}"

    # -- the machine -------------------------------------------------------------------------------------------

    def order(self) -> BootRequest:
        conf = (
            f"[agent]\namphora_id = {self.id}\nbind_address = {{management_address}}\nbind_port = {AGENT}\n"
            f"services = systemd\n[heartbeat]\ninterval = 2\ntargets = {CONTROLLER}:{HEARTBEATS}\n"
            "[audit]\ninterval = 5\n"
        )
        files = {
            "agent.conf": conf,
            "server.pem": self.guest_lab.authority.issue(self.id, SERVER, hours=6),
            "client_ca.pem": self.guest_lab.authority.pem,
            "server_ca.pem": self.guest_lab.authority.pem,
            "heartbeat.key": self.key.hex(),
        }
        secret = {name: Secret(text.encode()) for name, text in files.items()}
        return BootRequest(amphora_id=self.id, load_balancer_id=str(uuid.uuid4()), files=secret, image_tag=self._tag)

    def boot(self) -> None:
        # The first call reads the whole image; a running controller has done this before.
        assert self.guest_lab.compute.image(self._tag) is not None
        self.began = time.monotonic()
        machine = self.guest_lab.compute.boot(self.order())
        assert machine.state is MachineState.RUNNING
        self.address = machine.management_address

    def plug(self) -> None:
        """Plug a port on the VIPs' network, as the controller does."""
        port = self.guest_lab.network.ensure_port(management_port(self.id, NETWORK, [SUBNET, SUBNET6]))
        self.guest_lab.compute.attach(self.id, port)
        subnets = tuple(self.guest_lab.network.subnet(fixed.subnet_id) for fixed in port.addresses)
        self.plugged = (AttachedPort(port=port, subnets=subnets),)

    def process(self):
        return self.guest_lab.compute._process(self.id)

    @property
    def folder(self) -> Path:
        return self.guest_lab.folder / "machines" / self.id

    def console(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / "console.log").read_text(errors="replace")
        return ""

    def await_agent(self, seconds: float = BOOT_SECONDS) -> float:
        """Wait until the agent answers; return the seconds since the guest's start."""
        try:
            eventually(lambda: self._lives() and self.answers(), f"the agent of {self} answers", seconds)
        except AssertionError as error:
            said = self.console()[-6000:]
            raise AssertionError(f"{error}; the console:\n{said}") from error
        return time.monotonic() - self.began

    def rebooting(self):
        """Restart the time of `await_agent`; return a function that returns the seconds since then."""
        self.disconnect()
        self.began = began = time.monotonic()
        return lambda: round(time.monotonic() - began, 1)

    def _lives(self) -> bool:
        assert self.process().alive(), f"qemu has ended: {self.console()[-2000:]}"
        return True

    # -- the remote shell --------------------------------------------------------------------------------------

    def run(self, *argv: str, seconds: float = TIME_LIMIT, check: bool = True) -> str:
        """Run a command in the guest; return its output."""
        answer = self.guest_lab.thread("control").run(self._ask_shell, argv, seconds)
        assert not check or answer["code"] == 0, f"{argv}: {answer}"
        return answer["said"]

    def inner(self, *argv: str, **more) -> str:
        """Run a command in the load balancer's namespace."""
        return self.run("ip", "netns", "exec", "amphora-haproxy", *argv, **more)

    def shell(self, script: str, **more) -> str:
        return self.run("sh", "-c", script, **more)

    def pids(self, unit: str) -> set[str]:
        """Return the processes of a service."""
        return set(self.shell(f"cat /sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs 2>/dev/null; true").split())

    def main_pid(self, unit: str) -> str:
        """Return the main process of a service."""
        return self.shell(f"systemctl show --property=MainPID --value {unit}.service").strip()

    def kill(self, unit: str) -> None:
        """Kill all processes of a service."""
        self.run("systemctl", "kill", "--signal=KILL", f"{unit}.service")

    def _ask_shell(self, argv, seconds: float):
        with socket.create_connection((self.address, SHELL_PORT), 20) as connection:
            connection.settimeout(seconds + 20)
            connection.sendall(json.dumps({"argv": argv, "seconds": seconds}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                return json.loads(lines.readline())

    # -- the controller's side ---------------------------------------------------------------------------------

    def call(self, method: str, path: str, body=None):
        """Send a request over the persistent connection; return status and document."""
        return self.guest_lab.thread("control").run(self._call, method, path, body)

    def drift(self) -> dict:
        """Return what the agent has found in its checks for drift."""
        return self.call("GET", "/v2/info")[1]["drift"]

    def _call(self, method: str, path: str, body):
        for last in (False, True):
            if self._connection is None:
                self._connection = self._connect()
            try:
                self._connection.request(method, path, body)
                with self._connection.getresponse() as answer:
                    return answer.status, json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                self._disconnect()
                if last:
                    raise
        return None

    def _connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cadata=self.guest_lab.authority.pem)
        context.load_cert_chain(self.guest_lab.client_certificate)
        connection = http.client.HTTPSConnection(self.id, AGENT, timeout=TIME_LIMIT, context=context)
        # A booting guest does not answer; a short time-out allows an early retry.
        connection._create_connection = lambda *_: _dial((self.address, AGENT))
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def disconnect(self) -> None:
        self.guest_lab.thread("control").run(self._disconnect)

    def answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/v2/info")[0] == 200
        return False


def _dial(address) -> socket.socket:
    connection = socket.create_connection(address, 3.0)
    connection.settimeout(TIME_LIMIT)
    return connection
