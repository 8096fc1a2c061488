# SPDX-License-Identifier: Apache-2.0
"""Checked members and a checker process, each in its own namespace.

Invariant: every namespace is named after this process and is removed when `CheckedNetwork.close` returns.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from uuid import UUID

from amphora_lab import eventually, ip

from amphora_agent.l4.model import Member, Monitor, VirtualServer, to_document
from amphora_agent.l4_checks import sctp_packet
from amphora_agent.network.namespace import Namespace

ROOT = Path(__file__).parents[2]
POOL, SERVER, MONITOR = (str(UUID(int=number)) for number in (1, 2, 3))
FAKE, REAL = Path(__file__).with_name("checker_program.py"), ROOT / "amphora_agent/l4_daemon/__main__.py"
US, US6 = "192.0.2.1", "2001:db8:9::1"
PORT = 5300


def address(number, version=4):
    return f"192.0.2.{100 + number}" if version == 4 else f"2001:db8:9::{100 + number}"


def member(number, version=4, port=PORT, **changes):
    known = {"weight": 1, "backup": False, "enabled": True, "check_address": None, "check_port": None, **changes}
    return Member(str(UUID(int=1000 * version + number)), ip_address(address(number, version)), port, **known)


def monitor(kind, interval=1, timeout=1, rise=1, fall=1, **http):
    known = {"method": "GET", "path": "/", "codes": ("200",), "version": "1.0"} if kind == "HTTP" else {}
    return Monitor(MONITOR, kind, interval, timeout, rise, fall, **{**known, **http})


def server(*members, checked=None, protocol="UDP", vips=("198.51.100.5", "2001:db8:1::5")):
    addresses = tuple(map(ip_address, vips))
    return VirtualServer(
        SERVER, protocol, 53, addresses, None, POOL, "SOURCE_IP_PORT", None, "hidden", checked, members
    )


class CheckedNetwork:
    """Two namespaces with a veth pair: the amphora's inner one, and the members'."""

    def __init__(self, prefix, addresses=8):
        self._names = [f"{prefix}-{short}" for short in ("inner", "members")]
        self._threads = {}
        for name in self._names:
            ip(f"netns add {name}", f"-n {name} link set lo up")
        inner, members = self._names
        ip(f"-n {inner} link add eth0 type veth peer name eth0 netns {members}")
        for name, own in ((inner, ((US, US6))), (members, (address(0), address(0, 6)))):
            ip(f"-n {name} link set eth0 up", f"-n {name} addr add {own[0]}/24 dev eth0")
            ip(f"-n {name} addr add {own[1]}/64 dev eth0 nodad")
        batch = "".join(
            f"addr add {address(number, version)}/{length} dev eth0{extra}\n"
            for number in range(1, addresses)
            for version, length, extra in ((4, 24, ""), (6, 64, " nodad"))
        )
        subprocess.run(["ip", "-n", members, "-batch", "-"], input=batch, text=True, check=True)

    @property
    def inner(self):
        return self._names[0]

    @property
    def members(self):
        return self._names[1]

    def connect_client(self, vip):
        """Add a client's namespace on the side of the VIP; the amphora forwards between the networks."""
        self._names.append(self.inner.replace("-inner", "-client"))
        ip(f"netns add {self.client}", f"-n {self.client} link set lo up")
        ip(f"-n {self.inner} link add vip type veth peer name eth0 netns {self.client}")
        ip(f"-n {self.inner} link set vip up", f"-n {self.inner} addr add {vip}/24 dev vip")
        ip(f"-n {self.client} link set eth0 up", f"-n {self.client} addr add {vip.rpartition('.')[0]}.20/24 dev eth0")
        self.run(self.inner, "sysctl", "-qw", "net.ipv4.ip_forward=1")

    @property
    def client(self):
        return self._names[2]

    def within(self, name, function, *arguments):
        if name not in self._threads:
            self._threads[name] = Namespace(Path("/run/netns") / name)
        return self._threads[name].run(function, *arguments)

    def run(self, name, *words):
        subprocess.run(["ip", "netns", "exec", name, *words], check=True, capture_output=True)

    def close(self):
        for thread in self._threads.values():
            thread.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Listening:
    """A member's program: a thread that answers packets or connections."""

    def __init__(self, place, open_socket, answer):
        self._sockets = [place.within(place.members, open_socket)]
        self._answer = answer
        self.heard = 0
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        one = self._sockets[0]
        one.settimeout(0.05)
        while not self._ending:
            with suppress(TimeoutError):
                try:
                    self._answer(one)
                    self.heard += 1
                except TimeoutError:
                    raise
                except OSError:
                    continue

    def close(self):
        self._ending = True
        self._thread.join()
        self._sockets[0].close()


def family(where):
    return socket.AF_INET6 if ":" in where else socket.AF_INET


def udp(place, where, port=PORT, reply=None):
    def open_socket():
        one = socket.socket(family(where), socket.SOCK_DGRAM)
        one.bind((where, port))
        return one

    def answer(one):
        data, sender = one.recvfrom(2048)
        if reply is not None:
            one.sendto(reply or data, sender)

    return Listening(place, open_socket, answer)


def tcp(place, where, port=PORT, say=None):
    """Start a server that calls ``say`` with one connection after the other."""

    def open_socket():
        return socket.create_server((where, port), family=family(where), backlog=256)

    def answer(one):
        connection, _ = one.accept()
        with connection:
            connection.settimeout(2.0)
            if say is not None:
                say(connection)

    return Listening(place, open_socket, answer)


def says(text):
    """Return a handler that reads an HTTP request and sends this text."""

    def say(connection):
        received = b""
        while b"\r\n\r\n" not in received:
            data = connection.recv(4096)
            if not data:
                return
            received += data
        connection.sendall(text)

    return say


def sctp(place, where, port=PORT, kind=sctp_packet.INIT_ACK):
    """Simulate a kernel with SCTP that accepts or refuses, because this machine's kernel has none."""
    seen = []

    def open_socket():
        one = socket.socket(family(where), socket.SOCK_RAW, socket.IPPROTO_SCTP)
        one.bind((where, 0))
        return one

    def answer(one):
        data, sender = one.recvfrom(2048)
        start = 4 * (data[0] & 15) if one.family == socket.AF_INET else 0
        packet = sctp_packet.parse(data[start:])
        bare = data[start : start + 8] + bytes(4) + data[start + 12 :]
        assert struct.unpack_from("<I", data, start + 8)[0] == sctp_packet.crc32c(bare)
        seen.append(packet)
        if packet is not None and packet.kind == sctp_packet.INIT and packet.destination == port:
            reply = sctp_packet.init(port, packet.source, 0xABCD)
            chunk = bytes((kind,)) + reply[13:] if kind == sctp_packet.INIT_ACK else b"\x06\0\0\x04"
            one.sendto(sctp_packet._packed(port, packet.source, packet.initiate, chunk), (sender[0], 0))

    listening = Listening(place, open_socket, answer)
    listening.seen = seen
    return listening


class Process:
    """A checker process; by default its engine only records the calls."""

    def __init__(self, place, directory, script=FAKE):
        self.place = place
        self.directory = directory
        self.log = directory / "log"
        self._script = script
        self.process = None
        self.digest = 0

    def start(self):
        command = ["ip", "netns", "exec", self.place.inner, sys.executable, "-I", "-S"]
        words = [str(self._script), str(self.directory), str(self.directory / "checker.sock")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *words], stdout=log, stderr=log)
        eventually(self.answers, "the checker answers")

    @property
    def pid(self):
        return self.process.pid

    def answers(self):
        with suppress(OSError, ValueError):
            return self.ask(op="version")["version"]
        return None

    def ask(self, **question):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.directory / "checker.sock"))
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as lines:
                return json.loads(lines.readline())

    def serve(self, *servers):
        self.digest += 1
        said = self.ask(op="serve", digest=str(self.digest), paired=False, servers=to_document(servers))
        assert not said.get("error"), said
        return said or self.state()

    def state(self):
        return self.ask(op="state")

    def members(self):
        return self.state()["servers"][SERVER]["pool"]["members"]

    def words(self):
        return [one["status"] for one in self.members().values()]

    def become(self, *words, seconds=30.0):
        eventually(lambda: self.words() == list(words), f"{words}", seconds)

    def told(self):
        """Return the recorded calls of the engine, with their times."""
        file = self.directory / "engine.log"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        self.process.wait()

    def cpu(self):
        """Return the used processor time in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pss(self):
        """Return the proportional set size in MiB."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
