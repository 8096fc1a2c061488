# SPDX-License-Identifier: Apache-2.0
"""One job: under which lease, until when, and what goes before it.

Invariant: nothing is done outside the database unless `check` has just been asked. Deleting goes before a fail-over,
and that before everything else: a job that was begun for less ends, wherever it is, and its load balancer is taken up
again at once. The same ends a job when its process ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import sqlalchemy as sa

from amphora_driver.database.tables import request, work
from amphora_driver.deadline import Deadline
from amphora_driver.errors import Superseded
from amphora_driver.queue.jobs import Lease, check_lease
from amphora_driver.store.requests import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.database.engine import Database

# What a request for a fail-over is called in the history (store/requests.py).
_FAILOVER = "failover loadbalancer"


class Turn:
    """One job of this process.

    Args:
        lease: of the load balancer.
        database: where it is recorded.
        seconds: the time the job has.

    Attributes:
        generation: the newest one this job has seen.
        op: what was wanted then.
        since: when the step that is being taken began, on `time.monotonic()`'s clock.
        replacing: fail-overs of it go on, and their time lines are kept.
        staying: amphorae that were not to be replaced when it was looked last.
        over: the row it was for is gone, by what it did.
    """

    def __init__(self, lease: Lease, database: Database, seconds: float) -> None:
        self.lease = lease
        self.deadline = Deadline(seconds, f"work on load balancer {lease.load_balancer_id}")
        self.generation = 0
        self.op: str = Op.APPLY
        self.since = time.monotonic()
        # Whether fail-overs of it go on, whose time lines are kept; and whether the row is gone by what was done.
        self.replacing = False
        self.staying: frozenset[str] = frozenset()
        self.over = False
        self._database = database
        self._gives_way: str | None = None

    def begin_step(self) -> None:
        """A step begins."""
        self.since = time.monotonic()

    def saw(self, generation: int, op: str) -> None:
        """What is done from now on is for this generation."""
        self.generation, self.op = generation, op

    def check(self) -> None:
        """Make sure that an effect outside is still ours to have; asked right before it.

        Raises:
            LeaseLost: somebody else works on the load balancer.
            Superseded: something that goes first was asked for, or this process ends.
            DeadlinePassed: the job had its time.
        """
        first = self._database.read(self._goes_first)
        if first is not None and self._gives_way is None:
            self._gives_way = first
        if self._gives_way is not None:
            raise self.superseded()
        self.deadline.limit_wait(1.0)

    def superseded(self) -> Superseded:
        """The error with which it ends when it gives way."""
        return Superseded(f"go on with load balancer {self.lease.load_balancer_id}", str(self._gives_way))

    def give_way(self, reason: str, grace: float = 0.0) -> None:
        """Have it end from another thread: before its next effect, and what it waits for after `grace` seconds."""
        if self._gives_way is None:
            self._gives_way = reason
        self.deadline.bring_forward(reason, grace)

    @property
    def gives_way(self) -> bool:
        """Whether it is to end for something else."""
        return self._gives_way is not None

    def _goes_first(self, connection: sa.Connection) -> str | None:
        generation, op, urgent = check_lease(connection, self.lease)
        return self.beaten_by(connection, generation, op, urgent=urgent)

    def beaten_by(self, connection: sa.Connection, generation: int, op: str, *, urgent: bool) -> str | None:
        """What of that which is wanted by now goes before this job, in words; None if nothing does.

        Args:
            connection: where it is recorded.
            generation: the newest one by now.
            op: what is wanted by now.
            urgent: amphorae of it are to be replaced since this job was begun.
        """
        if not self.generation or self.op == Op.DELETE:
            return None
        if op == Op.DELETE:
            return "its deletion was asked for"
        if urgent:
            return "an amphora is to be replaced"
        if generation <= self.generation:
            return None
        statement = sa.select(request.c.id).where(
            request.c.load_balancer_id == self.lease.load_balancer_id,
            request.c.generation > self.generation,
            request.c.action == _FAILOVER,
        )
        asked = connection.execute(statement.limit(1)).first() is not None
        return "a fail-over was asked for" if asked else None


def goes_first(connection: sa.Connection, turns: Sequence[Turn]) -> dict[Turn, str]:
    """Why these jobs are to end: something goes before them, or they are not ours any more; most have no reason to."""
    by_id = {turn.lease.load_balancer_id: turn for turn in turns}
    columns = (work.c.load_balancer_id, work.c.owner, work.c.epoch, work.c.generation, work.c.op, work.c.free_at)
    rows = connection.execute(sa.select(*columns).where(work.c.load_balancer_id.in_(by_id))).all()
    found = {}
    for row in rows:
        turn = by_id[row.load_balancer_id]
        if (row.owner, row.epoch) != (turn.lease.owner, turn.lease.epoch):
            found[turn] = "another controller has taken it over"
        elif reason := turn.beaten_by(connection, row.generation, row.op, urgent=row.free_at < 0.0):
            found[turn] = reason
    return found
