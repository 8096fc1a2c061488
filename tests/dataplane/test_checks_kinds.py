# SPDX-License-Identifier: Apache-2.0
"""The checker detects failed and recovered members with every kind of check, over real sockets."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from uuid import UUID

import pytest
from amphora_lab import eventually, ip
from checked_members import PORT, CheckedNetwork, Process, address, member, monitor, says, sctp, server, tcp, udp

from amphora_agent.l4_checks import sctp_packet

pytestmark = pytest.mark.root
OK, ERROR = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 503 Down\r\n\r\n"


@pytest.fixture(scope="module")
def place():
    made = CheckedNetwork(f"chk{os.getpid()}")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def checker(place, tmp_path):
    process = Process(place, tmp_path)
    process.start()
    try:
        yield process
    finally:
        process.close()


STARTS = {
    "TCP": tcp,
    "HTTP": lambda place, where, port=PORT: tcp(place, where, port, says(OK)),
    "UDP-CONNECT": udp,
    "SCTP": sctp,
}


def servers_of_all_kinds():
    """Return a pool for each kind and family, each with a member at a separate port."""
    found = {}
    for number, (kind, version) in enumerate(itertools.product((*STARTS, "PING"), (4, 6))):
        one = member(2 if kind == "PING" else 1, version, port=PORT + number)
        found[kind, version] = replace(
            server(one, checked=monitor(kind)),
            id=str(UUID(int=50 + number)),
            port=1 + number,
            pool_id=str(UUID(int=70 + number)),
        )
    return found


def test_failed_members_recover(place, checker):
    """Tests all kinds together in both families, because they share a loop and partly sockets."""
    wanted = servers_of_all_kinds()

    def start():
        return [
            STARTS[kind](place, str(one.members[0].address), one.members[0].port)
            for (kind, _), one in wanted.items()
            if kind in STARTS
        ]

    def become(word):
        def differing():
            servers = checker.state()["servers"]
            pools = {name: servers[one.id]["pool"] for name, one in wanted.items()}
            return {name: pool for name, pool in pools.items() if pool["status"] != word[0]} or {
                name: one
                for name, pool in pools.items()
                for one in pool["members"].values()
                if one["status"] != word[1] or not one["reason"]
            }

        eventually(lambda: not differing(), f"{word}")

    programs = start()
    try:
        checker.serve(*wanted.values())
        become(("UP", "UP"))
    finally:
        for program in programs:
            program.close()
    places = [(4, f"{address(2)}/24", ""), (6, f"{address(2, 6)}/64", " nodad")]
    for _, where, _ in places:
        ip(f"-n {place.members} addr del {where} dev eth0")
    try:
        become(("DOWN", "DOWN"))
        # The checker publishes the state before it calls the engine.
        eventually(lambda: set(checker.told()[-1]["up"].values()) == {False}, "the engine forwards to no member")
    finally:
        for _, where, extra in places:
            ip(f"-n {place.members} addr add {where} dev eth0{extra}")
    programs = start()
    try:
        become(("UP", "UP"))
        eventually(lambda: set(checker.told()[-1]["up"].values()) == {True}, "the engine forwards to each member")
    finally:
        for program in programs:
            program.close()


@pytest.mark.parametrize(
    ("kind", "seen"),
    [("TCP", "refused"), ("UDP-CONNECT", "port unreachable"), ("SCTP", "protocol unreachable"), ("HTTP", "refused")],
)
def test_a_failed_check_reports_its_reason(checker, kind, seen):
    checker.serve(server(member(3), checked=monitor(kind)))
    checker.become("DOWN")
    assert seen in next(iter(checker.members().values()))["reason"]


def test_an_absent_host_is_down(checker):
    """The kernel detects an absent host after three seconds, later than the check's time-out."""
    kinds = ("TCP", "UDP-CONNECT", "SCTP", "PING", "HTTP")
    wanted = [
        replace(
            server(member(150 + number), checked=monitor(kind)),
            id=str(UUID(int=50 + number)),
            port=1 + number,
            pool_id=str(UUID(int=70 + number)),
        )
        for number, kind in enumerate(kinds)
    ]
    checker.serve(*wanted)

    def down():
        return {one["pool"]["status"] for one in checker.state()["servers"].values()} == {"DOWN"}

    eventually(down, "all members are down")


def test_sctp_checks_detect_refusals_and_abort_their_associations(place, checker):
    program = sctp(place, address(4), kind=sctp_packet.ABORT)
    try:
        checker.serve(server(member(4), checked=monitor("SCTP"), protocol="SCTP"))
        checker.become("DOWN")
        assert "association refused" in next(iter(checker.members().values()))["reason"]
    finally:
        program.close()
    program = sctp(place, address(4))
    try:
        checker.become("UP")
        kinds = [packet.kind for packet in list(program.seen)]
        eventually(lambda: [one.kind for one in program.seen][1:2] == [sctp_packet.ABORT], f"an ABORT, not {kinds}")
        first, last = program.seen[:2]
        assert (last.tag, last.source, last.destination) == (0xABCD, first.source, PORT)
    finally:
        program.close()


def test_a_member_is_checked_at_its_monitor_address(place, checker):
    elsewhere = tcp(place, address(6), port=81)
    try:
        there = member(5, check_address=member(6).address, check_port=81)
        other_port = member(6, check_port=81)
        checker.serve(server(there, other_port, member(4), checked=monitor("TCP")))
        checker.become("UP", "UP", "DOWN")
    finally:
        elsewhere.close()


def drip(connection):
    """Send single bytes slowly: no line is complete within the check's time-out."""
    connection.recv(4096)
    for byte in b"HTTP/1.1 200 OK" * 3:
        connection.sendall(bytes((byte,)))
        time.sleep(0.1)


def endless(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK")
    while True:
        connection.sendall(b"x" * 4096)


def redirect(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.100/\r\n\r\n")


def silent(connection):
    connection.recv(4096)


def garbage(connection):
    connection.sendall(os.urandom(4096))


def headers(connection):
    connection.recv(4096)
    connection.sendall(OK[:-2])
    while True:
        connection.sendall(b"X: y\r\n" * 100)


@pytest.mark.parametrize(
    ("say", "word", "seen"),
    [
        (drip, "DOWN", "no answer within"),
        (endless, "DOWN", "not an HTTP/1 answer"),
        (redirect, "DOWN", "status 302"),
        (silent, "DOWN", "closed without"),
        (garbage, "DOWN", "not an HTTP/1 answer"),
        (headers, "UP", "status 200"),
        (says(ERROR), "DOWN", "status 503"),
    ],
)
def test_checks_of_unusual_http_answers(place, checker, say, word, seen):
    program = tcp(place, address(7), say=say)
    try:
        checker.serve(server(member(7), checked=monitor("HTTP")))
        checker.become(word)
        assert seen in next(iter(checker.members().values()))["reason"] or say is silent
    finally:
        program.close()


@pytest.mark.parametrize("kind", ["TCP", "UDP-CONNECT"])
def test_rise_and_fall_are_counted(place, checker, kind):
    """The status changes exactly at the third failed check and the second successful one."""
    program = STARTS[kind](place, address(1))
    checker.serve(server(member(1), checked=monitor(kind, rise=2, fall=3)))
    checker.become("UP")
    program.close()
    begin = time.monotonic()
    checker.become("DOWN")
    # Three checks, one second apart: at least two seconds between the first of them and the last.
    assert time.monotonic() - begin > 1.9
    program = STARTS[kind](place, address(1))
    begin = time.monotonic()
    try:
        checker.become("UP")
        assert time.monotonic() - begin > 0.9
    finally:
        program.close()
