# SPDX-License-Identifier: Apache-2.0
"""The nftables engine in a real kernel: state after a restart, counters, and ended flows."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from pathlib import Path

import pytest
from amphora_lab import eventually, ip
from datagrams import Clients, UdpMember, member, members_of, virtual_server

from amphora_agent.l4 import model
from amphora_agent.l4_nftables import conntrack
from amphora_agent.l4_nftables.conntrack_marks import SERVER_MASK
from amphora_agent.l4_nftables.engine import NftablesEngine
from amphora_agent.network import firewall, libnftables, nft_apply
from amphora_agent.network.firewall import Port, Restrictions
from amphora_agent.network.namespace import Namespace

pytestmark = pytest.mark.root
PLACES = {f"e{number}": f"198.51.100.{130 + number}" for number in range(12)}
ALL_MEMBERS = [member(name, address) for name, address in PLACES.items()]


@pytest.fixture
def inner(lab):
    """Return the amphora's namespace, in which the test's engine follows the checker's."""
    made = Namespace(Path(f"/proc/{lab.amphora.init()}/root/run/netns/amphora-haproxy"))
    yield made
    made.close()


@pytest.fixture
def clients(lab):
    with contextlib.ExitStack() as closing:
        for name, address in PLACES.items():
            ip(f"-n {lab.network.name('mem')} addr replace {address}/24 dev eth0")
            closing.callback(UdpMember(lab.network.thread("mem"), name, address).close)
        yield closing.enter_context(contextlib.closing(Clients(lab.network.thread("cl"))))
    lab.amphora.push(next(lab.generations), None)


def push(lab, *servers):
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=list(servers))
    assert status == 200, answer


def test_restarted_checker_keeps_counters_and_flows(lab, inner, clients):
    push(lab, virtual_server(*ALL_MEMBERS))
    some = clients.flows(len(ALL_MEMBERS))
    before = [flow.ask().member for flow in some]
    assert {*before} == {*PLACES}
    engine = NftablesEngine()
    # Another order and one member less: the mark of a flow must not name another member.
    fewer = [virtual_server(*ALL_MEMBERS[:0:-1])]
    inner.run(engine.apply, model.parse(fewer), {})
    after = [flow.ask().member for flow in some]
    assert [a for a, b in zip(after, before, strict=True) if b != "e0"] == [b for b in before if b != "e0"]
    (counted,) = inner.run(engine.counters).values()
    assert counted.total_connections == len(some) + 1, "one flow has moved to another member"
    assert inner.run(engine.find_drift, model.parse(fewer), {}) == []
    assert inner.run(NftablesEngine().find_drift, model.parse(fewer), {}) != []


def test_counters_equal_the_traffic_of_clients(lab, inner, clients):
    push(lab, virtual_server(ALL_MEMBERS[0]))
    (flow,) = clients.flows(1)
    said = b"x" * 1000
    answer = flow.ask(said)
    heads = 20 + 8  # RFC 791, RFC 768
    got = len(f"e0 {answer.seen} {answer.port} ".encode()) + len(said)
    engine = NftablesEngine()
    (counted,) = inner.run(engine.counters).values()
    assert (counted.bytes_in, counted.bytes_out) == (heads + len(said), heads + got)
    assert (counted.total_connections, counted.request_errors) == (1, 0)
    push(lab, virtual_server())
    assert flow.refused()
    (counted,) = inner.run(engine.counters).values()
    assert counted.request_errors >= 1
    assert counted.total_connections == 1, "counters keep their values"


@pytest.mark.parametrize("ended", [1, 11])
def test_flows_end_by_their_marks(lab, inner, clients, ended):
    """The kernel searches few marks and the agent many, with the same result."""
    push(lab, virtual_server(*ALL_MEMBERS))
    some = clients.flows(24)
    assert members_of(some) == dict.fromkeys(PLACES, 2)
    found = inner.run(conntrack.count_flows, 0xFFFFFFFF)
    gone = sorted(mark for mark in found if mark & SERVER_MASK)[:ended]
    inner.run(conntrack.end_flows, gone)
    left = inner.run(conntrack.count_flows, 0xFFFFFFFF)
    assert not {*gone} & {*left}
    assert {mark: found[mark] for mark in left if mark} == {mark: left[mark] for mark in left if mark}
    assert inner.run(conntrack.count_flows, SERVER_MASK).get(gone[0] & SERVER_MASK) == 24 - 2 * ended


def test_removal_of_the_last_listener_removes_rules_and_flows(lab, inner, clients):
    push(lab, virtual_server(*ALL_MEMBERS))
    some = clients.flows(3)
    assert sum(members_of(some).values()) == 3
    push(lab)
    assert not {mark for mark in inner.run(conntrack.count_flows, 0xFFFFFFFF) if mark}
    assert not inner.run(libnftables.table_exists, "inet", "amphora_virtual")
    assert not inner.run(libnftables.table_exists, "inet", "amphora")
    eventually(some[0].refused, "no member serves")


def test_rendered_cidr_rules_equal_listed_rules(wire):
    """A difference would make each audit write the rules again."""
    v4 = tuple(int(ipaddress.ip_address(one)) for one in ("192.0.2.0", "192.0.2.255"))
    everything = ((0, 2**128 - 1),)
    restrictions = Restrictions(
        (Port(80, (v4,), ()), Port(53, (v4,), (), "udp"), Port(54, (), everything, "sctp")), None, forwards=True
    )
    text = firewall.render(restrictions)
    assert wire.inner.run(nft_apply.replace_table, text)
    assert wire.inner.run(nft_apply.holds, text)
    assert wire.inner.run(nft_apply.replace_table, "")


def many(count, *last):
    """A listener with this many members, which need not answer."""
    found = [member(f"m{number}", f"10.99.{number // 250}.{1 + number % 250}") for number in range(count)]
    return model.parse([virtual_server(*found, *last)])


def applied_seconds(engine, inner, count):
    """Return the least processor time of a change of one member among many."""
    states = [many(count, member("last", "10.98.0.1", weight=weight)) for weight in (1, 7)]
    inner.run(engine.apply, states[1], {})
    found = []
    for number in range(6):
        begun = time.process_time()
        inner.run(engine.apply, states[number % 2], {})
        found.append(time.process_time() - begun)
    return min(found)


def test_a_change_among_many_members_costs_little_more(lab, inner):
    """The rules of 2,000 members are not written, read or planned for one member. Before, the ratio was about 20."""
    engine = NftablesEngine()
    try:
        few, lot = (applied_seconds(engine, inner, count) for count in (20, 2000))
        assert lot < 8 * few, (few, lot)
        elements = len(re.findall(r"0x[0-9a-f]{8} :", listing(inner)))
        assert elements > 2000
    finally:
        inner.run(engine.release)


def listing(inner):
    return inner.run(libnftables.run_commands, "list table inet amphora_virtual\n")


@pytest.mark.parametrize(
    "foreign",
    [
        "delete element inet amphora_virtual targets-4 { 0x00100001 }",
        "add element inet amphora_virtual targets-4 { 0x00900000 : 10.1.1.1 . 5 }",
        "add element inet amphora_virtual hidden { 0x00900000 }",
        "add rule inet amphora_virtual forward accept",
        "add set inet amphora_virtual other { type mark; }",
        "delete table inet amphora_virtual",
    ],
)
def test_foreign_changes_are_found_after_a_change_of_one_element(lab, inner, foreign):
    engine = NftablesEngine()
    try:
        inner.run(engine.apply, many(3), {})
        inner.run(engine.apply, many(4), {})
        inner.run(libnftables.run_commands, "add table inet unrelated\ndelete table inet unrelated\n")
        assert inner.run(engine.find_drift, many(4), {}) == [], "a change of another table is none"
        wanted = listing(inner)
        inner.run(libnftables.run_commands, f"{foreign}\n")
        assert inner.run(engine.find_drift, many(4), {}) == ["the forwarding rules were changed"]
        inner.run(engine.apply, many(4), {})
        assert sorted(listing(inner).split()) == sorted(wanted.split())
        inner.run(libnftables.run_commands, f"{foreign}\n")
        inner.run(engine.apply, many(3), {})
        assert inner.run(engine.find_drift, many(3), {}) == [], "a change repairs the table too"
        assert "10.1.1.1" not in listing(inner)
    finally:
        inner.run(engine.release)
