# SPDX-License-Identifier: Apache-2.0
"""Worker slots as a table: running, waiting and failed jobs."""

import time

import pytest

from amphora_driver.controller.worker_slots import JOBS_PER_SLOT, STALL_SECONDS, WorkerSlots
from amphora_driver.queue.jobs import Lease
from amphora_driver.reconcile.job import Job


def make_job(number, *, stalled=False, attempts=0):
    one = Job(Lease(load_balancer_id=f"lb{number}", owner="me", epoch=1, attempts=attempts), None, 60.0)
    if stalled:
        one.step_started_at = time.monotonic() - STALL_SECONDS - 1
    return one


def slots(number, jobs):
    made = WorkerSlots(number)
    for one in jobs:
        made.occupy(one)
    return made


@pytest.mark.parametrize(
    ("working", "stalled", "free"),
    [(0, 0, True), (3, 0, True), (4, 0, False), (3, 9, True), (4, 9, False), (0, 4 * JOBS_PER_SLOT, False)],
)
def test_waiting_job_occupies_no_slot_for_a_limited_time(working, stalled, free):
    jobs = [make_job(number) for number in range(working)] + [make_job(n, stalled=True) for n in range(stalled)]
    assert slots(4, jobs).has_free() is free


@pytest.mark.parametrize(
    ("failed", "stalled", "only"), [(0, 0, False), (1, 0, False), (2, 0, True), (1, 6, False), (0, 8, True)]
)
def test_failed_jobs_use_half_of_the_slots(failed, stalled, only):
    jobs = [make_job(number, attempts=1) for number in range(failed)]
    jobs += [make_job(number, attempts=1, stalled=True) for number in range(stalled)]
    assert slots(4, jobs).excludes_retries() is only


def test_a_single_slot_is_enough():
    one = slots(1, [make_job(1, attempts=3)])
    assert one.excludes_retries()
    assert not one.has_free()
    one = slots(1, [make_job(1, attempts=3, stalled=True)])
    assert one.has_free()
    assert not one.excludes_retries()


def test_a_finished_job_frees_its_slot():
    first = make_job(1)
    made = slots(1, [first])
    made.release(first)
    made.release(first)
    assert made.has_free()
    assert made.jobs() == []
