# SPDX-License-Identifier: Apache-2.0
"""The checker as a program: what it imports, when its version changes, its loop, its files, and the agent's side."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_udp_rules import member, server

import amphora_agent
from amphora_agent.errors import ConfigurationRefused, VirtualServersError
from amphora_agent.l4.counters import Counters
from amphora_agent.l4.event_loop import EventLoop, make_nonblocking
from amphora_agent.l4.model import Persistence
from amphora_agent.l4_daemon import ELSEWHERE, PACKAGES, client
from amphora_agent.l4_daemon.client import CheckerClient, CheckerState, ListenerState, PoolState
from amphora_agent.l4_daemon.persisted_state import DesiredState, StateFiles
from amphora_agent.l4_nftables.conntrack_marks import MAX_SERVERS
from amphora_agent.paths import Paths
from amphora_agent.source_checksum import source_checksum
from amphora_agent.stats.udp_stats import UdpStats

PACKAGE = Path(amphora_agent.__file__).parent
VERSION = source_checksum(PACKAGES, ELSEWHERE)
HEAVY = {"pathlib", "logging", "hashlib", "ssl", "argparse", "asyncio", "subprocess", "threading", "http", "pyroute2"}
LIST = """import sys
sys.path.insert(0, {place!r})
from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_daemon.__main__ import KINDS
loop = EventLoop()
for make in KINDS.values():
    make(loop).close()
loop.close()
print("\\n".join(name + " " + (getattr(module, "__file__", None) or "") for name, module in sys.modules.items()))
"""


@pytest.fixture(scope="module")
def modules():
    """The imported modules after checks of every type, with their files."""
    command = [sys.executable, "-I", "-S", "-c", LIST.format(place=str(PACKAGE.parent))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in said.splitlines())


def test_the_checker_imports_few_standard_modules(modules):
    assert HEAVY.isdisjoint(modules)
    library = Path(sys.modules["os"].__file__).parent
    foreign = {name for name, file in modules.items() if file and not file.startswith((str(library), str(PACKAGE)))}
    assert foreign == set()


def test_the_version_covers_all_source_files(modules):
    own = {file for file in modules.values() if file.startswith(str(PACKAGE))}
    relative = {Path(file).relative_to(PACKAGE) for file in own}
    packages = {each.parts[0] for each in relative if each.parts[0].startswith("l4")}
    assert packages == set(PACKAGES)
    elsewhere = {str(each) for each in relative if each.parts[0] not in packages}
    assert elsewhere == {*ELSEWHERE, "source_checksum.py"}


# -- the loop ------------------------------------------------------------------------------------------------


def test_received_answers_precede_timeouts():
    """A delayed process uses an answer that has arrived before it counts a time-out."""
    one, other = socket.socketpair()
    happened = []
    loop = EventLoop()
    try:
        loop.call_at(time.monotonic() - 5, lambda: happened.append("late"))
        loop.add_reader(one, lambda: happened.append(one.recv(9)))
        other.send(b"answer")
        loop.run_once(0)
        assert happened == [b"answer", "late"]
    finally:
        loop.close()
        one.close()
        other.close()


def test_a_socket_that_an_earlier_event_closed_is_skipped():
    pairs = [socket.socketpair() for _ in range(2)]
    happened = []
    loop = EventLoop()

    def close_all():
        happened.append(1)
        for one, _ in pairs:
            loop.remove(one)
            one.close()

    try:
        for one, other in pairs:
            loop.add_reader(one, close_all)
            other.send(b".")
        loop.run_once(0)
        loop.run_once(0)
        assert happened == [1]
    finally:
        loop.close()
        for pair in pairs:
            for one in pair:
                one.close()


def test_small_descriptor_numbers_stay_free():
    """libnftables waits with select(2)."""
    held = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(20)]
    moved = []
    try:
        while held[-1].fileno() < 520:
            held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        moved = [make_nonblocking(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(5)]
        assert all(one.fileno() >= 1024 and not one.getblocking() for one in moved)
    finally:
        for one in held + moved:
            one.close()


# -- the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"digest": 1}', '{"servers": [{}], "digest": "x", "paired": 1}', "\0"]
)
def test_unreadable_files_count_as_empty(tmp_path, text, capfd):
    (tmp_path / "virtual-servers.json").write_text(text)
    (tmp_path / "virtual-states.json").write_text(text)
    left = StateFiles(str(tmp_path)).load()
    assert (left.desired.servers, left.states) == ((), {})
    assert "virtual-servers.json" in capfd.readouterr().err


def test_the_agent_reads_the_served_objects_back(tmp_path):
    record = StateFiles(str(tmp_path))
    assert record.load().desired.digest is None
    record.write_servers(DesiredState("digest", (), True))
    assert record.load().desired == DesiredState("digest", (), True)


# -- the agent's side ----------------------------------------------------------------------------------------


class Services:
    """No process runs; the stand-in records the requests."""

    def __init__(self):
        self.calls = []

    def status(self, name):
        return None

    def start(self, name, argv, *, inner, policy):
        assert inner
        self.calls.append(("start", name))

    def signal(self, name, number):
        self.calls.append(("signal", number.name))

    def stop(self, name):
        self.calls.append(("stop", name))

    def log(self, name):
        return []


@pytest.fixture
def paths():
    # The path of a socket has 107 bytes at most, and those of pytest are long.
    with tempfile.TemporaryDirectory() as root:
        made = Paths(Path(root))
        for directory in (made.run, made.checker, made.var):
            directory.mkdir(parents=True)
        yield made


class Answering(threading.Thread):
    """A socket that returns the given answers in order."""

    def __init__(self, paths, *answers):
        super().__init__(daemon=True)
        self._answers = answers
        self.questions = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(paths.checker_socket))
        self._listener.listen(5)
        self.start()

    def run(self):
        with self._listener:
            for answer in self._answers:
                connection, _ = self._listener.accept()
                with connection, connection.makefile("rb") as lines:
                    self.questions.append(json.loads(lines.readline()))
                    connection.sendall(json.dumps(answer).encode() + b"\n")


SUMS = {"total_connections": 4, "bytes_in": 10, "bytes_out": 20, "request_errors": 1}
REFUSED = {"wanted": "forward", "happened": "no", "remedy": "", "object_id": "listener", "refused": True}
NONE = {"digest": None, "error": None, "birth": "b", "servers": {}, "former": {}}


def test_an_agent_without_virtual_servers_starts_no_checker(paths):
    services = Services()
    checker = CheckerClient(paths, services)
    checker.check_servers([])
    checker.serve([])
    assert checker.find_drift([]) == []
    assert checker.read_state() is None
    assert services.calls == []


def test_an_unneeded_checker_ends_and_its_last_sums_are_kept(paths):
    services = Services()
    paths.virtual_servers.write_text("{}")
    checker = CheckerClient(paths, services)
    Answering(paths, {"version": VERSION}, {**NONE, "former": {"gone": SUMS}})
    checker.serve([])
    assert services.calls == [("start", client.SERVICE), ("stop", client.SERVICE)]
    assert not paths.checker_socket.exists()
    assert not paths.virtual_servers.exists()
    assert checker.take_final_state().sums == {"gone": Counters(**SUMS)}
    assert checker.take_final_state() is None


def test_a_checker_with_other_code_is_replaced(paths):
    services = Services()
    paths.virtual_servers.write_text("{}")
    Answering(paths, {"version": "old"}, {"version": "old"}, {"version": VERSION}, NONE)
    CheckerClient(paths, services).serve([])
    assert services.calls[:2] == [("start", client.SERVICE), ("signal", "SIGHUP")]


@pytest.mark.parametrize("record", [None, '{"servers": []}'])
def test_a_checker_without_objects_ends(paths, record, monkeypatch):
    """A push without virtual servers does not depend on the checker."""
    monkeypatch.setattr(client, "START_TIMEOUT_SECONDS", 0.1)
    paths.checker_socket.touch()
    if record is not None:
        paths.virtual_servers.write_text(record)
    services = Services()
    checker = CheckerClient(paths, services)
    checker.serve([])
    assert services.calls == [("stop", client.SERVICE)]
    assert not paths.checker_socket.exists()
    assert not paths.virtual_servers.exists()
    assert checker.take_final_state() is None


def test_a_serving_checker_ends_after_it_removed_its_rules(paths, monkeypatch):
    monkeypatch.setattr(client, "START_TIMEOUT_SECONDS", 0.1)
    paths.virtual_servers.write_text('{"servers": [{}]}')
    services = Services()
    with pytest.raises(VirtualServersError):
        CheckerClient(paths, services).serve([])
    assert ("stop", client.SERVICE) not in services.calls


def test_stop_does_not_wait_for_output(paths, monkeypatch):
    """Heartbeats contain the states of all listeners, even while the checker is silent."""
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_SECONDS", 5.0, raising=False)
    monkeypatch.setattr(client, "STATE_TIMEOUT_SECONDS", 5.0)
    monkeypatch.setattr(client, "START_TIMEOUT_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(paths.checker_socket))
        silent.listen(5)
        checker = CheckerClient(paths, Services())
        failed = []

        def wait():
            try:
                checker.check_servers([None])
            except VirtualServersError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            connection, _ = silent.accept()
            with connection:
                assert checker.take_final_state() is None
                assert waiting.is_alive()
        finally:
            silent.close()
            waiting.join()
    assert failed


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ([server(member(1))], ""),
        ([server(member(1), algorithm="LEAST_CONNECTIONS")], ""),
        ([server(member(1), algorithm="LEAST_CONNECTIONS", persistence=Persistence(60, 32, 128))], "persistence"),
        ([server(member(1), number=number) for number in range(1, MAX_SERVERS + 2)], f"at most {MAX_SERVERS}"),
    ],
    ids=["servable", "least connections", "with persistence", "too many"],
)
def test_the_check_of_a_bundle_refuses_what_the_rules_do_not_support(paths, wanted, word):
    asked = Answering(paths, {"version": VERSION})
    checker = CheckerClient(paths, Services())
    if word:
        with pytest.raises(ConfigurationRefused, match=word):
            checker.check_servers(wanted)
    else:
        checker.check_servers(wanted)
    asked.join()
    assert [one["op"] for one in asked.questions] == ["version"], "a check changes nothing"


def test_a_request_with_differences_is_repeated_completely(paths):
    """The checker has another former state, for example after the loss of its file."""
    version = {"version": VERSION}
    asked = Answering(paths, version, {}, version, {"unknown": True}, {}, version, {}, version, {"error": REFUSED})
    checker = CheckerClient(paths, Services())
    one, other = server(member(1)), server(member(1), member(2))
    for wanted in (one, other, one):
        checker.serve([wanted])
    with pytest.raises(ConfigurationRefused):
        checker.serve([other])
    asked.join()
    requests = [each for each in asked.questions if each["op"] == "serve"]
    assert ["change" in each for each in requests] == [False, True, False, True, True]
    assert all(("servers" in each) != ("change" in each) for each in requests)
    assert requests[3]["base"] == requests[2]["digest"]


def test_after_a_failed_request_the_next_one_is_complete(paths):
    version = {"version": VERSION}
    asked = Answering(paths, version, {}, version, {"error": REFUSED}, version, {})
    checker = CheckerClient(paths, Services())
    one, other = server(member(1)), server(member(1), member(2))
    checker.serve([one])
    with pytest.raises(ConfigurationRefused):
        checker.serve([other])
    checker.serve([one])
    asked.join()
    assert "servers" in asked.questions[-1]


@pytest.mark.parametrize(("refused", "kind"), [(True, ConfigurationRefused), (False, VirtualServersError)])
def test_the_checkers_states_reach_the_controller(paths, refused, kind):
    said = {"wanted": "forward", "happened": "no", "remedy": "", "object_id": "listener", "refused": refused}
    paths.virtual_servers.write_text("{}")
    Answering(paths, {"version": VERSION}, {"error": said})
    with pytest.raises(kind) as caught:
        CheckerClient(paths, Services()).serve([])
    assert caught.value.object_id == "listener"


def test_a_silent_checker_has_no_state_and_is_a_drift(paths):
    paths.checker_socket.touch()
    checker = CheckerClient(paths, Services())
    assert checker.read_state() is None
    assert "does not answer" in checker.find_drift([])[0]


# -- sums over everything ------------------------------------------------------------------------------------


def state(birth, count, active=0, former=()):
    pool = PoolState("pool", "UP", {"m": "UP"}, {"m": ""}, {"m": 1})
    sums = {name: Counters(0, count, 10 * count, 20 * count, 0) for name in ("one", *former)}
    return CheckerState("d", birth, None, {"one": ListenerState("OPEN", active, pool)}, sums)


def make_stats(paths, *answers):
    said = iter(answers)
    source = SimpleNamespace(read_state=lambda: next(said), take_final_state=lambda: None)
    return UdpStats(paths, source)


def test_sums_continue_after_a_reset_of_counters(paths):
    told = []
    one = make_stats(paths, state("a", 5), state("a", 8), None, state("b", 2), state("b", 3))
    for _ in range(5):
        one.sample()
        told.append(one.listeners()["one"]["total_connections"])
    assert told == [5, 8, 8, 10, 11]
    one.write()
    again = make_stats(paths, state("b", 4), state("c", 1))
    again.sample()
    assert again.listeners()["one"]["total_connections"] == 12
    again.sample()
    assert again.listeners()["one"]["bytes_out"] == 260
    assert again.pools() == {"pool:one": {"status": "UP", "members": {"m": "UP"}}}
    assert again.rows == 3


def test_the_last_counters_of_a_checker_are_added(paths):
    answers = iter([state("a", 5), None, state("b", 1)])
    final = iter([None, replace(state("a", 9), listeners={}), None])
    one = UdpStats(paths, SimpleNamespace(read_state=lambda: next(answers), take_final_state=lambda: next(final)))
    one.sample()
    one.sample()
    assert one.listeners() == {}
    one.sample()
    assert one.listeners()["one"]["total_connections"] == 10


def test_a_file_with_other_content_is_ignored(paths, caplog):
    paths.virtual_totals.write_text("[]")
    one = make_stats(paths, state("a", 5))
    one.sample()
    assert one.listeners()["one"]["total_connections"] == 5
    assert "counting starts at zero" in caplog.text


def test_without_a_checker_no_sums_are_written(paths):
    one = make_stats(paths, None)
    one.sample()
    one.write()
    assert not paths.virtual_totals.exists()
