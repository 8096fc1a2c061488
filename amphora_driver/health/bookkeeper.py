# SPDX-License-Identifier: Apache-2.0
"""From what amphorae said to what the store says, in batches.

Invariant: the store hears of changes only, and a batch that could not be written is computed again at the next one:
nothing here is a queue that could overflow or be lost. What an amphora says counts for its own load balancer alone.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.errors import UnknownObject
from amphora_driver.health import statistics
from amphora_driver.health.status import Statuses, operating_statuses
from amphora_driver.store import amphorae, statuses, wanted
from amphora_driver.store.amphorae import State
from amphora_driver.store.tables import amphora, work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amphora_driver.health.ledger import Ledger
    from amphora_driver.health.status import Report
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.store.engine import Database

LOG = logging.getLogger(__name__)

# How often it is written down that an amphora was heard, in seconds: the only write of a quiet system.
_SEEN_EVERY = 1.0


class _Account(msgspec.Struct):
    """What is known of one load balancer: its tree as of a generation, and what was written down last."""

    tree: LoadBalancer | None = None
    generation: int = -1
    written: Statuses = {}


class Bookkeeper:
    """Writes down what the ledger learned.

    Args:
        database: where to.
        ledger: what amphorae said.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        self._accounts: dict[str, _Account] = {}
        self._flushed: dict[statistics.Key, statistics.Row] = {}
        self._seen: dict[str, tuple[str, float, int]] = {}
        self._seen_at = 0.0

    def flush(self) -> bool:
        """Write down what changed since the last flush; True if there is something new for Octavia.

        Raises:
            StoreError: the database is away; the same is tried at the next flush.
        """
        heard = self._ledger.take_heard()
        if not heard:
            return False
        owners = self._database.read(lambda connection: amphorae.load_balancers_of(connection, list(heard)))
        self._ledger.forget(amphora_id for amphora_id in heard if amphora_id not in owners)
        for amphora_id, load_balancer_id in owners.items():
            seen = heard[amphora_id]
            self._seen[amphora_id] = (amphora_id, seen.wall, seen.generation)
            self._accounts.setdefault(load_balancer_id, _Account())
        changed = False
        for load_balancer_id in sorted(set(owners.values())):
            changed |= self._load_balancer(load_balancer_id)
        self._write_seen()
        return changed

    def _load_balancer(self, load_balancer_id: str) -> bool:
        members = self._database.read(lambda connection: _serving(connection, load_balancer_id))
        reports = self._ledger.reports(members, time.monotonic())
        account = self._account(load_balancer_id, reports.values())
        if account.tree is None:
            return False
        found = operating_statuses(account.tree, list(reports.values()))
        news = [
            statuses.Observation(object_id=object_id, kind=one.kind, operating=one.status, reason=one.reason)
            for object_id, one in found.items()
            if object_id not in account.written or account.written[object_id].status is not one.status
        ]
        batch = statistics.changed(
            reports,
            dict.fromkeys(members, load_balancer_id),
            {listener.id: load_balancer_id for listener in account.tree.listeners},
            self._flushed,
        )
        if not news and not batch.rows:
            return False

        def write(connection: sa.Connection) -> int:
            statistics.store(connection, batch.rows)
            return statuses.observe(connection, load_balancer_id, news)

        differing = self._database.write(write)
        account.written = found
        statistics.remember(self._flushed, batch.rows)
        return bool(differing or batch.rows)

    def _account(self, load_balancer_id: str, reports: Iterable[Report]) -> _Account:
        """The load balancer's account, its tree read anew when an amphora serves a generation not seen before."""
        account = self._accounts[load_balancer_id]
        newest = max((report.generation or 0 for report in reports), default=0)
        if newest > account.generation:
            try:
                account.tree, account.generation = self._database.read(
                    lambda connection: _tree(connection, load_balancer_id)
                )
            except UnknownObject:
                self._accounts[load_balancer_id] = _Account()
                return self._accounts[load_balancer_id]
            # What was written for objects that are new, or were reported on before their rows existed, is written
            # again.
            account.written = {}
        return account

    def _write_seen(self) -> None:
        now = time.monotonic()
        if not self._seen or now - self._seen_at < _SEEN_EVERY:
            return
        self._database.write(lambda connection: amphorae.seen(connection, list(self._seen.values())))
        self._seen.clear()
        self._seen_at = now


def _serving(connection: sa.Connection, load_balancer_id: str) -> list[str]:
    """The amphorae whose word counts: those that are not being replaced."""
    return list(
        connection.execute(
            sa.select(amphora.c.id).where(
                amphora.c.load_balancer_id == load_balancer_id, amphora.c.state != State.RETIRING.value
            )
        ).scalars()
    )


def _tree(connection: sa.Connection, load_balancer_id: str) -> tuple[LoadBalancer, int]:
    generation = connection.execute(
        sa.select(work.c.generation).where(work.c.load_balancer_id == load_balancer_id)
    ).scalar()
    if generation is None:
        raise UnknownObject(f"read load balancer {load_balancer_id}", "it is not recorded any more")
    return wanted.load_tree(connection, load_balancer_id), int(generation)
