# SPDX-License-Identifier: Apache-2.0
"""The boot wait with real sockets: agents that listen, refuse connections, or do not answer."""

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


class BootWaitThread:
    """The boot wait in its own thread, and the amphorae that it reports."""

    def __init__(self, port):
        self.came = Queue()
        self.trouble = []
        self.troubled = threading.Event()
        self.boot_wait = BootWait(port, self._record_report)
        self.thread = threading.Thread(target=self.boot_wait.run)

    def _record_report(self, load_balancer_ids):
        if self.trouble:
            self.troubled.set()
            raise self.trouble.pop()
        for one in load_balancer_ids:
            self.came.put((one, time.monotonic()))

    def wait_for(self, number=1, address=HOST, seconds=FOR_LONG):
        self.boot_wait.add([AwaitedAgent(f"amphora-{number}", address, f"lb-{number}", seconds)])

    def next_report(self, seconds=20.0):
        return self.came.get(timeout=seconds)


@contextmanager
def opened(port):
    one = BootWaitThread(port)
    one.thread.start()
    try:
        yield one
    finally:
        one.boot_wait.stop()
        one.thread.join(10)
        assert not one.thread.is_alive()


def test_listening_agent_is_reported():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as waiter:
        waiter.wait_for()
        assert waiter.next_report()[0] == "lb-1"
        assert len(waiter.boot_wait) == 0, "a reported agent is no longer awaited"


def test_refusing_agent_is_polled_until_it_listens():
    port = free_port()
    with opened(port) as waiter:
        waiter.wait_for()
        with pytest.raises(Empty):
            waiter.next_report(0.3)
        with socket.create_server((HOST, port)):
            begin = time.monotonic()
            load_balancer, heard = waiter.next_report()
            assert load_balancer == "lb-1"
            # Takes about 10 ms on an idle machine.
            assert heard - begin < 2.0


def test_one_thread_polls_many_agents_at_low_cost():
    with opened(free_port()) as waiter:
        before = os.times()
        waiter.boot_wait.add([AwaitedAgent(f"a{number}", HOST, f"lb{number}", FOR_LONG) for number in range(300)])
        time.sleep(1.0)
        after = os.times()
        spent = after.user + after.system - before.user - before.system
        assert len(waiter.boot_wait) == 300
        # Takes about 0.15 s; serial polls at 10 ms intervals would take more than a second.
        assert spent < 0.8


def test_black_hole_delays_no_other_amphora():
    # With a full backlog the kernel drops further SYNs, as an absent machine does.
    with socket.socket() as hole, socket.socket() as filler, socket.socket() as more:
        hole.bind(("127.0.0.2", 0))
        hole.listen(0)
        port = hole.getsockname()[1]
        for one in (filler, more):
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        with socket.create_server((HOST, port)), opened(port) as waiter:
            waiter.wait_for(1, "127.0.0.2")
            waiter.wait_for(2, HOST)
            assert waiter.next_report()[0] == "lb-2"
            with pytest.raises(Empty):
                waiter.next_report(0.7)
            assert len(waiter.boot_wait) == 1


def test_late_amphora_is_forgotten():
    with opened(free_port()) as waiter:
        waiter.wait_for(seconds=0.1)
        deadline = time.monotonic() + 10
        while len(waiter.boot_wait):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_amphora_of_a_claimed_load_balancer_is_not_awaited():
    port = free_port()
    with opened(port) as waiter:
        waiter.wait_for(1)
        waiter.wait_for(2)
        waiter.boot_wait.remove_load_balancer("lb-1")
        with socket.create_server((HOST, port)):
            assert waiter.next_report()[0] == "lb-2"
            with pytest.raises(Empty):
                waiter.next_report(0.2)


def test_unanswering_agent_is_polled_less_often():
    with socket.create_server((HOST, 0), backlog=64) as server, opened(server.getsockname()[1]) as waiter:
        times = []
        for _ in range(4):
            waiter.wait_for()
            times.append(waiter.next_report()[1])
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] >= 0.1
    assert pauses[1] >= 0.2
    assert pauses[2] >= 0.4


def test_the_boot_wait_continues_after_a_database_outage():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as waiter:
        waiter.trouble.append(StoreError("write", "it is away"))
        waiter.wait_for(1)
        assert waiter.troubled.wait(20)
        # The first load balancer becomes due by its own retry time.
        waiter.wait_for(2)
        assert waiter.next_report()[0] == "lb-2"


def test_the_boot_wait_continues_after_an_invalid_address():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as waiter:
        waiter.wait_for(1, "no address at all")
        waiter.wait_for(2)
        assert waiter.next_report()[0] == "lb-2"


def test_the_boot_wait_continues_after_an_unexpected_error():
    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as waiter:
        waiter.trouble += [RuntimeError("a fault of ours"), OSError("no file can be opened")]
        for number in (1, 2):
            waiter.troubled.clear()
            waiter.wait_for(number)
            assert waiter.troubled.wait(20)
        waiter.wait_for(3)
        assert waiter.next_report()[0] == "lb-3"


def test_the_boot_wait_retries_when_no_file_descriptor_is_left(monkeypatch):
    real, refused = socket.socket, threading.Event()

    def none_left(*args, **more):
        if threading.current_thread() is waiter.thread and not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "too many open files")
        return real(*args, **more)

    with socket.create_server((HOST, 0)) as server, opened(server.getsockname()[1]) as waiter:
        monkeypatch.setattr("amphora_driver.reconcile.boot_wait.socket.socket", none_left)
        waiter.wait_for(1)
        assert waiter.next_report()[0] == "lb-1"
        assert refused.is_set()
        monkeypatch.undo()
