# SPDX-License-Identifier: Apache-2.0
"""Members and clients of UDP listeners, and the virtual servers between them.

Invariant: a real agent receives every push over the wire; every socket is closed with its owner. A member's answer
contains its name, the client's address and the data.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass

from amphora_lab import VIP, VIP6, Namespace

PORT, MEMBER_PORT = 5300, 5353
_SILENCE = 0.05
LARGEST = 65535
# Ports of clients, below the kernel's own choice. The kernel reuses ports while the flows of earlier tests still exist,
# and a datagram of an existing flow goes to the member of that flow.
_CLIENT_PORTS = itertools.cycle(range(10000, 32768))


def name_of(*words: object) -> str:
    """Return the id for these words."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, words))))


def member(name: str, address: str, port: int = MEMBER_PORT, **more):
    found = {"id": name_of("member", name), "address": address, "port": port, "weight": 1, "backup": False}
    return {**found, "enabled": True, "check_address": None, "check_port": None, **more}


def virtual_server(*members, port: int = PORT, addresses=(VIP, VIP6), **more):
    made = {
        "id": name_of("listener", port, more.get("protocol", "UDP")),
        "protocol": "UDP",
        "port": port,
        "addresses": list(addresses),
        "connection_limit": None,
        "pool_id": name_of("pool", port),
        "algorithm": "ROUND_ROBIN",
        "persistence": None,
        "client_address": "hidden",
        "monitor": None,
        "members": list(members),
    }
    return {**made, **more}


def persistence(prefix_v4: int = 32, prefix_v6: int = 128):
    return {"timeout": 360, "prefix_v4": prefix_v4, "prefix_v6": prefix_v6}


class UdpMember:
    """A member that answers each datagram with its name, the sender's address, and the datagram."""

    def __init__(self, place: Namespace, name: str, address: str, port: int = MEMBER_PORT, *, mute: bool = False):
        self.name, self.address, self.port = name, address, port
        self.datagrams = 0
        self._mute = mute
        self._ending = False
        self._socket = place.run(_opened, address, port)
        self._socket.settimeout(_SILENCE)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while not self._ending:
            with contextlib.suppress(TimeoutError, OSError):
                said, sender = self._socket.recvfrom(LARGEST)
                self.datagrams += 1
                if not self._mute:
                    self._socket.sendto(f"{self.name} {sender[0]} {sender[1]} ".encode() + said, sender)

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._socket.close()


def _opened(address: str, port: int, *, to: tuple[str, int] | None = None) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)
    opened.bind((address, port))
    if to is not None:
        opened.connect(to)
    return opened


@dataclass(frozen=True)
class Answer:
    """The answering member, and its view of the client."""

    member: str
    seen: str
    port: int
    said: bytes


class Flow:
    """One client's socket with fixed ports: a flow."""

    def __init__(self, place: Namespace, source: str, vip: str = VIP, port: int = PORT, own_port: int = 0) -> None:
        self._socket = place.run(_opened, source, own_port or next(_CLIENT_PORTS), to=(vip, port))

    def ask(self, said: bytes = b"?", timeout: float = 2.0) -> Answer | None:
        """Send one datagram and return its answer, or None.

        Raises:
            ConnectionRefusedError: no member is available.
        """
        self._socket.settimeout(timeout)
        try:
            self._socket.send(said)
            name, seen, port, rest = self._socket.recv(LARGEST).split(b" ", 3)
        except TimeoutError:
            return None
        return Answer(name.decode(), seen.decode(), int(port), rest)

    def refused(self) -> bool:
        """Return whether the kernel refuses the client. It sends at most one refusal a second."""
        for _ in range(4):
            try:
                if self.ask(timeout=0.6) is not None:
                    return False
            except ConnectionRefusedError:
                return True
        return False

    def close(self) -> None:
        self._socket.close()


class Clients:
    """A client's flows; `close` closes all of them."""

    def __init__(self, place: Namespace) -> None:
        self._place = place
        self._closing = contextlib.ExitStack()

    def flow(self, source: str = "198.51.100.20", vip: str | None = None, port: int = PORT, own_port: int = 0) -> Flow:
        made = Flow(self._place, source, vip or (VIP6 if ":" in source else VIP), port, own_port)
        self._closing.callback(made.close)
        return made

    def flows(self, count: int, source: str = "198.51.100.20", **more) -> list[Flow]:
        return [self.flow(source, **more) for _ in range(count)]

    def close(self) -> None:
        self._closing.close()


def members_of(flows) -> Counter[str]:
    """Return the number of flows by answering member."""
    return Counter(answer.member if (answer := flow.ask()) else "no answer" for flow in flows)


class Stream(threading.Thread):
    """Sends datagrams on each flow in turn until the end, and counts unanswered ones as lost."""

    def __init__(self, flows, pause: float = 0.0005) -> None:
        super().__init__(daemon=True)
        self._flows, self._pause = flows, pause
        self._ending = threading.Event()
        self.asked, self.lost = 0, 0
        self.members: list[set[str]] = [set() for _ in flows]

    def run(self) -> None:
        while not self._ending.is_set():
            for flow, members in zip(self._flows, self.members, strict=True):
                self.asked += 1
                try:
                    answer = flow.ask(timeout=3.0)
                except ConnectionRefusedError:
                    answer = None
                if answer is None:
                    self.lost += 1
                else:
                    members.add(answer.member)
                time.sleep(self._pause)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        self.join()
