# SPDX-License-Identifier: Apache-2.0
"""The flow log has a line for each ended UDP flow (real datagrams and connection tracking)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from pathlib import Path

import pytest
from amphora_lab import VIP, eventually
from datagrams import PORT, Clients, UdpMember, member, members_of, name_of, virtual_server

from amphora_agent.l4 import model
from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_daemon.client import SERVICE
from amphora_agent.l4_flow_log import writer
from amphora_agent.l4_flow_log.stdout_writer import StdoutWriter
from amphora_agent.l4_flow_log.writer import FlowLog
from amphora_agent.l4_nftables import conntrack
from amphora_agent.l4_nftables.conntrack_marks import SERVER_MASK
from amphora_agent.l4_nftables.engine import NftablesEngine
from amphora_agent.network.namespace import Namespace

pytestmark = pytest.mark.root
PLACES = {"w1": "198.51.100.111", "w2": "198.51.100.112"}
ALL_MEMBERS = [member(name, address) for name, address in PLACES.items()]
LISTENER, POOL = name_of("listener", PORT, "UDP"), name_of("pool", PORT)
FORMAT = "{} %f %b %s %ci %cp %fi:%fp %U %B %[packets_in] %[packets_out] %Tt %ts %[protocol]"
SETTINGS = "/proc/sys/net/netfilter/nf_conntrack_"
# Bytes of the IPv4 and UDP headers (RFC 791, RFC 768).
HEADS = 28


@pytest.fixture
def inner(lab):
    made = Namespace(Path(f"/proc/{lab.amphora.init()}/root/run/netns/amphora-haproxy"))
    yield made
    made.close()


@pytest.fixture
def clients(lab):
    with contextlib.ExitStack() as closing:
        for name, address in PLACES.items():
            closing.callback(UdpMember(lab.network.thread("mem"), name, address).close)
        yield closing.enter_context(contextlib.closing(Clients(lab.network.thread("cl"))))
    lab.amphora.push(next(lab.generations), None)


def push(lab, *servers):
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=list(servers))
    assert status == 200, answer


def diagnosed(lab, part):
    status, answer = lab.amphora.call("GET", "/v2/diagnostics")
    assert status == 200, answer
    return answer[part]


@pytest.fixture
def form():
    """Return a log format with a tag for this test."""
    return FORMAT.format(uuid.uuid4())


def logged(lab, form):
    """Return the lines of this test in the checker's log."""
    return [line for line in diagnosed(lab, "checker log") if line.startswith(form.split()[0])]


def test_an_ended_flow_is_logged(lab, inner, clients, form):
    push(lab, virtual_server(*ALL_MEMBERS, log_format=form))
    flow = clients.flow(own_port=45210)
    said = b"x" * 100
    answers = [flow.ask(said) for _ in range(3)]
    assert not logged(lab, form), "an open flow has no line"
    mark = next(one for one in inner.run(conntrack.count_flows, 0xFFFFFFFF) if one & SERVER_MASK)
    inner.run(conntrack.end_flows, [mark])
    (found,) = eventually(lambda: logged(lab, form), "the ended flow has a line")
    back = sum(HEADS + len(f"{one.member} {one.seen} {one.port} ") + len(said) for one in answers)
    name = name_of("member", answers[0].member)
    whose, way = f"{LISTENER} {POOL}:{LISTENER} {name}", f"198.51.100.20 45210 {VIP}:{PORT}"
    start = f"{form.split()[0]} {whose} {way} {3 * (HEADS + 100)} {back} 3 3 "
    assert found.startswith(start), found
    assert found.endswith(" -- UDP")


def test_the_log_names_the_cause_of_a_flows_end(lab, inner, clients, form):
    push(lab, virtual_server(*ALL_MEMBERS, log_format=form))
    assert members_of(clients.flows(8)) == {"w1": 4, "w2": 4}
    push(lab, virtual_server(ALL_MEMBERS[0], log_format=form))
    gone = eventually(lambda: found if len(found := logged(lab, form)) == 4 else None, "the removed member's flows")
    assert {(line.split()[3], line.split()[-2]) for line in gone} == {(name_of("member", "w2"), "D-")}
    # Other flows expire after a second without datagrams. Their duration does not include this second.
    former = inner.run(read_setting, "udp_timeout")
    inner.run(write_setting, "udp_timeout", "1")
    try:
        flow = clients.flow(own_port=45211)
        assert flow.ask().member == "w1"
        (silent,) = eventually(
            lambda: [line for line in logged(lab, form) if " 45211 " in line], "the expired flow has a line", seconds=90
        )
        assert silent.endswith(" -- UDP")
        assert int(silent.split()[-3]) < 1000, "the duration does not include the final silence"
    finally:
        inner.run(write_setting, "udp_timeout", former)


def read_setting(name):
    return Path(f"{SETTINGS}{name}").read_text(encoding="ascii").strip()


def write_setting(name, value):
    Path(f"{SETTINGS}{name}").write_text(value, encoding="ascii")


def test_only_listeners_with_a_log_format_are_logged(lab, inner, clients, form):
    push(lab, virtual_server(*ALL_MEMBERS))
    assert members_of(clients.flows(4)) == {"w1": 2, "w2": 2}
    push(lab, virtual_server())
    assert diagnosed(lab, "virtual servers")["flow_log"] == {"logged": 0, "lost": 0}
    push(lab, virtual_server(*ALL_MEMBERS, log_format=form))
    assert members_of(clients.flows(4)) == {"w1": 2, "w2": 2}
    push(lab)
    found = eventually(lambda: logged(lab, form), "the flows of the removed listener have lines")
    assert [line.split()[-2] for line in found] == ["D-"] * 4


def test_a_restarted_checker_continues_the_log(lab, inner, clients, form):
    push(lab, virtual_server(*ALL_MEMBERS, log_format=form))
    before = lab.amphora.status(SERVICE)["pid"]
    assert sum(members_of(clients.flows(4)).values()) == 4
    os.kill(lab.amphora.outside_pid(before), signal.SIGKILL)
    eventually(lambda: lab.amphora.status(SERVICE)["pid"] not in (None, before), "the checker is started again")
    eventually(lambda: diagnosed(lab, "virtual servers"), "the checker serves")
    push(lab, virtual_server(log_format=form))
    assert len(eventually(lambda: logged(lab, form), "earlier flows have lines")) == 4


# -- overload --------------------------------------------------------------------------------------------------------


class Reader:
    """A socket pair for the output of the log."""

    def __init__(self):
        self.one, self.other = socket.socketpair()
        self.one.setblocking(False)

    def outlet(self):
        return StdoutWriter(self.other.fileno())

    def read(self):
        received = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                received += self.one.recv(1 << 20)
        return received.decode().splitlines()

    def close(self):
        self.one.close()
        self.other.close()


def test_dropped_log_lines_are_counted(lab, inner, clients, form, monkeypatch):
    """Many flows end together with a small socket buffer: logged and dropped lines sum to all flows."""
    monkeypatch.setattr(writer, "_BUFFER", 4096)
    servers = model.parse([virtual_server(*ALL_MEMBERS, log_format=form)])
    push(lab, virtual_server(*ALL_MEMBERS))
    reader, loop, engine = Reader(), EventLoop(), NftablesEngine()
    log = inner.run(lambda: FlowLog(loop, make_writer=reader.outlet))
    try:
        inner.run(log.start, servers)
        inner.run(engine.apply, servers, {})
        some = clients.flows(60)
        assert sum(members_of(some).values()) == 60
        inner.run(
            conntrack.end_flows, [mark for mark in inner.run(conntrack.count_flows, 0xFFFFFFFF) if mark & SERVER_MASK]
        )
        inner.run(log.close)
        counts = log.counts
        assert counts["lost"] > 0
        assert counts["logged"] + counts["lost"] == 60
        assert len(reader.read()) == counts["logged"]
    finally:
        reader.close()
        loop.close()
