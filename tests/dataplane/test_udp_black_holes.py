# SPDX-License-Identifier: Apache-2.0
"""Clients that send continuously from one port are forwarded as soon as rules for them exist."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

import pytest
from amphora_lab import VIP, VIP6, eventually, ip
from datagrams import Clients, UdpMember, member, name_of, virtual_server

from amphora_agent.errors import VirtualServersError
from amphora_agent.l4 import model
from amphora_agent.l4_nftables import conntrack
from amphora_agent.l4_nftables.conntrack_marks import SERVER_MASK
from amphora_agent.l4_nftables.engine import NftablesEngine
from amphora_agent.network import libnftables
from amphora_agent.network.namespace import Namespace

pytestmark = pytest.mark.root
PLACES = {"b1": "198.51.100.151", "b2": "198.51.100.152"}
PLACES6 = {"b6": "2001:db8:1::151"}
ALL_MEMBERS = [member(name, address) for name, address in PLACES.items()]
OTHER, OWN_PORT, PAUSE, SOON = 5301, 5514, 0.05, 10.0


@pytest.fixture
def inner(lab):
    made = Namespace(Path(f"/proc/{lab.amphora.init()}/root/run/netns/amphora-haproxy"))
    yield made
    made.close()


@pytest.fixture
def clients(lab):
    with contextlib.ExitStack() as closing:
        for name, address in {**PLACES, **PLACES6}.items():
            wide, more = ("64", "nodad") if ":" in address else ("24", "")
            ip(f"-n {lab.network.name('mem')} addr replace {address}/{wide} dev eth0 {more}")
            closing.callback(UdpMember(lab.network.thread("mem"), name, address).close)
        yield closing.enter_context(contextlib.closing(Clients(lab.network.thread("cl"))))
    lab.amphora.push(next(lab.generations), None)


class Sender(threading.Thread):
    """Sends from one port before its flow entry expires, and receives answers."""

    def __init__(self, flow) -> None:
        super().__init__(daemon=True)
        self._flow = flow
        self._ending = threading.Event()
        self.sent, self.answered = 0, 0

    def run(self) -> None:
        while not self._ending.wait(PAUSE):
            # A refused client continues, like one that ignores answers.
            with contextlib.suppress(ConnectionRefusedError):
                self.sent += 1
                self.answered += self._flow.ask(b"again", timeout=PAUSE) is not None

    def is_answered(self) -> None:
        before = self.answered
        eventually(lambda: self.answered > before + 2, "a continuous sender is answered", seconds=SOON)

    def goes_on(self) -> None:
        before = self.sent
        eventually(lambda: self.sent > before + 5, "the client sends further datagrams")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        self.join()


def push(lab, *servers):
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=list(servers))
    assert status == 200, answer


def another(lab):
    """Push a listener, so that the agent configures the network, and return it for the test's engine."""
    made = virtual_server(*ALL_MEMBERS)
    push(lab, made)
    return model.parse([made])


@pytest.mark.parametrize(
    ("vip", "source", "members"),
    [(VIP, "198.51.100.20", PLACES), (VIP6, "2001:db8:1::20", PLACES6)],
    ids=["IPv4", "IPv6"],
)
def test_continuous_sender_reaches_a_new_listener(lab, clients, vip, source, members):
    first = virtual_server(*ALL_MEMBERS)
    other = virtual_server(*(member(*one) for one in members.items()), port=OTHER)
    with Sender(clients.flow(source, vip, OTHER, OWN_PORT)) as sender:
        sender.goes_on()
        # The first listener, a second one beside another, and one that is added again.
        push(lab, other)
        sender.is_answered()
        push(lab)
        sender.goes_on()
        push(lab, first)
        sender.goes_on()
        push(lab, first, other)
        sender.is_answered()
        push(lab, first)
        sender.goes_on()
        push(lab, first, other)
        sender.is_answered()


def test_only_flows_without_a_rule_end(lab, inner, clients):
    push(lab, virtual_server(*ALL_MEMBERS))
    led = clients.flow()
    assert led.ask()
    strays = [clients.flow(port=port) for port in (OTHER, OTHER + 1)]
    for stray in strays:
        with contextlib.suppress(ConnectionRefusedError):
            stray.ask(timeout=0.1)
    before = inner.run(conntrack.count_flows, 0xFFFFFFFF)
    vip = model.parse([virtual_server()])[0].addresses[0]
    inner.run(conntrack.end_unmarked_flows, {(vip, 17, 5300), (vip, 17, OTHER), (vip, 132, OTHER + 1)})
    after = inner.run(conntrack.count_flows, 0xFFFFFFFF)
    assert before.pop(0) == after.pop(0, 0) + 1, "one of the two flows without a rule ends"
    assert before == after, "flows with a rule continue"


def test_member_change_survives_deleted_rules(lab, inner, clients):
    servers, engine = another(lab), NftablesEngine()
    gone = {(servers[0].id, name_of("member", "b1")): False}
    inner.run(engine.apply, servers, {})
    flow = next(one for one in clients.flows(2) if one.ask().member == "b1")
    for taken in ("flush ruleset\n", "delete table inet amphora_virtual\n"):
        inner.run(libnftables.run_commands, taken)
        found = inner.run(engine.find_drift, servers, gone)
        assert len(found) == 2, f"expected a changed member and missing rules: {found}"
        inner.run(engine.apply, servers, {})
        inner.run(libnftables.run_commands, taken)
        inner.run(engine.apply, servers, gone)
        assert inner.run(engine.find_drift, servers, gone) == []
        assert flow.ask().member == "b2"
        inner.run(engine.apply, servers, {})
    # With a flushed chain, the kernel accepts the change: the engine must find the damage itself.
    inner.run(libnftables.run_commands, "flush chain inet amphora_virtual arriving\n")
    inner.run(engine.apply, servers, gone)
    assert clients.flow().ask().member == "b2"


def test_a_change_that_the_kernel_refuses_is_written_anew(lab, inner, clients, monkeypatch):
    """The engine writes all rules after a refused change, because the rules can change after its check."""
    servers, engine = another(lab), NftablesEngine()
    inner.run(engine.apply, servers, {})
    inner.run(libnftables.run_commands, "flush ruleset\n")
    monkeypatch.setattr(engine, "_is_unchanged", lambda: True)
    inner.run(engine.apply, servers, {(servers[0].id, name_of("member", "b1")): False})
    assert clients.flow().ask().member == "b2"


def test_a_failed_flush_is_repeated(lab, inner, clients, monkeypatch):
    servers, engine = another(lab), NftablesEngine()
    gone = {(servers[0].id, name_of("member", "b1")): False}
    inner.run(engine.apply, servers, {})
    some = clients.flows(4)
    assert {flow.ask().member for flow in some} == {"b1", "b2"}
    fails_once(monkeypatch, conntrack, "end_flows")
    with pytest.raises(VirtualServersError):
        inner.run(engine.apply, servers, gone)
    assert inner.run(engine.find_drift, servers, gone) != []
    inner.run(engine.apply, servers, gone)
    assert {flow.ask().member for flow in some} == {"b2"}
    assert inner.run(engine.find_drift, servers, gone) == []
    fails_once(monkeypatch, engine, "_record_structure")
    with pytest.raises(VirtualServersError):
        inner.run(engine.apply, servers, {(servers[0].id, name_of("member", "b2")): False})
    inner.run(engine.apply, servers, {(servers[0].id, name_of("member", "b2")): False})
    assert {flow.ask().member for flow in some} == {"b1"}
    fails_once(monkeypatch, conntrack, "end_flows")
    with pytest.raises(VirtualServersError):
        inner.run(engine.release)
    inner.run(engine.release)
    assert not {mark for mark in inner.run(conntrack.count_flows, 0xFFFFFFFF) if mark & SERVER_MASK}


def fails_once(monkeypatch, where, name):
    real = getattr(where, name)

    def once(*given):
        monkeypatch.setattr(where, name, real)
        raise VirtualServersError("try", f"error {errno.ENOBUFS}")

    monkeypatch.setattr(where, name, once)
