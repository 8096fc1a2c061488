# SPDX-License-Identifier: Apache-2.0
"""The checker as a process: its calls to the engine, the state for its successor, and its cost."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from uuid import UUID

import pytest
from amphora_lab import eventually
from checked_members import POOL, SERVER, CheckedNetwork, Process, address, member, monitor, server, tcp

from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.l4.model import to_document

pytestmark = pytest.mark.root
THOUSAND = 1000


@pytest.fixture(scope="module")
def place():
    made = CheckedNetwork(f"chp{os.getpid()}")
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


def test_a_status_change_reaches_the_engine_at_once(place, checker):
    """Measures the time from detection to the engine's call."""
    program = tcp(place, address(1))
    try:
        checker.serve(server(member(1), checked=monitor("TCP")))
        checker.become("UP")
    finally:
        program.close()
    checker.become("DOWN")
    since = next(iter(checker.members().values()))["since"]
    assert checker.told()[-1]["at"] - since < 0.5  # usually milliseconds; other tests use the machine, too


def test_a_new_member_waits_for_its_check_and_the_others_stay_up(place, checker):
    programs = [tcp(place, address(1))]
    try:
        checker.serve(server(member(1), checked=monitor("TCP")))
        checker.become("UP")
        checker.serve(server(member(1), member(2), checked=monitor("TCP")))
        assert checker.told()[-1]["up"] == {member(1).id: True, member(2).id: False}
        checker.become("UP", "DOWN")
        programs.append(tcp(place, address(2)))
        checker.become("UP", "UP")
        assert checker.told()[-1]["up"] == {member(1).id: True, member(2).id: True}
    finally:
        for program in programs:
            program.close()


def test_a_refused_update_changes_nothing(checker):
    checker.serve(server(member(1)))
    before = checker.told()
    wrong = replace(server(member(1)), port=666)
    said = checker.ask(op="serve", digest="x", paired=False, servers=to_document((wrong,)))["error"]
    assert (said["refused"], said["object_id"]) == (True, SERVER)
    assert checker.told() == before
    assert checker.state()["digest"] == "1"


def test_a_failed_call_of_the_engine_is_retried(place, checker):
    broken = checker.directory / "broken"
    program = tcp(place, address(1))
    try:
        checker.serve(server(member(1), checked=monitor("TCP")))
        checker.become("UP")
        broken.touch()
    finally:
        program.close()
    eventually(lambda: "broken" in (checker.state()["error"] or ""), "the state contains the error")
    before = len(checker.told())
    broken.unlink()
    eventually(lambda: len(checker.told()) > before, "the checker calls the engine")
    assert checker.told()[-1]["up"] == {member(1).id: False}
    eventually(lambda: checker.state()["error"] is None, "the state contains no error")


def test_a_failed_push_keeps_the_former_state(checker):
    checker.serve(server(member(1)))
    (checker.directory / "broken").touch()
    with pytest.raises(AssertionError, match="it is broken"):
        checker.serve(server(member(2)))
    (checker.directory / "broken").unlink()
    assert checker.state()["digest"] == "1"
    assert list(checker.members()) == [member(1).id]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_member_states_survive_a_replacement(place, checker, number):
    """The successor keeps a member down without a new detection."""
    program = tcp(place, address(1))
    try:
        wanted = server(member(1), member(2), checked=monitor("TCP", interval=3600, timeout=1, rise=5, fall=5))
        first = replace(wanted, monitor=monitor("TCP"))
        checker.serve(first)
        checker.become("UP", "DOWN")
        checker.serve(wanted)  # from now on the checker checks once an hour
        known = checker.members()
        (checker.directory / "counters").write_text(f'{{"{SERVER}": [1, 10, 100, 1000, 2]}}')
        birth, told = checker.state()["birth"], len(checker.told())
        if number == signal.SIGHUP:
            os.kill(checker.pid, number)
            eventually(lambda: len(checker.told()) > told and checker.answers(), "the successor answers")
        else:
            checker.kill(number)
            (checker.directory / "counters").write_text(f'{{"{SERVER}": [1, 12, 120, 1200, 2]}}')
            checker.start()
        assert checker.members() == known
        eventually(lambda: len(checker.told()) > told, "the checker calls the engine")
        assert checker.told()[-1]["up"] == {member(1).id: True, member(2).id: False}
        after = checker.state()
        assert after["birth"] == birth
        assert after["servers"][SERVER]["bytes_in"] >= 100
    finally:
        program.close()


def test_rows_for_the_metrics(checker):
    checker.serve(server(member(1)))
    told = Socket(checker.directory / "checker.sock").ask('{"op":"rows"}').splitlines()
    assert [line.split(",")[:3] for line in told[1:]] == [
        [SERVER, "FRONTEND", "0"],
        [f"{POOL}:{SERVER}", "BACKEND", "1"],
        [f"{POOL}:{SERVER}", member(1).id, "2"],
    ]


def test_counters_continue_after_the_tables_are_recreated(checker):
    checker.serve(server(member(1)))
    counters = checker.directory / "counters"
    for number, total in ((10, 10), (15, 15), (3, 18), (7, 22), (0, 22), (1, 23)):
        counters.write_text(f'{{"{SERVER}": [0, {number}, 0, 0, 0]}}')
        assert checker.state()["servers"][SERVER]["total_connections"] == total
    said = checker.serve()  # removes the last listener
    assert said["servers"] == {}
    assert said["former"][SERVER]["total_connections"] == 23
    assert checker.told()[-1]["released"]


def test_slow_or_invalid_client_delays_no_other(checker):
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(checker.directory / "checker.sock"))
        slow.sendall(b'{"op":')
        for question in ({"op": "explode"}, {}, {"op": "serve"}, {"op": "differs"}):
            assert checker.ask(**question)["error"]["refused"]
        assert checker.state()["servers"] == {}


def thousand(kind):
    """Return a thousand members at one address, each at a separate port."""
    members = [replace(member(1, port=2000 + number), id=str(UUID(int=5000 + number))) for number in range(THOUSAND)]
    return server(*members, checked=monitor(kind, interval=5, timeout=3, rise=3, fall=3))


def open_ports(kind):
    """Return the members' sockets; the kernel accepts their connections."""
    opened = []
    for number in range(THOUSAND):
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "TCP" else socket.SOCK_DGRAM)
        opened.append(one)
        one.bind((address(1), 2000 + number))
        if kind == "TCP":
            one.listen(256)
    return opened


@pytest.mark.parametrize(("kind", "word"), [("UDP-CONNECT", "UP"), ("TCP", "DOWN")])
def test_a_thousand_members_need_little_processor_time(place, checker, kind, word, record_property):
    # A host with the default limit sends one ICMP error a second.
    place.run(place.members, "sysctl", "-qw", "net.ipv4.icmp_ratelimit=0")
    opened = place.within(place.members, open_ports, kind) if word == "UP" else []
    try:
        begin = time.monotonic()
        checker.serve(thousand(kind))
        eventually(lambda: set(checker.words()) == {word}, f"each member is {word}", 60)
        first = time.monotonic() - begin
        before, begin = checker.cpu(), time.monotonic()
        time.sleep(6)  # the test measures the cost of an interval
        share = (checker.cpu() - before) / (time.monotonic() - begin)
        record_property(f"first checks of 1,000, {kind}, {word}", f"{first:.1f} s")
        record_property(f"1,000, {kind}, each 5 s, {word}", f"{100 * share:.1f} % of a core, {checker.pss():.1f} MiB")
        assert first > 2.0, "the first checks came in a burst"
        assert share < 0.25
        assert set(checker.words()) == {word}
    finally:
        for one in opened:
            one.close()


def test_an_idle_checker_uses_little_memory(checker, record_property):
    record_property("idle", f"{checker.pss():.1f} MiB")
    begin = checker.cpu()
    assert checker.pss() < 14
    time.sleep(1)
    assert checker.cpu() - begin < 0.05
    assert checker.state()["servers"] == {}
