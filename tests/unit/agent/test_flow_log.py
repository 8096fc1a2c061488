# SPDX-License-Identifier: Apache-2.0
"""The flow log: conntrack events, the listener of a flow, and the format of lines."""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import replace
from ipaddress import ip_address
from uuid import UUID

import pytest

from amphora_agent.l4.model import LONGEST_FORMAT, Member, VirtualServer, parse, to_document
from amphora_agent.l4_flow_log import attribution
from amphora_agent.l4_flow_log.attribution import FlowAttribution, FlowTimeouts
from amphora_agent.l4_flow_log.conntrack_events import DELETED, SCTP, UDP, EndedFlow, FlowCounters, parse_events
from amphora_agent.l4_flow_log.format import COMPLETED, MEMBER_GONE, LogEntry, LogFormat
from amphora_agent.l4_flow_log.stdout_writer import MAX_BACKLOG, StdoutWriter
from amphora_driver.render.udp import FLOW_FORMAT
from amphora_driver.render.udp import LONGEST_FORMAT as LONGEST_SENT

SECOND = 10**9
BEGAN = 1_795_340_000 * SECOND + 123_456_789
FLOW = EndedFlow(
    UDP,
    ("203.0.113.9", 4711),
    ("198.51.100.5", 53),
    ("192.0.2.7", 5353),
    assured=False,
    state=0,
    received=FlowCounters(3, 120),
    sent=FlowCounters(2, 900),
    began=BEGAN,
    ended=BEGAN + 31 * SECOND,
)
LISTENER, POOL, M1, M2 = (str(UUID(int=number)) for number in range(1, 5))


def line(flow=FLOW, lasted=1_500_000_000, how=COMPLETED, pool=POOL):
    return LogEntry(flow, LISTENER, pool, M1, lasted, how)


def attribute(kind, value):
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def ends(family, kind, protocol, source, target):
    one, two = (1, 2) if family == socket.AF_INET else (3, 4)
    addresses = attribute(one, socket.inet_pton(family, source[0]))
    addresses += attribute(two, socket.inet_pton(family, target[0]))
    ports = attribute(1, bytes((protocol,)))
    ports += attribute(2, struct.pack("!H", source[1])) + attribute(3, struct.pack("!H", target[1]))
    return attribute(kind, attribute(0x8001, addresses) + attribute(0x8002, ports))


def message(*more, family=socket.AF_INET, protocol=UDP, kind=DELETED, flow=FLOW):
    body = struct.pack("=BBH", family, 0, 0)
    body += ends(family, 0x8001, protocol, flow.client, flow.destination)
    body += ends(family, 0x8002, protocol, flow.member, ("192.0.2.1" if family == socket.AF_INET else "::1", 60000))
    body += b"".join(more)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def counted(kind, packets, size):
    return attribute(0x8000 | kind, attribute(1, packets.to_bytes(8, "big")) + attribute(2, size.to_bytes(8, "big")))


COUNTS = counted(9, 3, 120) + counted(10, 2, 900)
TIMES = attribute(0x8014, attribute(1, BEGAN.to_bytes(8, "big")) + attribute(2, FLOW.ended.to_bytes(8, "big")))


def test_conntrack_events_are_parsed():
    assert list(parse_events(message(COUNTS, TIMES))) == [FLOW]
    assured = message(attribute(3, struct.pack("!I", 0x1E)))
    bare = replace(FLOW, received=None, sent=None, began=None, ended=None, assured=True)
    assert list(parse_events(assured + message(COUNTS, TIMES))) == [bare, FLOW]
    association = message(attribute(0x8004, attribute(0x8003, attribute(1, b"\x04"))), protocol=SCTP)
    assert [(one.protocol, one.state) for one in parse_events(association)] == [(SCTP, 4)]
    six = replace(FLOW, client=("2001:db8::9", 1), destination=("2001:db8::5", 53), member=("2001:db8:1::7", 5353))
    (found,) = parse_events(message(family=socket.AF_INET6, flow=six))
    assert (found.client, found.destination, found.member) == (six.client, six.destination, six.member)


def test_foreign_flows_are_ignored():
    assert list(parse_events(message(kind=256))) == [], "a new flow"
    assert list(parse_events(message(protocol=6))) == []
    assert list(parse_events(b"")) == []
    whole = message(COUNTS, TIMES)
    for length in range(len(whole)):
        assert [one for one in parse_events(whole[:length]) if one == FLOW] == [], length


def test_a_line_has_the_fields_of_octavia_and_more():
    made = LogFormat(FLOW_FORMAT.replace("{{ project_id }}", "project").replace("{{ lb_id }}", "lb")).render(line())
    when = time.localtime(BEGAN // SECOND)
    date = time.strftime("%d/%b/%Y:%H:%M:%S", when) + ".123"
    assert made == (
        f"project lb {LISTENER} 203.0.113.9 4711 {date} - - 900 120 - - {POOL}:{LISTENER} {M1} 1500 -- UDP 2 3"
    )


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("%ci:%cp -> %si:%sp by %fi:%fp", "203.0.113.9:4711 -> 192.0.2.7:5353 by 198.51.100.5:53"),
        ("%{+Q}ci %{+Q,+X}cp %s", f'"203.0.113.9" "4711" {M1}'),
        ("%{+Q}o %ci %{-Q}cp", ' "203.0.113.9" 4711'),
        ("100%% %r %ST %[ssl_c_verify] %{+Q}[var(txn.x)] %zz", "100% - - - - -"),
        ("%Ts.%ms %T", f"1795340000.123 {time.strftime('%d/%b/%Y:%H:%M:%S', time.gmtime(1795340000))} +0000"),
        ('{"ms":%Tt,"how":"%tsc"}', '{"ms":1500,"how":"--"}'),
        ("%[protocol]%[packets_in]%[packets_out]", "UDP32"),
        ("no variable %", "no variable %"),
    ],
)
def test_an_operator_format_is_used(text, made):
    assert LogFormat(text).render(line()) == made


def test_unknown_values_are_marked():
    unknown = replace(FLOW, received=None, sent=None, began=None, ended=None)
    assert LogFormat("%B %U %Tt %[packets_in] %b").render(line(unknown, lasted=None, pool="")) == "- - -1 - -"


# -- listener and member of a flow -------------------------------------------------------------------------------------


def member(name, address, **more):
    return Member(name, ip_address(address), 5353, weight=1, backup=False, enabled=True, **more)


def served(*members, log_format="%s %Tt %ts", port=53):
    address = (ip_address("198.51.100.5"),)
    return VirtualServer(
        LISTENER, "UDP", port, address, None, POOL, "ROUND_ROBIN", None, "hidden", None, members, log_format
    )


@pytest.fixture
def silences(monkeypatch):
    known = FlowTimeouts()
    monkeypatch.setattr(known, "_known", {"udp_timeout": 30 * SECOND, "udp_timeout_stream": 120 * SECOND})
    return known


BOTH = served(member(M1, "192.0.2.7"), member(M2, "192.0.2.8"))


def test_the_idle_time_is_not_part_of_a_flow(silences):
    owners = FlowAttribution()
    owners.add_servers([BOTH])
    assert owners.render(FLOW, silences) == f"{M1} 1000 --"
    long = replace(FLOW, assured=True, ended=BEGAN + 125 * SECOND)
    assert owners.render(long, silences) == f"{M1} 5000 --"
    assert owners.render(replace(FLOW, began=None), silences) == f"{M1} -1 --"


def test_the_end_of_an_association_depends_on_its_state(tmp_path, monkeypatch):
    monkeypatch.setattr(attribution, "_SETTINGS", f"{tmp_path}/")
    (tmp_path / "sctp_timeout_closed").write_text("10\n")
    closed = replace(FLOW, protocol=SCTP, state=1)
    assert FlowTimeouts().of(closed) == 10 * SECOND
    assert FlowTimeouts().of(replace(closed, state=4)) == 0, "unknown"
    assert FlowTimeouts().of(replace(closed, state=99)) == 0


def test_a_flow_that_ended_with_its_member_is_marked(silences):
    owners = FlowAttribution()
    owners.add_servers([BOTH])
    owners.servers_applied([BOTH], {}, time.time_ns(), done=True)
    begun = time.time_ns()
    owners.servers_applied([BOTH], {(LISTENER, M1): False}, begun, done=False)
    owners.servers_applied([BOTH], {(LISTENER, M1): False}, begun + 1, done=True)
    cut = replace(FLOW, began=begun - 2 * SECOND, ended=begun)
    assert owners.render(cut, silences) == f"{M1} 2000 {MEMBER_GONE}"
    assert owners.render(replace(cut, member=("192.0.2.8", 5353)), silences) == f"{M2} 0 --"
    assert owners.render(replace(cut, ended=begun - 1), silences).endswith(" --")
    # Member and listener are removed. Events of earlier ends can arrive after that.
    owners.add_servers([served(member(M2, "192.0.2.8"))])
    assert owners.render(FLOW, silences) == f"{M1} 1000 --"
    owners.add_servers([])
    assert owners.render(FLOW, silences) == f"{M1} 1000 --"


def test_listener_without_logging_has_no_line(silences):
    owners = FlowAttribution()
    owners.add_servers([replace(BOTH, log_format=None)])
    assert owners.render(FLOW, silences) is None
    assert owners.render(replace(FLOW, destination=("198.51.100.5", 54)), silences) is None
    owners.add_servers([BOTH])
    assert owners.render(replace(FLOW, member=("192.0.2.99", 1)), silences) == "- 1000 --"


@pytest.mark.parametrize("text", ["", "two\nlines", "x" * (LONGEST_FORMAT + 1), 7])
def test_an_invalid_format_is_refused(text):
    plain = to_document([BOTH])
    assert parse(plain) == (BOTH,)
    with pytest.raises((ValueError, TypeError), match="log_format"):
        parse([{**plain[0], "log_format": text}])
    assert "log_format" not in to_document([replace(BOTH, log_format=None)])[0]
    assert LONGEST_FORMAT == LONGEST_SENT


# -- destinations of lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_slow_reader_does_not_block_the_others(kind):
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        one, two = socket.socketpair()
        reader, writer = one.detach(), two.detach()
    outlet = StdoutWriter(writer)
    text = "x" * 1000
    dropped, written = 0, 0
    while not dropped:
        dropped = outlet.write([text])
        written += 1
        assert written < 10_000
    assert outlet.has_backlog
    os.set_blocking(reader, False)
    received = b""
    while outlet.has_backlog:
        received += os.read(reader, 1 << 20)
        outlet.write([])
    while len(received) < (written - dropped) * 1001:
        received += os.read(reader, 1 << 20)
    assert received == (text.encode() + b"\n") * (written - dropped), "complete lines, in order"
    assert written * 1001 > MAX_BACKLOG
    assert outlet.write(["again"]) == 0
    assert os.read(reader, 100) == b"again\n"
    assert os.get_blocking(writer), "other readers have the line too"
    outlet.close()
    os.close(reader)
    os.close(writer)


def test_lines_are_appended_to_a_file(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        outlet = StdoutWriter(file.fileno())
        assert outlet.write(["one", "two"]) == 0
        outlet.close()
    assert (tmp_path / "out").read_text() == "one\ntwo\n"
