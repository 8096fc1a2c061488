# SPDX-License-Identifier: Apache-2.0
"""Clients, two amphorae and their members as network namespaces of a guest whose kernel has IPVS.

The part of tests/image/guest_lvs.py that is no check; whoever imports it has `amphora_agent` on the path.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import selectors
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from amphora_agent.bundle import Bundle
from amphora_agent.keepalived.ipvs_process import LvsKeepalived
from amphora_agent.l4.model import Member, VirtualServer
from amphora_agent.l4_ipvs.engine import LvsEngine
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths

VIP, VIP6, SECOND = "198.51.100.5", "2001:db8:1::5", "198.51.100.6"
NODES = {"a": 11, "b": 12}
CLIENTS, MEMBERS = "lvs-clients", "lvs-members"
SCTP = 132
PORT = 5353
LIBC = ctypes.CDLL(None, use_errno=True)


def run(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout


def eventually(question, wanted=True, seconds=30.0):
    """A slow guest on a busy machine: the time is a limit, not a measure."""
    end = time.monotonic() + seconds
    while (found := question()) != wanted:
        if time.monotonic() > end:
            raise AssertionError(f"{found!r} is not {wanted!r} after {seconds} s")
        time.sleep(0.05)
    return found


class Processes:
    """Runs keepalived in a namespace; what an amphora's service manager would do."""

    def __init__(self, namespace, log):
        self._namespace, self._log = namespace, log
        self._processes = {}

    def start(self, name, argv, *, inner, care):
        if (one := self._processes.get(name)) and one.poll() is None:
            return
        for file in care.leftovers:
            file.unlink(missing_ok=True)
        with Path(self._log).open("ab") as log:
            command = ["ip", "netns", "exec", self._namespace, *argv, "-D"]
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def stop(self, name, *, missed=False):
        one = self._processes.pop(name, None)
        if one is not None:
            one.terminate()
            one.wait(20)

    def signal(self, name, number):
        self._processes[name].send_signal(number)

    def status(self, name):
        one = self._processes.get(name)
        return None if one is None or one.poll() is not None else SimpleNamespace(pid=one.pid, wanted=True)


class Node:
    """One amphora."""

    def __init__(self, name):
        self.name, self.namespace = name, f"lvs-node-{name}"
        self.root = Path(f"/tmp/lvs-{name}")
        self.paths = Paths(self.root)
        self.paths.run.mkdir(parents=True, exist_ok=True)
        self.inner = Namespace(Path("/run/netns") / self.namespace)
        self.log = self.root / "keepalived.log"
        self.processes = Processes(self.namespace, self.log)
        self.keepalived = LvsKeepalived(self.paths, self.processes, self.inner)
        self.engine = LvsEngine(str(self.paths.run))
        self.vrrp = None

    def serve(self, *servers, **up):
        """As the checker and then the agent do."""
        states = {(server.id, member_id(name)): value for server in servers for name, value in up.items()}
        self.inner.run(self.engine.check, servers)
        self.keepalived.check(self.bundle(servers))
        self.inner.run(self.engine.bring_about, servers, states, paired=self.vrrp is not None)
        self.keepalived.bring_about(self.bundle(servers))
        eventually(lambda: self.inner.run(self.engine.differs, servers, states), [])

    def checked(self, *servers, **up):
        """Only what the checker does."""
        states = {(server.id, member_id(name)): value for server in servers for name, value in up.items()}
        self.inner.run(self.engine.bring_about, servers, states)
        return lambda: self.inner.run(self.engine.differs, servers, states)

    def bundle(self, servers):
        return Bundle(uuid.uuid4(), uuid.UUID(int=7), 1, None, (), {}, None, (), (), self.vrrp, tuple(servers))

    def counters(self, server):
        return self.inner.run(self.engine.counters)[server.id]

    def rest(self):
        self.keepalived.stop()
        self.inner.run(self.engine.release)
        self.vrrp = None


def build():
    for name in (CLIENTS, MEMBERS, *(f"lvs-node-{node}" for node in NODES)):
        run(f"ip netns add {name}; ip -n {name} link set lo up")
    for net, where in (("front", CLIENTS), ("back", MEMBERS)):
        run(f"ip -n {where} link add {net} type bridge; ip -n {where} link set {net} up")
        run(f"ip netns exec {where} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.{net}.accept_dad=0")
        for node, number in NODES.items():
            inner = f"lvs-node-{node}"
            run(
                f"ip netns exec {inner} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv4.ip_forward=1"
                " net.ipv6.conf.all.forwarding=1"
            )
            run(f"ip -n {where} link add {net}-{node} type veth peer name {net} netns {inner}")
            run(f"ip -n {where} link set {net}-{node} master {net} up; ip -n {inner} link set {net} up")
            v4, v6 = ("198.51.100", "2001:db8:1") if net == "front" else ("10.0.0", "2001:db8:2")
            run(
                f"ip -n {inner} addr add {v4}.{number}/24 dev {net}; ip -n {inner} addr add {v6}::{number}/64 dev {net}"
            )
    for number in (1, 2, 3, 4):
        run(f"ip -n {CLIENTS} addr add 198.51.100.{100 + number}/24 dev front")
        run(f"ip -n {CLIENTS} addr add 2001:db8:1::{100 + number}/64 dev front")
        run(f"ip -n {MEMBERS} addr add 10.0.0.{number}/24 dev back")
        run(f"ip -n {MEMBERS} addr add 2001:db8:2::{number}/64 dev back")
    have_vips("a")
    # Clients whose address is kept are answered by way of whoever has the VIPs.
    run(f"ip -n {MEMBERS} route add 198.51.100.0/24 via 10.0.0.11")


def have_vips(node):
    for other in NODES:
        verb = "replace" if other == node else "del"
        for vip in (f"{VIP}/32", f"{SECOND}/32", f"{VIP6}/128"):
            with contextlib.suppress(RuntimeError):
                run(f"ip -n lvs-node-{other} addr {verb} {vip} dev front")
    run(f"ip -n {CLIENTS} neigh flush dev front")


def within(namespace):
    """The thread that calls this lives there from now on."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if LIBC.setns(descriptor, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def answer():
    """Members: each says its own address, and whom it sees."""
    within(MEMBERS)
    wait = selectors.DefaultSelector()
    for number in (1, 2, 3, 4):
        for family, host in ((socket.AF_INET, f"10.0.0.{number}"), (socket.AF_INET6, f"2001:db8:2::{number}")):
            one = socket.socket(family, socket.SOCK_DGRAM)
            one.bind((host, PORT))
            wait.register(one, selectors.EVENT_READ, str(number))
            other = socket.socket(family, socket.SOCK_STREAM, SCTP)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, PORT))
            other.listen(64)
            wait.register(other, selectors.EVENT_READ, f"s{number}")
    while True:
        for key, _ in wait.select():
            one, said = key.fileobj, key.data
            if said.startswith("s"):
                talk, who = one.accept()
                wait.register(talk, selectors.EVENT_READ, f"t{said[1:]} {who[0]}")
            elif said.startswith("t"):
                try:
                    data = one.recv(2048)
                except OSError:
                    data = b""
                if data:
                    one.send(f"{said[1:]} ".encode() + data)
                else:
                    wait.unregister(one)
                    one.close()
            else:
                data, who = one.recvfrom(2048)
                one.sendto(f"{said} {who[0]} ".encode() + data, who)


# A port that had a flow a moment ago would have the same one again. The kernel chooses others by itself.
_OWN_PORTS = itertools.cycle(range(20000, 32000))


def flow(source=1, vip=VIP, port=PORT, kind=socket.SOCK_DGRAM, protocol=0):
    family, net = (socket.AF_INET6, "2001:db8:1::") if ":" in vip else (socket.AF_INET, "198.51.100.")
    one = socket.socket(family, kind, protocol)
    one.settimeout(10)
    one.bind((f"{net}{100 + source}", next(_OWN_PORTS)))
    one.connect((vip, port))
    return one


def ask(one, seconds=10.0, tries=3):
    """Which member answers, and whom it sees; "refused" where nobody listens."""
    one.settimeout(seconds)
    for _ in range(tries):
        try:
            one.send(b"?")
            number, who, *_ = one.recv(2048).decode().split(" ")
        except TimeoutError:
            continue
        except ConnectionRefusedError:
            return "refused", ""
        return number, who
    return "nobody", ""


def once(count=1, **where):
    """How many new flows which member gets."""
    found = Counter()
    for _ in range(count):
        with flow(**where) as one:
            found[ask(one)[0]] += 1
    return dict(sorted(found.items()))


class Load:
    """Flows that go on, each asking every few milliseconds: who answers, and what is lost."""

    def __init__(self, count=12, pause=0.02, **where):
        self.flows = [flow(**where) for _ in range(count)]
        self.owners = [ask(one)[0] for one in self.flows]
        self.changes, self.sent, self.lost, self.refused = Counter(), 0, Counter(), 0
        self._pause, self._stop = pause, False
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self):
        within(CLIENTS)
        while not self._stop:
            for number, one in enumerate(self.flows):
                self.sent += 1
                one.settimeout(1.0)
                try:
                    one.send(b"%d" % self.sent)
                    while (said := one.recv(2048).decode().split(" "))[2:] != [str(self.sent)]:
                        pass
                    if said[0] != self.owners[number]:
                        self.changes[f"{self.owners[number]}>{said[0]}"] += 1
                        self.owners[number] = said[0]
                except TimeoutError:
                    self.lost[number] += 1
                except OSError:
                    self.refused += 1
            time.sleep(self._pause)

    def for_a_while(self, asked=200):
        goal = self.sent + asked
        eventually(lambda: self.sent >= goal, seconds=120)

    def end(self):
        self._stop = True
        self._thread.join(30)
        for one in self.flows:
            one.close()
        return {
            "sent": self.sent,
            "lost": sum(self.lost.values()),
            "of_flows": len(self.lost),
            "refused": self.refused,
            "changes": dict(self.changes),
        }


def member_id(name):
    """m1 is of IPv4, m11 of IPv6."""
    return str(uuid.UUID(int=int(name[1:])))


def member(number, version=4, weight=1, **more):
    host = ipaddress.ip_address(f"10.0.0.{number}" if version == 4 else f"2001:db8:2::{number}")
    name = member_id(f"m{number if version == 4 else 10 + number}")
    return Member(name, host, PORT, weight, more.get("backup", False), more.get("enabled", True))


def listener(members, *, port=PORT, protocol="UDP", algorithm="ROUND_ROBIN", vips=(VIP, VIP6), **more):
    return VirtualServer(
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{protocol}{port}")),
        protocol=protocol,
        port=port,
        addresses=tuple(map(ipaddress.ip_address, vips)),
        connection_limit=more.get("limit"),
        pool_id=str(uuid.uuid4()),
        algorithm=algorithm,
        persistence=more.get("persistence"),
        client_address=more.get("client", "hidden"),
        monitor=None,
        members=tuple(members),
        log_format=more.get("log_format"),
    )
