# SPDX-License-Identifier: Apache-2.0
"""Limits the number of concurrent jobs of a controller.

Invariant: a job that only waits for another machine does not block other jobs. A job that has spent more than
`STALL_SECONDS` in one step counts as waiting, and another job may start. Retries of failed jobs use at most half of the
slots. An unreachable machine therefore blocks a slot for `STALL_SECONDS` in each retry, and many unreachable machines
never block all slots.
"""

from __future__ import annotations

import threading
import time

from amphora_driver.reconcile.job import Job

# A job frees its worker slot if one of its steps takes longer than this number of seconds. Most steps take 20 ms; a
# longer step usually waits for another machine.
STALL_SECONDS = 1.0
# Maximum number of jobs for each worker slot, including jobs that wait for another machine.
JOBS_PER_SLOT = 4


class WorkerSlots:
    """The jobs of this process, for any thread; `number` jobs may work at the same time."""

    def __init__(self, number: int) -> None:
        self.most = number * JOBS_PER_SLOT
        self._number = number
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()

    def has_free(self) -> bool:
        jobs = self.jobs()
        return len(jobs) < self.most and len(_working(jobs)) < self._number

    def excludes_retries(self) -> bool:
        """Return whether the next job must be one without a failed attempt."""
        failed = [job for job in self.jobs() if job.lease.attempts]
        return len(_working(failed)) >= max(self._number // 2, 1) or len(failed) >= self.most // 2

    def occupy(self, job: Job) -> None:
        with self._lock:
            self._jobs.add(job)

    def release(self, job: Job) -> None:
        with self._lock:
            self._jobs.discard(job)

    def jobs(self) -> list[Job]:
        with self._lock:
            return list(self._jobs)


def _working(jobs: list[Job]) -> list[Job]:
    now = time.monotonic()
    return [job for job in jobs if now - job.step_started_at < STALL_SECONDS]
