# SPDX-License-Identifier: Apache-2.0
"""The apply queue: order, answers to superseded requests, and reasons of changes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from amphora_agent.apply.apply_queue import ApplyQueue
from amphora_agent.apply.change_log import UNCHANGED, Change, ChangeLog

TIME_LIMIT = 10.0


class QueuedPushes:
    """Pushes that wait behind the push that the agent applies."""

    def __init__(self):
        self.turns = ApplyQueue()
        self.done = []
        self.failing = set()
        self._gate = threading.Event()
        self._entered = threading.Event()
        self._pool = ThreadPoolExecutor(16)
        self._first = self._pool.submit(self.turns.run_in_turn, 1, "lb", self._blocked)
        assert self._entered.wait(TIME_LIMIT)
        self._expected = 0

    def _blocked(self):
        self._entered.set()
        assert self._gate.wait(TIME_LIMIT)
        return 1

    def push(self, generation, kind="lb"):
        future = self._pool.submit(self.turns.run_in_turn, generation, kind, lambda: self._work(generation))
        self._expected += 1
        with self.turns._changed:
            assert self.turns._changed.wait_for(lambda: True)
        while len(self.turns._waiting) < self._expected:
            threading.Event().wait(0.001)
        return future

    def _work(self, generation):
        self.done.append(generation)
        if generation in self.failing:
            raise RuntimeError(f"{generation} is wrong")
        return generation

    def go(self):
        self._gate.set()
        assert self._first.result(TIME_LIMIT) == 1
        self._pool.shutdown()


@pytest.mark.parametrize("order", [(2, 3, 4), (4, 3, 2), (3, 4, 2)])
def test_only_the_newest_waiting_push_is_applied(order):
    line = QueuedPushes()
    waiting = [line.push(generation) for generation in order]
    line.go()
    assert [future.result(TIME_LIMIT) for future in waiting] == [4, 4, 4]
    assert line.done == [4]


def test_an_invalid_newest_push_gives_way_to_the_next_newest():
    line = QueuedPushes()
    line.failing = {4}
    two, three, four = (line.push(generation) for generation in (2, 3, 4))
    line.go()
    with pytest.raises(RuntimeError, match="4 is wrong"):
        four.result(TIME_LIMIT)
    assert (two.result(TIME_LIMIT), three.result(TIME_LIMIT)) == (3, 3)
    assert line.done == [4, 3]


def test_equal_pushes_are_applied_in_order():
    line = QueuedPushes()
    waiting = [line.push(3), line.push(3), line.push(2, kind="another")]
    line.go()
    assert [future.result(TIME_LIMIT) for future in waiting] == [3, 3, 2]
    assert line.done == [3, 3, 2]


def test_an_action_has_a_reason():
    for how in ("start", "runtime", "reload", "stop"):
        with pytest.raises(ValueError, match="without a reason"):
            Change(how, "")
    counts = ChangeLog()
    for deed in (Change("reload", "one"), Change("reload", "two"), UNCHANGED):
        counts.count(deed)
    counts.count_ended_worker(3)
    found = counts.document()
    assert (found["reload"]["count"], found["reload"]["reason"]) == (2, "two")
    assert (found["unchanged"]["count"], found["start"]) == (1, {"count": 0})
    assert found["workers_ended"] == {"count": 1, "connections": 3}
