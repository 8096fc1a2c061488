# SPDX-License-Identifier: Apache-2.0
"""What the detector has found, on its way to the tables people look at.

Invariant: written only where something changed: a quiet fleet costs no writes. What an operator wrote meanwhile is
never written over without having been taken in. However many are silent, one turn writes a bounded number of rows: the
rest follows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.store import circuit_breaker, silent_amphorae, unknown_amphorae
from amphora_driver.store.circuit_breaker import BreakerRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import sqlalchemy as sa

    from amphora_driver.database.engine import Database
    from amphora_driver.store.silent_amphorae import SilentAmphora

# Seconds between two writes of numbers alone, and between two looks at zombies.
_NUMBERS_EVERY = 5.0
_ZOMBIES_EVERY = 10.0
# Rows of who is silent that are written down at once: while it is written nobody looks.
_MOST_WRITTEN = 200
# Moments this close are the same one: each look computes them anew.
_SAME = 2.0


class Findings:
    """Writes down what changed; for one thread.

    Args:
        database: where to.
        grace: [controller] orphan_grace, for what is said of zombies.
    """

    def __init__(self, database: Database, grace: float) -> None:
        self._database = database
        self._grace = grace
        self._silent: dict[str, SilentAmphora] = {}
        self._known: set[str] = set()
        self._rows: dict[str, BreakerRow] = {}
        self._numbers_at = self._zombies_at = float("-inf")
        # By load balancer: the places of its amphorae at which its status was written.
        self._told: dict[str, dict[str, tuple[int, int] | None]] = {}

    def take_up(self, rows: dict[str, BreakerRow] | None) -> None:
        """Begin: what others wrote is known.

        Args:
            rows: the breaker's; None if nobody else had the duty meanwhile, so that what an operator wrote is news.
        """
        if rows is not None:
            self._rows = dict(rows)
        self._silent.clear()
        self._told.clear()
        self._known = {row.amphora_id for row in self._database.read(silent_amphorae.list_silent_amphorae)}

    def closed_by_operator(self, rows: dict[str, BreakerRow]) -> bool:
        """Whether somebody else has closed the breaker since it was written last."""
        mine, there = self._rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.AUTOMATIC)
        closed = there is not None and there != mine and there.state == circuit_breaker.CLOSED
        if there is not None:
            self._rows[circuit_breaker.AUTOMATIC] = there
        return closed

    def say(self, silent: Sequence[SilentAmphora], rows: Sequence[BreakerRow]) -> None:
        """Write down who is silent, and the breaker.

        Raises:
            StoreError: the database is away.
        """
        now = time.monotonic()
        wanted = {one.amphora_id: self._steady(one) for one in silent}
        gone = sorted(self._known - wanted.keys())[:_MOST_WRITTEN]
        changed = [one for key, one in wanted.items() if self._silent.get(key) != one][: _MOST_WRITTEN - len(gone)]
        numbers = now - self._numbers_at >= _NUMBERS_EVERY
        differing = [row for row in rows if _differs(self._rows.get(row.name), row, numbers=numbers)]
        if changed or gone or differing:

            def write(connection: sa.Connection) -> list[BreakerRow]:
                silent_amphorae.write_silent_amphorae(connection, changed, gone)
                there = circuit_breaker.read_breaker_rows(connection)
                mine = [row for row in differing if there.get(row.name) == self._rows.get(row.name)]
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
        quiet = {one.load_balancer_id for one in silent}
        self._told = {one: orders for one, orders in self._told.items() if one in quiet}
        if now - self._zombies_at >= _ZOMBIES_EVERY:
            self._zombies_at = now
            self._judge_zombies()

    def not_served(
        self, load_balancer_id: str, owner: str, orders: Mapping[str, tuple[int, int] | None], reason: str
    ) -> bool:
        """Nobody serves a load balancer and nothing begins: its status says so, once for each silence.

        Returns:
            Whether it was not said before.
        """
        if self._told.get(load_balancer_id) == orders:
            return False

        def write(connection: sa.Connection) -> None:
            if silent_amphorae.lock_still_silent(connection, load_balancer_id, orders, owner) == set(orders):
                silent_amphorae.mark_not_served(connection, load_balancer_id, reason)

        self._database.write(write)
        self._told[load_balancer_id] = dict(orders)
        return True

    def _steady(self, one: SilentAmphora) -> SilentAmphora:
        """With the moment that was said of this silence before."""
        before = self._silent.get(one.amphora_id)
        same = before is not None and abs(before.since - one.since) < _SAME
        return msgspec.structs.replace(one, since=before.since) if before is not None and same else one

    def _judge_zombies(self) -> None:
        verdicts = self._database.read(lambda connection: unknown_amphorae.compute_verdicts(connection, self._grace))
        if verdicts:
            self._database.write(lambda connection: unknown_amphorae.write_verdicts(connection, verdicts))


def _differs(known: BreakerRow | None, row: BreakerRow, *, numbers: bool) -> bool:
    if known is None or (known.state, known.reason) != (row.state, row.reason):
        return True
    return numbers and (known.silent, known.watched) != (row.silent, row.watched)
