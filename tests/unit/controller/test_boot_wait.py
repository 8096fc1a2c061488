# SPDX-License-Identifier: Apache-2.0
"""The waiting room with real sockets: ports that listen, refuse, or swallow what is sent to them."""

import errno
import os
import socket
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from queue import Empty, Queue

import pytest

from amphora_driver.errors import StoreError
from amphora_driver.reconcile.boot_wait import AwaitedAgent, BootWait

HOST = "127.0.0.1"
FOR_LONG = 60.0


def free_port():
    with socket.create_server((HOST, 0)) as taken:
        return taken.getsockname()[1]


class Room:
    """The boot wait in its own thread, and the amphorae it reports."""

    def __init__(self, port):
        self.came = Queue()
        self.trouble = []
        self.troubled = threading.Event()
        self.room = BootWait(port, self._hear)
        self.thread = threading.Thread(target=self.room.run)

    def _hear(self, load_balancer_ids):
        if self.trouble:
            self.troubled.set()
            raise self.trouble.pop()
        for one in load_balancer_ids:
            self.came.put((one, time.monotonic()))

    def wait_for(self, number=1, address=HOST, seconds=FOR_LONG):
        self.room.add([AwaitedAgent(f"amphora-{number}", address, f"lb-{number}", seconds)])

    def hears(self, seconds=20.0):
        return self.came.get(timeout=seconds)


@contextmanager
def opened(port):
    one = Room(port)
    one.thread.start()
    try:
        yield one
    finally:
        one.room.stop()
        one.thread.join(10)
        assert not one.thread.is_alive()


def test_listening_agent_is_reported():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as room:
        room.wait_for()
        assert room.hears()[0] == "lb-1"
        assert len(room.room) == 0, "it is waited for no more"


def test_refusing_agent_is_polled_until_it_listens():
    port = free_port()
    with opened(port) as room:
        room.wait_for()
        with pytest.raises(Empty):
            room.hears(0.3)
        with socket.create_server((HOST, port)):
            begin = time.monotonic()
            load_balancer, heard = room.hears()
            assert load_balancer == "lb-1"
            # Some 10 ms on a quiet machine.
            assert heard - begin < 2.0


def test_many_are_waited_for_by_one_thread_at_little_cost():
    with opened(free_port()) as room:
        before = os.times()
        room.room.add([AwaitedAgent(f"a{number}", HOST, f"lb{number}", FOR_LONG) for number in range(300)])
        time.sleep(1.0)
        after = os.times()
        spent = after.user + after.system - before.user - before.system
        assert len(room.room) == 300
        # Some 0.15 s; one after the other each ten milliseconds it would be a whole second.
        assert spent < 0.8


def test_black_hole_delays_no_other_amphora():
    # A backlog that is full: the kernel drops further SYNs, as a machine does that is not there.
    with socket.socket() as hole, socket.socket() as filler, socket.socket() as more:
        hole.bind(("127.0.0.2", 0))
        hole.listen(0)
        port = hole.getsockname()[1]
        for one in (filler, more):
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        with socket.create_server((HOST, port)), opened(port) as room:
            room.wait_for(1, "127.0.0.2")
            room.wait_for(2, HOST)
            assert room.hears()[0] == "lb-2"
            with pytest.raises(Empty):
                room.hears(0.7)
            assert len(room.room) == 1


def test_late_amphora_is_forgotten():
    with opened(free_port()) as room:
        room.wait_for(seconds=0.1)
        deadline = time.monotonic() + 10
        while len(room.room):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_load_balancer_that_is_worked_on_is_waited_for_no_more():
    port = free_port()
    with opened(port) as room:
        room.wait_for(1)
        room.wait_for(2)
        room.room.remove_load_balancer("lb-1")
        with socket.create_server((HOST, port)):
            assert room.hears()[0] == "lb-2"
            with pytest.raises(Empty):
                room.hears(0.2)


def test_unanswering_agent_is_polled_less_often():
    with socket.create_server((HOST, 0), backlog=64) as server, opened(server.getsockname()[1]) as room:
        times = []
        for _ in range(4):
            room.wait_for()
            times.append(room.hears()[1])
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] >= 0.1
    assert pauses[1] >= 0.2
    assert pauses[2] >= 0.4


def test_a_database_that_is_away_ends_no_room():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as room:
        room.trouble.append(StoreError("write", "it is away"))
        room.wait_for(1)
        assert room.troubled.wait(20)
        # The first one is looked at after its pause, as without a room.
        room.wait_for(2)
        assert room.hears()[0] == "lb-2"


def test_an_amphora_without_address_ends_no_wait():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as room:
        room.wait_for(1, "no address at all")
        room.wait_for(2)
        assert room.hears()[0] == "lb-2"


def test_unexpected_error_ends_no_boot_wait():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as room:
        room.trouble += [RuntimeError("a fault of ours"), OSError("no file can be opened")]
        for number in (1, 2):
            room.troubled.clear()
            room.wait_for(number)
            assert room.troubled.wait(20)
        room.wait_for(3)
        assert room.hears()[0] == "lb-3"


def test_where_no_descriptor_is_left_it_is_not_now(monkeypatch):
    real, refused = socket.socket, threading.Event()

    def none_left(*args, **more):
        if threading.current_thread() is room.thread and not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "too many open files")
        return real(*args, **more)

    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as room:
        monkeypatch.setattr("amphora_driver.reconcile.boot_wait.socket.socket", none_left)
        room.wait_for(1)
        assert room.hears()[0] == "lb-1"
        assert refused.is_set()
        monkeypatch.undo()
