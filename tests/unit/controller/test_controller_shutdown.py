# SPDX-License-Identifier: Apache-2.0
"""The controller's threads: shutdown, hanging calls and unexpected errors."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from amphora_driver.controller.service import Controller
from amphora_driver.controller.worker_slots import WorkerSlots
from amphora_driver.queue.jobs import Lease
from amphora_driver.reconcile.job import Job

SECONDS = 0.05


def lease(name):
    return Lease(load_balancer_id=name, owner="me", epoch=1, attempts=0)


class Jobs:
    """Records calls; raises the errors in `trouble`, one at a time."""

    def __init__(self):
        self.claimed, self.given, self.renewed, self.trouble = [], [], [], []
        self.often = threading.Event()

    def claim(self, load_balancer_id):
        self.claimed.append(load_balancer_id)
        return lease(load_balancer_id)

    def yield_lease(self, one):
        self.given.append(one.load_balancer_id)

    def renew_leases(self, running):
        if self.trouble:
            raise self.trouble.pop()
        self.renewed.append(running)
        if len(self.renewed) > 2:
            self.often.set()


@pytest.fixture
def controller():
    """A controller whose threads are started by the test only."""
    one = Controller.__new__(Controller)
    one._conf = SimpleNamespace(amp_controller=SimpleNamespace(lease=SECONDS))
    one._jobs = Jobs()
    one._slots = WorkerSlots(2)
    one._hung = set()
    one._stopping = threading.Event()
    one._draining = threading.Event()
    one._reconciler = SimpleNamespace(create_job=lambda found: Job(found, None, 60.0))
    return one


def test_a_hint_during_shutdown_is_left_to_other_controllers(controller):
    with ThreadPoolExecutor(1) as pool:
        controller._stopping.set()
        controller._handle_hint(pool, "lb")
    assert controller._jobs.claimed == []


def test_a_draining_controller_claims_nothing(controller):
    controller._draining.set()
    controller._conf.amp_queue = SimpleNamespace(poll_interval=1.0)
    with ThreadPoolExecutor(1) as pool:
        controller._handle_hint(pool, "lb")
        assert controller._claim_jobs(pool) == 1.0
        assert controller._jobs.claimed == []
        controller._draining.clear()
        controller._handle_hint(pool, "lb")
    assert controller._jobs.claimed == ["lb"]


def test_claimed_jobs_are_released_at_shutdown(controller):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    controller._handle_hint(pool, "lb")
    assert controller._jobs.given == ["lb"]
    assert controller._slots.jobs() == [], "no job waits for the lease"


def test_leases_are_renewed_after_errors_but_not_for_hanging_calls(controller, caplog):
    jobs = controller._jobs
    well, hung = Job(lease("well"), None, 60.0), Job(lease("hung"), None, 0.0)
    for one in (well, hung):
        controller._slots.occupy(one)
    time.sleep(2 * SECONDS)
    jobs.trouble = [OSError("the lock file cannot be opened"), RuntimeError("a fault of ours")]
    thread = threading.Thread(target=controller._renew_leases)
    thread.start()
    try:
        assert jobs.often.wait(20)
    finally:
        controller._stopping.set()
        for one in (well, hung):
            controller._slots.release(one)
        thread.join(20)
    assert not thread.is_alive()
    assert {frozenset(one) for one in jobs.renewed} == {frozenset({"well"})}
    assert caplog.text.count("has exceeded its deadline") == 1
