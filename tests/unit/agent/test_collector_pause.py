# SPDX-License-Identifier: Apache-2.0
"""The pause between two samples of HAProxy's counters, with a real socket."""

import os
import socket
import threading
import time

import pytest

from amphora_agent.paths import Paths
from amphora_agent.stats.collector import MAX_PAUSE_SECONDS, PAUSE_FACTOR, Collector

ANSWER_SECONDS = 0.02
# Longer than any correct wait of these tests.
LONG = 60.0


class SlowHaproxy(threading.Thread):
    """Answers each question after 20 ms, with the rows of a number of servers."""

    def __init__(self, path, servers):
        super().__init__(daemon=True)
        info = f"Name: HAProxy\nPid: {os.getpid()}\nMaxconn: 100\nJobs: 2\n\n"
        names = ["FRONTEND", *(f"s{n}" for n in range(servers)), "BACKEND"]
        rows = "".join(f"p,{name},0,0,UP,\n" for name in names)
        self.answer = f"{info}# pxname,svname,scur,slim,status,\n{rows}\n{info}".encode()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()

    def run(self):
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(1000)
                time.sleep(ANSWER_SECONDS)  # HAProxy needs this time for thousands of servers
                connection.sendall(self.answer)

    def close(self):
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.join()


@pytest.fixture
def sampled(tmp_path):
    """Return a function that samples a HAProxy with this many servers, and returns the collector."""
    running = []

    def sample(servers):
        paths = Paths(tmp_path)
        for place in (paths.run, paths.var):
            place.mkdir(parents=True)
        running.append(SlowHaproxy(paths.stats_socket, servers))
        running[0].start()
        collector = Collector(paths)
        collector.sample()
        assert len(next(iter(collector.statuses().values()))) == servers
        return collector

    yield sample
    for one in running:
        one.close()


def test_the_pause_after_many_rows_depends_on_the_time_of_haproxy(sampled):
    pause = sampled(200).pause
    assert PAUSE_FACTOR * ANSWER_SECONDS <= pause <= MAX_PAUSE_SECONDS


def test_few_rows_are_read_without_a_pause(sampled):
    assert sampled(20).pause == 0.0


def test_a_sample_waits_for_a_change(sampled):
    collector = sampled(200)
    ended = threading.Event()

    def sample():
        collector.sample(collector.priority.background(LONG))
        ended.set()

    with collector.priority.changing():
        threading.Thread(target=sample, daemon=True).start()
        assert not ended.wait(10 * ANSWER_SECONDS)
    assert ended.wait(LONG / 2)
    assert collector.pause < MAX_PAUSE_SECONDS, "the wait counts as time of HAProxy"


def test_a_change_does_not_wait_for_a_sample_that_waits_for_the_change(sampled):
    collector = sampled(200)
    sampling = threading.Event()
    work = collector.priority.background(LONG)

    class Noted:
        """The work, and an event that the sample has the lock of the collector."""

        waited = 0.0

        def give_way(self):
            sampling.set()
            work.give_way()

    with collector.priority.changing():
        thread = threading.Thread(target=collector.sample, args=[Noted()], daemon=True)
        thread.start()
        assert sampling.wait(LONG)
        begun = time.monotonic()
        collector.sample_servers([("3", "1")])
        assert time.monotonic() - begun < LONG / 2
        collector.priority.served()
        thread.join(LONG / 2)
    assert not thread.is_alive()
