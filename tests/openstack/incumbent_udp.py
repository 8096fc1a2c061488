# SPDX-License-Identifier: Apache-2.0
"""A stand-in for IPVS in an amphora of Octavia's own provider: it forwards datagrams in user space.

    incumbent_udp.py serve -f CONFIGURATION -p PID-FILE -c CHECKER-PID-FILE ...
    incumbent_udp.py table | list | counters

keepalived needs IPVS in the kernel for UDP, and many test machines have a kernel without it. `serve` replaces the
keepalived process of a UDP listener (`incumbent_guest.py`). It gets the arguments of the agent's unit, and reads the
file that Octavia's agent has written. The other commands print `/proc/net/ip_vs`, `ipvsadm -Ln` and `ipvsadm -Ln
--stats` for the heartbeats of the agent. Agent, templates, worker and database are those of the package `octavia`.

Unlike keepalived with IPVS, it checks no member: each is up. Persistence and connection limits have no effect. Only the
standard library: this runs as a guest.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import time
import zlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

STATES = Path("/run/udp")
_LOG = "/var/log/octavia-udp.log"
_LARGEST = 65535
# Seconds of silence after which a flow ends. Each flow needs a file.
_FLOW_SECONDS = 10.0
_STATE_SECONDS = 1.0
# linux/in.h and linux/in6.h: the standby of a pair binds VIPs that it does not have.
_FREEBIND = {socket.AF_INET: (socket.IPPROTO_IP, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}
_HEAD = "IP Virtual Server version 1.2.1 (size=4096)\n"


class Member:
    """A member: `real_server` of the configuration."""

    def __init__(self, address, port):
        self.address, self.port, self.weight = address, port, 1
        self.flows = 0
        # For weighted round robin.
        self.turn = 0


class Service:
    """The VIPs of one family with their members: `virtual_server` of the configuration."""

    def __init__(self, vips):
        self.vips, self.members, self.algorithm = vips, [], "wrr"

    def choose(self, client):
        """Select the member of a new flow; None without a member."""
        usable = [one for one in self.members if one.weight > 0]
        if not usable:
            return None
        if self.algorithm == "lc":
            return min(usable, key=lambda one: one.flows)
        if self.algorithm == "sh":
            return usable[zlib.crc32(client.encode()) % len(usable)]
        for one in usable:
            one.turn += one.weight
        chosen = max(usable, key=lambda one: one.turn)
        chosen.turn -= sum(one.weight for one in usable)
        return chosen


def read_services(text):
    """Return the services in a configuration of the agent."""
    groups, services, vips = {}, [], None
    for line in text.splitlines():
        match line.split():
            case ["virtual_server_group", name, "{"]:
                vips = groups.setdefault(name, [])
            case ["virtual_server", "group", name, "{"]:
                services.append(Service(groups[name]))
            case ["lb_algo", name]:
                services[-1].algorithm = name
            case ["real_server", address, port, "{"]:
                services[-1].members.append(Member(address, int(port)))
            case ["weight", number]:
                services[-1].members[-1].weight = int(number)
            case ["}"]:
                vips = None
            case [address, port] if vips is not None:
                vips.append((address, int(port)))
    return services


class Vip:
    """The socket of a VIP, with the flows of its clients. A flow is a socket to a member."""

    def __init__(self, service, place, selector):
        self.service, self.place = service, place
        self._selector = selector
        # The keys are addresses of clients. The values are a member, a socket, and the time of the last datagram.
        self._flows = OrderedDict()
        self.counters = dict.fromkeys(("flows", "in", "out", "bytes in", "bytes out"), 0)
        family = _family(place[0])
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setsockopt(*_FREEBIND[family], 1)
        self._socket.setblocking(False)
        self._socket.bind(place)
        selector.register(self._socket, selectors.EVENT_READ, self._take)

    def _take(self):
        """Forward the datagrams of clients."""
        with suppress(BlockingIOError):
            while True:
                data, client = self._socket.recvfrom(_LARGEST)
                self._count("in", data)
                # The member has no route, or an earlier datagram was refused.
                with suppress(OSError):
                    self._send(data, client)

    def _send(self, data, client):
        found = self._flows.pop(client, None)
        if found is None:
            member = self.service.choose(client[0])
            if member is None:
                return
            made = socket.socket(_family(member.address), socket.SOCK_DGRAM)
            made.setblocking(False)
            made.connect((member.address, member.port))
            self._selector.register(made, selectors.EVENT_READ, lambda: self._answer(made, client))
            member.flows += 1
            self.counters["flows"] += 1
            found = member, made, 0.0
        member, flow, _ = found
        self._flows[client] = member, flow, time.monotonic()
        flow.send(data)

    def _answer(self, flow, client):
        """Forward the answers of a member. An ICMP error of the member, or of the client, is ignored."""
        with suppress(OSError):
            while True:
                data = flow.recv(_LARGEST)
                self._count("out", data)
                self._socket.sendto(data, client)

    def _count(self, way, data):
        self.counters[way] += 1
        self.counters[f"bytes {way}"] += len(data)

    def end_silent_flows(self):
        now = time.monotonic()
        while self._flows:
            client, (member, flow, last) = next(iter(self._flows.items()))
            if last > now - _FLOW_SECONDS:
                return
            del self._flows[client]
            self._selector.unregister(flow)
            flow.close()
            member.flows -= 1

    def state(self):
        """What the commands print."""
        members = [(one.address, one.port, one.weight, one.flows) for one in self.service.members]
        return {"vip": self.place, "algorithm": self.service.algorithm, "members": members, **self.counters}


def serve(argv):
    """Serve the listener of a configuration in the background."""
    options = dict(itertools.pairwise(argv))
    configuration = Path(options["-f"])
    selector = selectors.DefaultSelector()
    services = read_services(configuration.read_text())
    vips = [Vip(service, place, selector) for service in services for place in service.vips]
    if os.fork():
        return
    os.setsid()
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, place in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(place, descriptor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    STATES.mkdir(exist_ok=True)
    state = STATES / f"{configuration.stem}.json"
    # The agent reads the file of the checker's process id, too. The main file is the last, because it means readiness.
    files = [Path(options[word]) for word in ("-c", "-p")]
    try:
        _write_state(state, vips)
        for path in files:
            path.write_text(f"{os.getpid()}\n")
        _forward(selector, vips, state)
    finally:
        for path in (*files, state):
            path.unlink(missing_ok=True)


def _forward(selector, vips, state):
    due = time.monotonic() + _STATE_SECONDS
    while True:
        for key, _ in selector.select(_STATE_SECONDS):
            key.data()
        if time.monotonic() >= due:
            for one in vips:
                one.end_silent_flows()
            _write_state(state, vips)
            due = time.monotonic() + _STATE_SECONDS


def _write_state(path, vips):
    new = path.with_suffix(".new")
    new.write_text(json.dumps([one.state() for one in vips]))
    new.replace(path)


def describe(kind):
    """Return what `/proc/net/ip_vs` (table) or ipvsadm (list, counters) would contain for all listeners."""
    vips = []
    for path in sorted(STATES.glob("*.json")):
        # The process of a listener may have ended.
        with suppress(FileNotFoundError):
            vips += json.loads(path.read_text())
    if kind == "counters":
        lines = ["Prot LocalAddress:Port Conns InPkts OutPkts InBytes OutBytes", "  -> RemoteAddress:Port"]
        for one in vips:
            numbers = " ".join(str(one[name]) for name in ("flows", "in", "out", "bytes in", "bytes out"))
            lines.append(f"UDP  {_name(*one['vip'])} {numbers}")
    else:
        write = _hexadecimal if kind == "table" else _name
        lines = [
            "Prot LocalAddress:Port Scheduler Flags",
            "  -> RemoteAddress:Port Forward Weight ActiveConn InActConn",
        ]
        for one in vips:
            lines.append(f"UDP  {write(*one['vip'])} {one['algorithm']}")
            lines += [f"  -> {write(*place)} Masq {weight} {flows} 0" for *place, weight, flows in one["members"]]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def _family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _name(address, port):
    return f"[{ipaddress.ip_address(address).compressed}]:{port}" if ":" in address else f"{address}:{port}"


def _hexadecimal(address, port):
    found = ipaddress.ip_address(address)
    return f"[{found.exploded}]:{port:04X}" if found.version == 6 else f"{int(found):08X}:{port:04X}"


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        sys.stdout.write(describe(sys.argv[1]))
