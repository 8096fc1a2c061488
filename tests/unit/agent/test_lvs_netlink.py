# SPDX-License-Identifier: Apache-2.0
"""IPVS over generic netlink: messages as the kernel writes them, and what is made of them."""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address

import pytest

from amphora_agent.l4.model import Member, Persistence, VirtualServer
from amphora_agent.l4_ipvs import engine as engine_module
from amphora_agent.l4_ipvs import netlink
from amphora_agent.l4_ipvs.engine import LvsEngine
from amphora_agent.l4_ipvs.netlink import Destination, Service

VIP, HOST = ip_address("198.51.100.5"), ip_address("10.0.0.1")
LISTENER, MEMBER = "00000000-0000-0000-0000-000000000063", "00000000-0000-0000-0000-000000000001"
NESTED = 0x8000


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def counted(connections: int, received: int, sent: int) -> bytes:
    pairs = ((1, connections), (2, 9), (3, 8), (4, received), (5, sent), (6, 0))
    return b"".join(attribute(kind, struct.pack("=Q", value)) for kind, value in pairs)


SERVICE = b"".join(
    (
        attribute(1, struct.pack("=H", socket.AF_INET)),
        attribute(2, struct.pack("=H", socket.IPPROTO_UDP)),
        attribute(3, VIP.packed + b"\0" * 12),
        attribute(4, struct.pack("!H", 53)),
        attribute(6, b"wrr\0"),
        attribute(7, struct.pack("=II", 1, 0xFFFFFFFF)),
        attribute(8, struct.pack("=I", 360)),
        attribute(9, struct.pack("=I", 0xFFFFFFFF)),
        attribute(12 | NESTED, counted(51, 1899, 2500)),
    )
)
DESTINATION = b"".join(
    (
        attribute(1, HOST.packed + b"\0" * 12),
        attribute(2, struct.pack("!H", 5353)),
        attribute(3, struct.pack("=I", 0)),
        attribute(4, struct.pack("=I", 7)),
        attribute(7, struct.pack("=I", 3)),
        attribute(8, struct.pack("=I", 4)),
        attribute(12 | NESTED, counted(51, 1, 2)),
    )
)


class Kernel:
    """Answers on a socket as the kernel does, also in two parts."""

    def __init__(self, has: bool = True) -> None:
        self.has, self.answers = has, []

    def __call__(self, *_: object) -> Kernel:
        return self

    def settimeout(self, _: float) -> None: ...
    def bind(self, _: object) -> None: ...
    def close(self) -> None: ...

    def send(self, data: bytes) -> None:
        _, kind, _, number, _ = struct.unpack_from("=IHHII", data)
        command = data[16]

        def message(kind: int, body: bytes) -> bytes:
            return struct.pack("=IHHII", 16 + len(body), kind, 0, number, 0) + body

        done = message(3, struct.pack("=i", 0))
        if kind == 16 and not self.has:
            self.answers = [message(2, struct.pack("=i", -2))]
        elif kind == 16:
            body = struct.pack("=BBH", 1, 2, 0) + attribute(2, b"IPVS\0") + attribute(1, struct.pack("=H", 31))
            self.answers = [message(31 - 15, body) + message(2, struct.pack("=i", 0))]
        else:
            assert kind == 31
            body = attribute(1 | NESTED, SERVICE) if command == 4 else attribute(2 | NESTED, DESTINATION)
            self.answers = [message(31, struct.pack("=BBH", 1, 1, 0) + body), done]

    def recv(self, _: int) -> bytes:
        return self.answers.pop(0)


@pytest.fixture
def kernel(monkeypatch):
    """The one that is asked."""
    found = Kernel()
    monkeypatch.setattr(netlink.socket, "socket", found)
    return found


def test_what_the_kernel_says_is_read(kernel):
    assert netlink.available()
    assert netlink.services() == (
        Service("UDP", VIP, 53, "wrr", 1, 360, 51, 1899, 2500, (Destination(HOST, 5353, 7, 3, 4, 51, 1, 2),)),
    )


def test_a_kernel_without_it_has_none(kernel):
    kernel.has = False
    assert not netlink.available()
    with pytest.raises(netlink.NoIpvsError, match="No such file"):
        netlink.services()


# -- what the engine makes of it --------------------------------------------------------------------------------------


def listener(**more) -> VirtualServer:
    given = {"algorithm": "ROUND_ROBIN", "persistence": None, "addresses": (VIP,), "weight": 7, **more}
    return VirtualServer(
        LISTENER,
        "UDP",
        53,
        given["addresses"],
        None,
        None,
        given["algorithm"],
        given["persistence"],
        "hidden",
        None,
        (Member(MEMBER, HOST, 5353, given["weight"], backup=False, enabled=True),),
    )


def service(connections: int, *, vip=VIP, weight: int = 7) -> Service:
    members = (Destination(HOST, 5353, weight, 3, 4, 1, 0, 0),)
    return Service("UDP", vip, 53, "wrr", 0, 0, connections, connections * 10, connections * 20, members)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """One that has no kernel: `engine.there` is what IPVS has."""
    made = LvsEngine(str(tmp_path))
    made.there = ()
    monkeypatch.setattr(engine_module.ipvs, "services", lambda: made.there)
    monkeypatch.setattr(engine_module, "_SETTLE_SECONDS", 0)
    monkeypatch.setattr(engine_module, "_set", lambda: None)
    monkeypatch.setattr(engine_module.libnftables, "run", lambda *_: "")
    monkeypatch.setattr(engine_module.libnftables, "exists", lambda *_: True)
    return made


def test_sums_do_not_fall_when_a_service_is_made_anew(engine, tmp_path):
    second = ip_address("198.51.100.6")
    engine.bring_about([listener(addresses=(VIP, second))], {})
    for there, total in (
        ((service(10), service(5, vip=second)), 15),
        ((service(2), service(6, vip=second)), 18),
        ((service(3),), 19),
        ((), 19),
        ((service(1),), 20),
    ):
        engine.there = there
        counters = engine.counters()[LISTENER]
        assert (counters.total_connections, counters.bytes_in, counters.bytes_out) == (total, total * 10, total * 20)
    after = LvsEngine(str(tmp_path))
    after.bring_about([listener()], {})
    assert after.counters()[LISTENER].total_connections == 20


def test_of_udp_every_flow_counts_that_has_not_ended(engine):
    engine.bring_about([listener()], {})
    engine.there = (service(1),)
    assert engine.counters()[LISTENER].active_connections == 7


@pytest.mark.parametrize(
    ("wanted", "there", "said"),
    [
        (listener(), (service(1),), []),
        (listener(), (), ["is not in IPVS"]),
        (listener(weight=2), (service(1),), ["other members"]),
        (listener(algorithm="SOURCE_IP"), (service(1),), ["scheduled otherwise"]),
        (listener(persistence=Persistence(5, 32, 128)), (service(1),), ["scheduled otherwise"]),
        (listener(), (service(1), service(1, vip=HOST)), ["nobody wants"]),
    ],
)
def test_what_ipvs_has_otherwise_is_said(engine, wanted, there, said):
    engine.bring_about([wanted], {})
    engine.there = there
    found = engine.differs([wanted], {})
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found, strict=True))


def test_a_state_is_a_file_that_appears_at_once(engine, tmp_path):
    def said(what: str) -> str:
        return (tmp_path / "lvs" / f"{LISTENER}.{MEMBER}.{what}").read_text()

    engine.there = (service(1),)
    engine.bring_about([listener()], {})
    assert (said("down"), said("weight")) == ("0\n", "6\n")
    engine.bring_about([listener()], {(LISTENER, MEMBER): False})
    assert (said("down"), said("weight")) == ("1\n", "-1\n")
    (tmp_path / "lvs" / f"{LISTENER}.{MEMBER}.down").write_text("0\n")
    engine.there = (Service("UDP", VIP, 53, "wrr", 0, 0, 0, 0, 0, ()),)
    assert engine.differs([listener()], {(LISTENER, MEMBER): False}) == [
        "the files that keepalived watches are not as wanted"
    ]
    engine.bring_about([], {})
    assert said("down") == "1\n"
    engine.release()
    assert not list((tmp_path / "lvs").iterdir())
