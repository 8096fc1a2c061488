# SPDX-License-Identifier: Apache-2.0
"""One job: its lease, its deadline, and its preemption by other requests.

Invariant: a check of the lease and of other requests precedes each effect outside the database (`ensure_may_act`). The
read of the state for a plan is the check for the first step of this plan, if the step follows at once. A deletion has
precedence over a fail-over, and a fail-over has precedence over all changes. A preempted job ends at its next check,
and its load balancer is claimed again at once. A job ends in the same way when its process stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job as job_table
from amphora_driver.database.tables import request
from amphora_driver.deadline import Deadline
from amphora_driver.errors import LeaseLost, Superseded
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.queue.jobs import Lease, check_lease, require_lease
from amphora_driver.store import amphorae
from amphora_driver.store.amphorae import RecordedJob
from amphora_driver.store.generations import Op

T = TypeVar("T")
# For this number of seconds, the read of the state for a plan counts as the check before the first step.
_CHECK_VALID_SECONDS = 0.05
# Name of a fail-over in the history of requests (`store/requests.py`).
_FAILOVER = "failover loadbalancer"


class Job:
    """One job of this process; `seconds` is its time-out.

    Attributes:
        generation: the newest generation that this job has observed; `op` is its requested operation.
        step_started_at: start of the current step, by `time.monotonic()`.
        replacing: a fail-over is in progress, and its events are recorded.
        staying: amphorae that were not retiring in the last observation.
        row_deleted: this job has deleted its own row.
    """

    def __init__(self, lease: Lease, database: Database, seconds: float) -> None:
        self.lease = lease
        self.deadline = Deadline(seconds, f"work on load balancer {lease.load_balancer_id}")
        self.generation = 0
        self.op: str = Op.APPLY
        self.step_started_at = time.monotonic()
        self.replacing = False
        self.staying: frozenset[str] = frozenset()
        self.row_deleted = False
        self._database = database
        self._preempted_by: str | None = None
        # Time of the last read of the state, by `time.monotonic()`, until a step uses it as its check.
        self._checked_at = -math.inf

    def begin_step(self) -> None:
        self.step_started_at = time.monotonic()

    def record_observation(self, generation: int, op: str) -> None:
        self.generation, self.op = generation, op

    def read_state(self, connection: sa.Connection) -> tuple[RecordedJob, tuple[Amphora, ...]]:
        """Read the row of this job and the amphorae for the next plan.

        Raises:
            LeaseLost: the load balancer is not recorded.
        """
        load_balancer_id, begun = self.lease.load_balancer_id, time.monotonic()
        row, found = amphorae.load_with_work(connection, load_balancer_id)
        if row is None:
            raise LeaseLost(f"work on load balancer {load_balancer_id}", "it is not recorded")
        self.record_observation(row.generation, row.op)
        self.replacing = row.replacing
        self.staying = frozenset(one.id for one in found if one.state is not AmphoraState.RETIRING)
        is_valid = (row.owner, row.epoch) == (self.lease.owner, self.lease.epoch) and row.due_at >= 0.0
        self._checked_at = begun if is_valid else -math.inf
        return row, found

    def take_check(self) -> bool:
        """Return whether the last read of the state is the check for this step, once for each read.

        Raises:
            Superseded: another thread has preempted the job.
            DeadlinePassed: the time-out of the job has passed.
        """
        checked_at, self._checked_at = self._checked_at, -math.inf
        is_valid = time.monotonic() - checked_at < _CHECK_VALID_SECONDS
        return is_valid and self._require_precedence(None, found=True)

    def ensure_may_act(self) -> None:
        """Check the lease, the precedence and the deadline, immediately before an external effect.

        Raises:
            LeaseLost: another controller has the lease.
            Superseded: a request has precedence, or this process stops.
            DeadlinePassed: the time-out of the job has passed.
        """
        self.read_if_allowed(lambda _connection: None)

    def read_if_allowed(self, work: Callable[[sa.Connection], T]) -> T:
        """Check as `ensure_may_act` does, and return the result of `work` in the same transaction."""

        def read(connection: sa.Connection) -> tuple[str | None, T]:
            generation, op, urgent = check_lease(connection, self.lease)
            return self.preemption_reason(connection, generation, op, urgent=urgent), work(connection)

        return self._require_precedence(*self._database.read(read))

    def load_amphorae(self) -> tuple[Amphora, ...]:
        """Check as `ensure_may_act` does; return the load balancer's amphorae, which the same statement reads."""

        def read(connection: sa.Connection) -> tuple[str | None, tuple[Amphora, ...]]:
            row, found = amphorae.load_with_work(connection, self.lease.load_balancer_id)
            generation, op, urgent = require_lease(self.lease, row)
            return self.preemption_reason(connection, generation, op, urgent=urgent), found

        return self._require_precedence(*self._database.read(read))

    def _require_precedence(self, first: str | None, found: T) -> T:
        """Return `found`; raise if the job is preempted, for the reason `first` or an earlier one."""
        # Another thread may have set a reason during the read. This thread does not overwrite that reason.
        if first is not None and self._preempted_by is None:
            self._preempted_by = first
        if self._preempted_by is not None:
            raise self.preemption_error()
        self.deadline.limit_wait(1.0)
        return found

    def preemption_error(self) -> Superseded:
        return Superseded(f"continue with load balancer {self.lease.load_balancer_id}", str(self._preempted_by))

    def preempt(self, reason: str, grace: float = 0.0) -> None:
        """Preempt the job from another thread: at its next check, and in a wait after `grace` seconds."""
        if self._preempted_by is None:
            self._preempted_by = reason
        self.deadline.bring_forward(reason, grace)

    @property
    def is_preempted(self) -> bool:
        return self._preempted_by is not None

    def preemption_reason(self, connection: sa.Connection, generation: int, op: str, *, urgent: bool) -> str | None:
        """Return the reason why a newer request has precedence over this job; None without such a request.

        `generation` and `op` are the current values of the row. `urgent` means that an amphora must be replaced, and
        that the row recorded this after the start of the job.
        """
        if not self.generation or self.op == Op.DELETE:
            return None
        if op == Op.DELETE:
            return "its deletion was requested"
        if urgent:
            return "an amphora must be replaced"
        if generation <= self.generation:
            return None
        mine, newer = request.c.load_balancer_id == self.lease.load_balancer_id, request.c.generation > self.generation
        statement = sa.select(request.c.id).where(mine, newer, request.c.action == _FAILOVER)
        asked = connection.execute(statement.limit(1)).first() is not None
        return "a fail-over was requested" if asked else None


def find_preempted_jobs(connection: sa.Connection, jobs: Sequence[Job]) -> dict[Job, str]:
    """Return the preempted jobs and those with a lost lease, each with the reason."""
    by_id = {job.lease.load_balancer_id: job for job in jobs}
    found = {}
    columns = [job_table.c[name] for name in ("load_balancer_id", "owner", "epoch", "generation", "op", "due_at")]
    for row in connection.execute(sa.select(*columns).where(job_table.c.load_balancer_id.in_(by_id))):
        job = by_id[row.load_balancer_id]
        if (row.owner, row.epoch) != (job.lease.owner, job.lease.epoch):
            found[job] = "another controller has taken it over"
        elif reason := job.preemption_reason(connection, row.generation, row.op, urgent=row.due_at < 0.0):
            found[job] = reason
    return found
