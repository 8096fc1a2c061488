# SPDX-License-Identifier: Apache-2.0
"""The priority of changes over background work, with real threads."""

import gc
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from flask import Flask

from amphora_agent.api import state
from amphora_agent.change_priority import ChangePriority

# Longer than any correct wait of these tests.
LONG = 60.0


class Work(threading.Thread):
    """Background work of one step."""

    def __init__(self, priority, seconds):
        super().__init__(daemon=True)
        self.work = priority.background(seconds)
        self.start()

    def run(self):
        self.work.give_way()

    def ends(self):
        """Wait for the end of the work; return whether it ended before its time for waiting was used up."""
        self.join(LONG / 2)
        return not self.is_alive()


@pytest.fixture
def priority():
    return ChangePriority()


def test_work_continues_when_the_change_is_served(priority):
    with priority.changing():
        work = Work(priority, LONG)
        work.join(0.05)
        assert work.is_alive()
        priority.served()
        assert work.ends()
    assert work.work.waited >= 0.04


def test_work_waits_for_all_changes(priority):
    begun, ended = threading.Event(), threading.Event()

    def change():
        with priority.changing():
            begun.set()
            ended.wait(LONG)

    other = threading.Thread(target=change, daemon=True)
    other.start()
    assert begun.wait(LONG)
    with priority.changing():
        work = Work(priority, LONG)
    work.join(0.05)
    assert work.is_alive()
    ended.set()
    assert work.ends()


def test_work_without_a_change_does_not_wait(priority):
    with priority.changing():
        pass
    work = priority.background(LONG)
    work.give_way()
    assert work.waited < 1.0


def test_work_waits_for_its_time_altogether(priority):
    work = priority.background(0.1)
    begun = time.monotonic()
    with priority.changing():
        for _ in range(1000):
            work.give_way()
    assert 0.1 <= work.waited <= time.monotonic() - begun < LONG / 2


def test_work_continues_while_a_change_waits_for_it(priority):
    with priority.changing():
        work = Work(priority, LONG)
        work.join(0.05)
        with priority.waiting_for_background():
            assert work.ends()


def test_garbage_is_not_collected_during_a_change(priority):
    assert gc.isenabled()
    refused: list[bool] = []
    with suppress(ValueError), priority.changing():
        refused.append(gc.isenabled())
        raise ValueError
    assert refused == [False]
    assert gc.isenabled()
    with priority.changing():
        priority.served()
        assert gc.isenabled()


def test_a_pushed_bundle_has_priority(priority):
    """From the receipt of the body on, until the answer at the latest."""
    seen = []

    def apply_body(body):
        work = Work(priority, LONG)
        work.join(0.05)
        seen.append((body, work.is_alive()))
        return SimpleNamespace(document=lambda: {"how": "unchanged"})

    applier = SimpleNamespace(priority=priority, apply_body=apply_body)
    app = Flask("agent")
    app.register_blueprint(state.blueprint(None, None, applier, None, None, None, None, None, None))
    assert app.test_client().put("/v2/bundle", data=b"bundle").json == {"how": "unchanged"}
    assert seen == [(b"bundle", True)]
    after = priority.background(LONG)
    after.give_way()
    assert after.waited < 1.0
