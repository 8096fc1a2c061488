# SPDX-License-Identifier: Apache-2.0
"""The command that lists pending jobs and the event that each one waits for.

Invariant: the list contains a load balancer until Octavia has committed each change, and the driver has read it back,
applied it and reported it. An empty list means that nothing is pending.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import sqlalchemy as sa

from amphora_driver.cli import queries
from amphora_driver.cli.command import Lister, Table
from amphora_driver.cli.formatting import Age, Remaining, Value
from amphora_driver.database.rows import plain_columns
from amphora_driver.database.tables import job, object_status

HEAD = (
    *("Load balancer", "Op", "Wanted", "Applied", "Waits for", "Pending since"),
    *("Objects pending", "To report", "Owner", "Epoch", "Attempts", "Due in", "Error"),
)


class ListJobs(Lister):
    """List load balancers with pending changes: owner, last error, and what each one waits for."""

    read_only_mode = True

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        now = time.time()
        pending, to_report, since = queries.count_pending(), queries.count_unreported(), queries.pending_since()
        # The condition searches the table of statuses once. Conditions on `pending` and `to_report` would count the
        # statuses of each load balancer.
        waiting = sa.or_(object_status.c.pending.is_not(None), object_status.c.version > object_status.c.reported)
        has_waiting = job.c.load_balancer_id.in_(sa.select(object_status.c.load_balancer_id).where(waiting))
        undone = sa.or_(job.c.dirty, job.c.committed < job.c.generation, job.c.read_back, has_waiting)
        # The query omits the column `reread`, because the table does not show this text, which may be long.
        shown = plain_columns(job, "reread")
        columns = (*shown, pending.label("pending"), to_report.label("to_report"), since.label("since"))
        query = sa.select(*columns).where(undone, queries.IS_LOAD_BALANCER).order_by(since, job.c.load_balancer_id)
        rows = self.app.read(lambda connection: connection.execute(query).all())
        return HEAD, (_row(row, now) for row in rows)


def waits_for(row: Any, now: float) -> str:
    """Return the event that a load balancer waits for. Its row of `job` has a column `to_report`."""
    if row.committed < row.generation:
        return "Octavia's commit"
    if row.read_back:
        return "reading back from Octavia"
    if row.owner is not None and (row.leased_until or 0.0) > now:
        return "the controller at work"
    if row.dirty:
        return "its next attempt" if row.due_at > now else "a controller"
    return "Octavia to be told" if row.to_report else "a controller"


def _row(row: Any, now: float) -> tuple[Any, ...]:
    return (
        *(row.load_balancer_id, row.op, row.generation, row.applied, waits_for(row, now), Age(row.since)),
        *(row.pending, row.to_report, Value(row.owner), row.epoch, row.attempts),
        *(Remaining(row.due_at if row.dirty else None), Value(row.error)),
    )
