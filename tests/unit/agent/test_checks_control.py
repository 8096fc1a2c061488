# SPDX-License-Identifier: Apache-2.0
"""The checker's socket and loop under scarce descriptors and slow callers, and its drift report."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from test_checks_states import MONITOR, SERVER, member, server

from amphora_agent.l4 import event_loop
from amphora_agent.l4.counters import Counters
from amphora_agent.l4.edits import change_document
from amphora_agent.l4.event_loop import EventLoop, make_nonblocking
from amphora_agent.l4.model import to_document
from amphora_agent.l4_daemon import control_socket
from amphora_agent.l4_daemon.checker import Checker
from amphora_agent.l4_daemon.control_socket import ControlSocket
from amphora_agent.l4_daemon.persisted_state import StateFiles


@pytest.fixture
def turning():
    made = EventLoop()
    yield made
    made.close()


@contextlib.contextmanager
def files(most):
    """Within the block no file gets this descriptor number or a larger one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_timers_of_months_are_valid(turning):
    """epoll counts milliseconds in 32 bits."""
    one, other = socket.socketpair()
    with one, other:
        turning.call_at(time.monotonic() + 1e8, lambda: None)
        heard = []
        turning.add_reader(one, lambda: heard.append(one.recv(9)))
        other.send(b"now")
        turning.run_once()
        assert heard == [b"now"]


def test_a_socket_keeps_its_number_without_large_numbers(monkeypatch):
    monkeypatch.setattr(event_loop, "_RESERVED_FROM", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, files(1000):
        kept = make_nonblocking(one)
        assert kept is one
        assert kept.fileno() >= 0
        assert not kept.getblocking()


@pytest.fixture
def listening(turning, tmp_path):
    """Start a server with this answer; returns its path."""
    with contextlib.ExitStack() as closing:

        def made(answer):
            path = str(tmp_path / "socket")
            closing.callback(ControlSocket(turning, path, answer).close)
            return path

        yield made


def asking(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(path)
    connection.sendall(b"{}\n")
    return connection


def test_server_without_descriptors_accepts_later(turning, listening, capfd):
    path = listening(lambda _: {"well": True})
    with asking(path) as connection:
        with files(_next_file()):
            turning.run_once(0)
        assert "accepts no connections" in capfd.readouterr().err
        connection.setblocking(False)
        said, end = b"", time.monotonic() + 30
        while not said:
            assert time.monotonic() < end
            turning.run_once(1)
            with contextlib.suppress(BlockingIOError):
                said = connection.recv(100)
        assert json.loads(said) == {"well": True}


def _next_file():
    number = os.dup(0)
    os.close(number)
    return number


def test_a_slow_long_answer_arrives(turning, listening, monkeypatch):
    """The caller's time-out counts time without progress."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(control_socket, "time", clock)
    monkeypatch.setattr(event_loop, "time", clock)

    def answer(_):
        clock.now += 2 * control_socket.TIMEOUT_SECONDS
        return "x" * (8 << 20)

    received = []
    with asking(listening(answer)) as connection:

        def take():
            while data := connection.recv(1 << 20):
                received.append(len(data))

        taker = threading.Thread(target=take)
        taker.start()
        while taker.is_alive():
            turning.run_once(0.01)
        taker.join()
    assert sum(received) == 8 << 20


# -- drift -------------------------------------------------------------------------------------------------------------


class Fake:
    """An engine that reports differences from its last state; while `broken`, it refuses each change."""

    def __init__(self):
        self.told, self.broken = None, False

    def check_servers(self, servers):
        pass

    def apply(self, servers, up, *, paired=False):
        if self.broken:
            raise OSError("broken")
        self.told = servers, dict(up)

    def find_drift(self, servers, up, *, paired=False):
        return [] if (tuple(servers), dict(up)) == self.told else ["the rules are others"]

    def release(self):
        self.told = None

    def counters(self):
        return {SERVER: Counters()}


class Asked:
    """Checks whose results the test sets."""

    def __init__(self, _):
        self.waiting = []

    def start(self, target, on_result):
        self.waiting.append(on_result)
        return SimpleNamespace(end=lambda: None, expire=lambda: (True, "late"))

    def close(self):
        pass


@pytest.fixture
def checking(turning, tmp_path):
    """A checker, its engine and its checks."""
    engine, asked = Fake(), Asked(turning)
    made = Checker(turning, engine, StateFiles(str(tmp_path)), {"TCP": lambda _: asked})
    yield made, engine, asked
    made.close()


def question(op, *servers):
    empty = {"empty": not servers}
    return {"op": op, "digest": f"{len(servers)}", "paired": False, "servers": to_document(servers), **empty}


def test_idle_amphora_without_listeners_has_no_drift(checking):
    """The checker only received a check request."""
    checker, _, _ = checking
    assert checker.handle_request(question("differs")) == {"differs": []}
    assert checker.handle_request(question("differs", server(member(1))))["differs"] != []


def test_differences_apply_to_the_state_that_they_name(checking):
    checker, engine, _ = checking
    one, other = server(member(1)), server(member(1), member(2))
    checker.handle_request(question("serve", one))
    before = engine.told
    change = {"op": "serve", "digest": "next", "paired": False, "change": change_document([one], [other])}
    assert checker.handle_request({**change, "base": "another"}) == {"unknown": True}
    assert engine.told == before
    assert checker.handle_request({**change, "base": "1"}) == {}
    assert engine.told[0] == (other,)
    assert checker.handle_request({"op": "state"})["digest"] == "next"
    assert checker.handle_request({**change, "base": "1"}) == {"unknown": True}


def test_a_queued_state_is_no_drift(checking):
    checker, engine, asked = checking
    wanted = server(member(1), monitor=MONITOR)
    checker.handle_request(question("serve", wanted))
    while not asked.waiting:
        checker.run_once()
    engine.broken = True
    before = engine.told
    asked.waiting.pop()(False, "refused")
    checker.run_once()
    assert "broken" in checker.handle_request({"op": "state"})["error"]
    assert checker.handle_request(question("differs", wanted)) == {"differs": []}
    engine.told = None
    assert checker.handle_request(question("differs", wanted))["differs"] != []
    engine.told = before
