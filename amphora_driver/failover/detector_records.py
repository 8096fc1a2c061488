# SPDX-License-Identifier: Apache-2.0
"""Writes the detector's findings to the tables that operators read.

Invariant: only changes are written, so a healthy fleet causes no writes. The detector reads a row that an operator has
changed before it overwrites the row. One turn writes a bounded number of rows; the following turns write the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.store import circuit_breaker, orphans, silent_amphorae
from amphora_driver.store.circuit_breaker import BreakerRow
from amphora_driver.store.silent_amphorae import SilentAmphora

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database

# Seconds between two writes of the numbers of watched and silent amphorae. All other changes are written immediately.
_NUMBERS_EVERY = 5.0
# Seconds between two updates of the texts that tell operators what happens to unknown amphorae.
_UNKNOWN_EVERY = 10.0
# Maximum number of silent amphorae in one transaction. The failure detector reads no heartbeats during a transaction.
_MOST_WRITTEN = 200
# A new estimate of the start of silence replaces the recorded one only if it differs by more than this number of
# seconds.
_SAME = 2.0


class DetectorRecords:
    """Writes changed findings, for one thread; `grace` is [amp_controller] orphan_grace."""

    def __init__(self, database: Database, grace: float) -> None:
        self._database = database
        self._grace = grace
        self._silent: dict[str, SilentAmphora] = {}
        self._known: set[str] = set()
        self._rows: dict[str, BreakerRow] = {}
        self._numbers_at = self._unknown_at = float("-inf")
        # Load balancers that the failure detector has set to ERROR, each with the last heartbeat (epoch and sequence)
        # of its amphorae at that time.
        self._reported: dict[str, dict[str, tuple[int, int] | None]] = {}

    def load(self, rows: dict[str, BreakerRow] | None) -> None:
        """Load the rows that other processes wrote.

        `rows` are of the breaker; None if no other process held the duty, so that a change must come from an operator.
        """
        if rows is not None:
            self._rows = dict(rows)
        self._silent.clear()
        self._reported.clear()
        self._known = {row.amphora_id for row in self._database.read(silent_amphorae.list_silent_amphorae)}

    def closed_by_operator(self, rows: dict[str, BreakerRow]) -> bool:
        """Return whether an operator has closed the breaker since the last write."""
        mine, stored = self._rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.AUTOMATIC)
        closed = stored is not None and stored != mine and stored.state == circuit_breaker.CLOSED
        if stored is not None:
            self._rows[circuit_breaker.AUTOMATIC] = stored
        return closed

    def write_changes(self, silent: Sequence[SilentAmphora], rows: Sequence[BreakerRow]) -> None:
        """Write the changed rows of silent amphorae and of the breaker.

        Raises:
            StoreError: the database is not available.
        """
        now = time.monotonic()
        wanted = {one.amphora_id: self._with_stable_start(one) for one in silent}
        gone = sorted(self._known - wanted.keys())[:_MOST_WRITTEN]
        changed = [one for key, one in wanted.items() if self._silent.get(key) != one][: _MOST_WRITTEN - len(gone)]
        numbers = now - self._numbers_at >= _NUMBERS_EVERY
        differing = [row for row in rows if _differs(self._rows.get(row.name), row, numbers=numbers)]
        if changed or gone or differing:

            def write(connection: sa.Connection) -> list[BreakerRow]:
                silent_amphorae.write_silent_amphorae(connection, changed, gone)
                stored = circuit_breaker.read_breaker_rows(connection)
                mine = [row for row in differing if stored.get(row.name) == self._rows.get(row.name)]
                for row in mine:
                    circuit_breaker.write_breaker_row(connection, row)
                return mine

            written = self._database.write(write)
            self._rows.update({row.name: row for row in written})
        if differing:
            self._numbers_at = now
        self._silent |= {one.amphora_id: one for one in changed}
        self._known = (self._known | self._silent.keys()) - set(gone)
        self._silent = {one: row for one, row in self._silent.items() if one in wanted}
        with_silent = {one.load_balancer_id for one in silent}
        self._reported = {one: orders for one, orders in self._reported.items() if one in with_silent}
        if now - self._unknown_at >= _UNKNOWN_EVERY:
            self._unknown_at = now
            verdicts = self._database.read(lambda c: orphans.compute_verdicts(c, self._grace))
            if verdicts:
                self._database.write(lambda c: orphans.write_verdicts(c, verdicts))

    def write_not_served(
        self, load_balancer_id: str, owner: str, orders: Mapping[str, tuple[int, int] | None], reason: str
    ) -> bool:
        """Set the status of a load balancer without a live amphora to ERROR, once for each silence.

        The result is whether this silence is new.
        """
        if self._reported.get(load_balancer_id) == orders:
            return False

        def write(connection: sa.Connection) -> None:
            if silent_amphorae.lock_still_silent(connection, load_balancer_id, orders, owner) == set(orders):
                silent_amphorae.mark_not_served(connection, load_balancer_id, reason)

        self._database.write(write)
        self._reported[load_balancer_id] = dict(orders)
        return True

    def _with_stable_start(self, one: SilentAmphora) -> SilentAmphora:
        before = self._silent.get(one.amphora_id)
        same = before is not None and abs(before.since - one.since) < _SAME
        return msgspec.structs.replace(one, since=before.since) if before is not None and same else one


def _differs(known: BreakerRow | None, row: BreakerRow, *, numbers: bool) -> bool:
    if known is None or (known.state, known.reason) != (row.state, row.reason):
        return True
    return numbers and (known.silent, known.watched) != (row.silent, row.watched)
