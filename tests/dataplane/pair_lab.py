# SPDX-License-Identifier: Apache-2.0
"""A pair with its VIPs, a switch with detachable cables, and clients that measure outages.

Invariant: a push takes the production path: the model, `render`, the controller's bundle, and two real agents, each
with its own HAProxy and keepalived. The fixture repairs everything that a test breaks.

    cl (a client) ── the VIPs' switch ── rt (a router) ── far (a client behind it)
                        │        │
                       amp      bmp

    with pair.poll() as polling:
        pair.holder.kill("haproxy")
        pair.until_holder(other)
    assert polling.outage < 1.0
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from amphora_lab import ROOT, Amphora, Network, children, descendants, eventually, ip
from http_clients import HttpClient
from peers import MEMBER, SocketFactory, WebServer
from served import CLIENT_ADDRESSES, MEMBER_ADDRESSES, Pushed, _content
from wanted import LB, NETWORK, SUBNET, SUBNET6, VIP, VIP6, listener, load_balancer, member, pool

from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.reconcile.tls_tickets import SEED_LENGTH, ticket_keys
from amphora_driver.render.bundle import BundleFile, BundlePartner, BundleVrrp, bundle
from amphora_driver.render.bundle import Served as Given
from amphora_driver.render.haproxy import render
from amphora_driver.secret import Secret

_SEED = Secret(bytes(range(SEED_LENGTH)))
FAST, MEDIUM, USUAL = 0.2, 0.5, 1.0
"""Advertisement intervals in seconds: the fast setting; a slower one, with which a machine may stall for more than a
second without a move of the VIPs; and the default."""
_STEADY_ADVERTS = 5
INNER = "run/netns/amphora-haproxy"
_SUBNETS = (
    Subnet(id=SUBNET, network_id=NETWORK, cidr="198.51.100.0/24", gateway="198.51.100.1"),
    Subnet(id=SUBNET6, network_id=NETWORK, cidr="2001:db8:1::/64", gateway="2001:db8:1::1"),
)


@dataclass(frozen=True)
class NodeAddresses:
    """A node's addresses in the management network and in the VIP's network."""

    namespace: str
    management: str
    mac: str
    fixed: str
    fixed6: str
    priority: int
    mtu: int = 1500

    @property
    def cable(self) -> str:
        return f"port{self.namespace}"


PLACES = (
    NodeAddresses("amp", "203.0.113.11", "02:00:00:00:5e:0b", "198.51.100.11", "2001:db8:1::11", 254),
    NodeAddresses("bmp", "203.0.113.12", "02:00:00:00:5e:0c", "198.51.100.12", "2001:db8:1::12", 253),
    NodeAddresses("cmp", "203.0.113.13", "02:00:00:00:5e:0d", "198.51.100.13", "2001:db8:1::13", 254),
)


class Node(Amphora):
    """One amphora of a pair.

    Attributes:
        audit: seconds between two audits of agents that start later.
    """

    audit = 3600.0

    def __init__(self, network: PairNetwork, directory: Path, authority, place: NodeAddresses) -> None:
        at = {"place": place.namespace, "address": place.management}
        super().__init__(network, directory, authority, interval=5, audit=self.audit, **at)
        self.where = place
        self.load_balancer_id = LB

    def __repr__(self) -> str:
        return self.where.namespace

    def holds(self, vip: str = VIP) -> bool:
        """Return whether the node's interface has a VIP."""
        return vip in self.addresses()

    def addresses(self) -> list[str]:
        listed = self.inside("ip", "-j", "addr", "show", "dev", "eth1")
        return [each["local"] for link in json.loads(listed) for each in link["addr_info"]]

    def inside(self, *argv: str) -> str:
        """Return the output of a command in the inner namespace; "[]" without output or amphora."""
        if self._process is None:
            return "[]"
        command = ["nsenter", f"--net=/proc/{self.init()}/root/{INNER}", "--", *argv]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout or "[]"

    def processes(self, program: str) -> list[int]:
        """Return a program's processes, parents first."""
        found = []
        for pid in descendants(self.init()):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == program:
                    found.append(pid)
        return found

    def send(self, program: str, number: signal.Signals) -> None:
        for pid in self.processes(program):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, *programs: str) -> None:
        for program in programs:
            self.send(program, signal.SIGKILL)

    def everything(self, number: signal.Signals) -> None:
        """Freeze or thaw the whole amphora."""
        first = self.init()
        for pid in (first, *descendants(first)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def runs(self) -> bool:
        return self._process is not None and bool(children(self._process.pid))

    def is_well(self) -> bool:
        """Return whether HAProxy answers and keepalived runs.

        A keepalived child without its parent does not count.
        """
        known = self.status("keepalived")
        return self.health() == "0" and known is not None and known["pid"] is not None

    def health(self) -> str:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{self.init()}/root/run/amphora-agent/haproxy.health").read_text()
        return ""

    def said(self, service: str) -> list[str]:
        return self.supervisor(op="log", name=service)["lines"]


class PairNetwork(Network):
    """The network of `amphora_lab` with further amphorae, whose cables a test can cut or isolate."""

    def _build(self) -> None:
        super()._build()
        for place in PLACES[1:]:
            ip(f"netns add {self.name(place.namespace)}")
            self._made.append(place.namespace)
            ip(f"-n {self.name(place.namespace)} link set lo up")
            self.connect(place.namespace, "mgmt", [f"{place.management}/24"])
        self._route()
        for short, addresses in (("mem", MEMBER_ADDRESSES), ("cl", CLIENT_ADDRESSES)):
            for address in addresses:
                more = " nodad preferred_lft 0" if ":" in address else ""
                ip(f"-n {self.name(short)} addr replace {address} dev eth0{more}")

    def _route(self) -> None:
        """Add a router to the VIPs' network, and a client behind it."""
        for short in ("rt", "far"):
            ip(f"netns add {self.name(short)}")
            self._made.append(short)
            ip(f"-n {self.name(short)} link set lo up")
        self.connect("rt", "vip", ["198.51.100.1/24", "2001:db8:1::1/64"])
        router, far = self.name("rt"), self.name("far")
        ip(f"-n {router} link add eth1 type veth peer name eth0 netns {far}")
        for namespace, link, host in ((router, "eth1", 1), (far, "eth0", 20)):
            ip(
                f"-n {namespace} link set {link} up",
                f"-n {namespace} addr add 192.0.2.{host}/24 dev {link}",
                f"-n {namespace} addr add 2001:db8:2::{host}/64 dev {link} nodad",
            )
        ip(f"-n {far} route add default via 192.0.2.1", f"-n {far} route add default via 2001:db8:2::1")
        self.thread("rt").run(_forward)

    def neighbour(self, short: str, address: str) -> str:
        """Return the link-layer address of a neighbour in a node's table; empty if unknown."""
        command = ["ip", "-j", "-n", self.name(short), "neigh", "show", address]
        listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout or "[]")
        return next((each.get("lladdr", "") for each in listed), "")

    def plug_in(self, place: NodeAddresses) -> None:
        amphora, switch = self.name(place.namespace), self.name("sw")
        ip(
            f"-n {switch} link add {place.cable} type veth peer name new0 netns {amphora} address {place.mac}",
            f"-n {switch} link set {place.cable} master vip up",
        )

    def pull_out(self, place: NodeAddresses) -> None:
        command = ["ip", "-n", self.name("sw"), "link", "del", place.cable]
        subprocess.run(command, check=False, capture_output=True)

    def cut(self, place: NodeAddresses) -> None:
        ip(f"-n {self.name('sw')} link set {place.cable} down")

    def mend(self, place: NodeAddresses) -> None:
        ip(f"-n {self.name('sw')} link set {place.cable} up")

    def part(self, *places: NodeAddresses, apart: bool = True) -> None:
        """Separate the nodes from each other only, or connect them again."""
        for place in places:
            state = "on" if apart else "off"
            command = ["bridge", "-n", self.name("sw"), "link", "set", "dev", place.cable, "isolated", state]
            subprocess.run(command, check=True, capture_output=True)


class PollingClient:
    """A client of a VIP; `outage` is the time from its first to its last failed request, in seconds."""

    def __init__(
        self, network: Network, place: str, address: str, port: int, interval: float, time_limit: float
    ) -> None:
        where = f"--net=/run/netns/{network.name(place)}"
        program = [sys.executable, str(ROOT / "tests/dataplane/polling_client.py")]
        arguments = [address, str(port), str(interval), str(time_limit)]
        self._process = subprocess.Popen(
            ["nsenter", where, "--", *program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.requests: list[tuple[float, float, str]] = []
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> None:
        said, _ = self._process.communicate(timeout=60)
        self.requests = [tuple(each) for each in json.loads(said)]

    @property
    def failed(self) -> list[tuple[float, float, str]]:
        return [each for each in self.requests if each[2] != "200"]

    @property
    def outage(self) -> float:
        moments = [began for began, _, _ in self.failed]
        return max(moments) - min(moments) if moments else 0.0


class Pair:
    """A load balancer that two amphorae serve, for one test."""

    def __init__(self, network: PairNetwork, directory: Path, authority, advert: float = FAST) -> None:
        self.network = network
        self.advert = advert
        self.speak_ipv4()
        self.generations = itertools.count(1)
        self.members = SocketFactory(network.thread("mem"))
        self.client = HttpClient(SocketFactory(network.thread("cl")))
        self._directory = directory
        self._authority = authority
        self.peers: list[WebServer] = []
        self.nodes: list[Node] = []
        # Also nodes that a test has taken out of `nodes`.
        self._booted: list[Node] = []
        self.partners: tuple[NodeAddresses, ...] = PLACES[:2]

    def speak_ipv4(self) -> None:
        """Use IPv4 between the nodes; VIPs may be of both families."""
        self._speaks6 = self._alone6 = False

    def speak_ipv6(self, *, alone: bool) -> None:
        """Use IPv6 between the nodes; with `alone`, the VIPs' network has no IPv4."""
        self._speaks6, self._alone6 = True, alone

    def boot(self, place: NodeAddresses) -> Node:
        """Plug and start a node."""
        self.network.plug_in(place)
        directory = self._directory / place.namespace
        directory.mkdir()
        node = Node(self.network, directory, self._authority, place)
        self.nodes.append(node)
        self._booted.append(node)
        node.start()
        return node

    def reboot(self, node: Node) -> None:
        """Power off and on; the files on disk remain."""
        node.power_off()
        self.network.pull_out(node.where)
        self.network.plug_in(node.where)
        node.start()

    def lose(self, node: Node) -> None:
        """Power off permanently."""
        if node.runs():
            node.everything(signal.SIGCONT)
        node.power_off()
        self.network.pull_out(node.where)
        self.nodes.remove(node)

    def mend(self) -> None:
        """Repair everything that the test broke."""
        for node in self.nodes:
            if node.runs():
                node.everything(signal.SIGCONT)
                self.network.mend(node.where)
            else:
                self.reboot(node)
        self.network.part(*[node.where for node in self.nodes], apart=False)
        for node in self.nodes:
            eventually(node.answers, "the agent answers")

    def close(self) -> None:
        self.client.close()
        for node in list(self.nodes):
            self.lose(node)
        for node in self._booted:
            node.power_off()
        for peer in self.peers:
            peer.close()

    def web(self, name: str = "web", address: str = MEMBER, **more) -> WebServer:
        made = WebServer(self.members, name, address, **more)
        self.peers.append(made)
        return made

    # -- pushing -----------------------------------------------------------------------------------------------

    def push(
        self, tree: LoadBalancer, secrets: dict[str, str] | None = None, *, to=None, alone=False, held=False, **vrrp
    ) -> list[Pushed]:
        """Render a load balancer and push it to each node in turn; `vrrp` changes VRRP settings.

        An amphora that is `alone` has the VIPs without VRRP. With `held`, the nodes have no VIPs.
        """
        rendered = render(tree, shared_tickets=bool(secrets))
        # The reference of the ticket keys is empty.
        secrets = {**(secrets or {}), "": ticket_keys(_SEED).reveal().decode()}
        assert not rendered.refused, [str(each) for each in rendered.refused]
        files = tuple(
            BundleFile(name=each.name, content=Secret(_content(each, secrets).encode())) for each in rendered.files
        )
        given = Given(text=rendered.text if tree.listeners else None, files=files, pings=dict(rendered.pings))
        generation, found = next(self.generations), []
        for node in to or self.nodes:
            settings = None if alone or held else self._vrrp(node, vrrp)
            ports = (_plugged(node.where, six=self._alone6),)
            document = bundle(tree, generation, node.id, ports, given, settings, vips_held=held)
            status, answer = node.call("PUT", "/v2/bundle", document)
            assert status == 200, f"{node}: {status}: {json.dumps(answer, indent=1)}\n{rendered.text}"
            found.append(Pushed(status, answer, rendered))
        return found

    def _vrrp(self, node: Node, changes) -> BundleVrrp:
        others = [one for one in self.nodes if one is not node]
        vrrp = BundleVrrp(
            interface="eth1",
            router_id=1,
            priority=node.where.priority,
            advert_interval=self.advert,
            local=self._partner(node),
            peers=tuple(map(self._partner, others)),
        )
        return (
            vrrp if not changes else type(vrrp)(**{**{f: getattr(vrrp, f) for f in vrrp.__struct_fields__}, **changes})
        )

    def _partner(self, node: Node) -> BundlePartner:
        return BundlePartner(name=node.id, address=node.where.fixed6 if self._speaks6 else node.where.fixed)

    @property
    def vip(self) -> str:
        return VIP6 if self._speaks6 else VIP

    # -- VIP holder------------------------------------------------------------------------------------

    def holders(self) -> list[Node]:
        return [node for node in self.nodes if node.holds(self.vip)]

    def settled(self, seconds: float = 15.0) -> Node:
        """Wait until exactly one node has the VIPs, and return it."""
        return eventually(lambda: len(found := self.holders()) == 1 and found, "one node has the VIPs", seconds)[0]

    def calm(self) -> None:
        """Wait until all nodes are healthy, and one node has the VIPs and serves."""
        eventually(lambda: all(node.is_well() for node in self.nodes), "all nodes are healthy")
        self.settled()
        eventually(self.serves, "a node serves")

    def steady(self) -> None:
        """Wait as `calm` does, after a change of VRRP settings.

        A node ignores the other's advertisements until both have the new settings.
        """
        self.calm()
        seen = [time.monotonic(), self.holders()]

        def lasts() -> bool:
            now, holders = time.monotonic(), self.holders()
            if len(holders) != 1 or holders != seen[1]:
                seen[:] = now, holders
            return now - seen[0] > _STEADY_ADVERTS * self.advert

        eventually(lasts, "one node has the VIPs, and keeps them")

    def serves(self) -> bool:
        with suppress(OSError, EOFError):
            return self.client.fetch(address=self.vip, timeout=0.5).status == 200
        return False

    @property
    def holder(self) -> Node:
        found = self.holders()
        assert len(found) == 1, f"{found} have the VIPs"
        return found[0]

    @property
    def standby(self) -> Node:
        return next(node for node in self.nodes if node is not self.holder)

    # -- clients -----------------------------------------------------------------------------------------------

    # The time-out is below the second after which a client retransmits a lost SYN, so that the test detects each loss.
    # It is not lower, because a busy machine answers slowly.
    @contextmanager
    def poll(
        self,
        address: str | None = None,
        port: int = 80,
        interval: float = 0.01,
        time_limit: float = 0.9,
        place: str = "cl",
    ):
        polling = PollingClient(self.network, place, address or self.vip, port, interval, time_limit)
        try:
            yield polling
        finally:
            polling.end()

    def pings(self, address: str = VIP) -> bool:
        """Return whether an address answers one echo."""
        return self.network.thread("cl").run(_echo, address)


def _echo(address: str) -> bool:
    """Send one ICMP echo; return whether an answer arrives (RFC 792, RFC 4443)."""
    six = ":" in address
    protocol = socket.getprotobyname("ipv6-icmp" if six else "icmp")
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_RAW, protocol) as link:
        link.settimeout(0.5)
        number = os.urandom(2)
        request = struct.pack("!BBH", 128 if six else 8, 0, 0) + number + b"\0\1"
        if not six:  # the kernel computes the checksum of an ICMPv6 echo
            words = sum(struct.unpack("!4H", request))
            request = request[:2] + struct.pack("!H", ~(words % 0xFFFF) & 0xFFFF) + request[4:]
        try:
            link.sendto(request, (address, 0))
            while True:
                answer, sender = link.recvfrom(2048)
                body = answer if six else answer[20:]
                if sender[0] == address and body[0] == (129 if six else 0) and body[4:6] == number:
                    return True
        except OSError:
            return False


def _forward() -> None:
    for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", setting).write_text("1")


def _plugged(place: NodeAddresses, *, six: bool) -> AttachedPort:
    addresses = (
        FixedAddress(subnet_id=SUBNET, address=place.fixed),
        FixedAddress(subnet_id=SUBNET6, address=place.fixed6),
    )
    return AttachedPort(
        port=Port(
            id=str(uuid.uuid5(uuid.NAMESPACE_OID, place.mac)),
            network_id=NETWORK,
            mac=place.mac,
            mtu=place.mtu,
            addresses=addresses[six:],
        ),
        subnets=_SUBNETS[six:],
    )


__all__ = ["FAST", "MEDIUM", "PLACES", "USUAL", "VIP", "VIP6", "Node", "NodeAddresses", "Pair", "PairNetwork"]


def plain(pair: Pair, **more):
    return load_balancer(listener(80), pool("pool", *[member(peer) for peer in pair.peers]), **more)
