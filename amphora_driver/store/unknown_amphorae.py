# SPDX-License-Identifier: Apache-2.0
"""Senders of heartbeats with an unknown amphora id.

Invariant: the rows are hints, never proof, because no known key signs such a datagram. The number of rows is limited,
so a sender of random ids does no harm. No cleanup depends on these rows: orphan cleanup removes only machines that a
compute backend lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.tables import amphora, orphan
from amphora_driver.database.tables_fleet import unknown_amphora
from amphora_driver.store.orphans import OrphanKind

MAX_ROWS = 100
# The table keeps at most five unknown amphorae for each sender address. More ids from one address are a mistake or an
# attack.
MAX_ROWS_PER_ADDRESS = 5
# A health manager deletes the row of an unknown amphora after a day without heartbeats. If the table is full, a new row
# replaces the row with the oldest heartbeat. That heartbeat must be more than five minutes old.
_PURGED_AFTER = 86_400.0
_REPLACED_AFTER = 300.0
_LONGEST_ADDRESS = 64
_ONLY_REPORTED = (
    "only reported: no compute backend of this deployment lists its machine. It may belong to another deployment, or a "
    "backend has lost it. Check its address"
)


class UnknownAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown id with the sender's address."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float


def record_unknown_amphorae(connection: sa.Connection, strays: Sequence[UnknownAmphora], now: float) -> int:
    """Insert or update unknown ids; return the number of ids beyond the limits."""
    connection.execute(unknown_amphora.delete().where(unknown_amphora.c.last_at < now - _PURGED_AFTER))
    ids = sorted(one.amphora_id for one in strays)
    recorded = sa.select(unknown_amphora.c.amphora_id).where(unknown_amphora.c.amphora_id.in_(ids))
    known = set(connection.execute(recorded).scalars())
    # A controller may have recorded an amphora after the heartbeat arrived. So the health manager checks again whether
    # each amphora id is still unknown.
    owned = set(connection.execute(sa.select(amphora.c.id).where(amphora.c.id.in_(ids))).scalars())
    new = []
    for one in sorted(strays, key=lambda each: each.amphora_id):
        if one.amphora_id in known:
            _update(connection, one.amphora_id, address=one.address[:_LONGEST_ADDRESS], last_at=one.last_at)
        elif one.amphora_id not in owned:
            new.append(one)
    return _insert_all(connection, new, now) if new else 0


def _insert_all(connection: sa.Connection, new: Sequence[UnknownAmphora], now: float) -> int:
    rows = connection.execute(sa.select(unknown_amphora)).all()
    addresses = Counter(row.address for row in rows)
    replaceable = sorted((row.last_at, row.amphora_id) for row in rows if row.last_at < now - _REPLACED_AFTER)
    free = MAX_ROWS - len(rows)
    omitted = 0
    for one in new:
        if free <= 0 and replaceable:
            connection.execute(unknown_amphora.delete().where(unknown_amphora.c.amphora_id == replaceable.pop(0)[1]))
            free += 1
        if free <= 0 or addresses[one.address] >= MAX_ROWS_PER_ADDRESS:
            omitted += 1
        elif _insert(connection, one):
            free -= 1
            addresses[one.address] += 1
    return omitted


def _insert(connection: sa.Connection, one: UnknownAmphora) -> bool:
    values = {**msgspec.structs.asdict(one), "address": one.address[:_LONGEST_ADDRESS]}
    try:
        with connection.begin_nested():
            connection.execute(unknown_amphora.insert().values(**values))
    except IntegrityError:
        # An IntegrityError means that another health manager has just inserted a row with the same amphora id. So this
        # health manager need not insert the row.
        return False
    return True


def list_unknown_amphorae(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return all rows, the most recent heartbeat first."""
    newest_first = unknown_amphora.c.last_at.desc(), unknown_amphora.c.amphora_id
    return connection.execute(sa.select(unknown_amphora).order_by(*newest_first)).all()


def compute_verdicts(connection: sa.Connection, grace: float) -> dict[str, str]:
    """Return changed verdicts by amphora id; `grace` is [amp_controller] orphan_grace."""
    machine = sa.and_(orphan.c.id == unknown_amphora.c.amphora_id, orphan.c.kind == OrphanKind.MACHINE.value)
    query = sa.select(unknown_amphora.c.amphora_id, unknown_amphora.c.verdict, orphan.c.backend)
    rows = connection.execute(query.outerjoin(orphan, machine)).all()
    verdicts = [_ONLY_REPORTED if row.backend is None else _cleanup_verdict(row.backend, grace) for row in rows]
    return {row.amphora_id: one for row, one in zip(rows, verdicts, strict=True) if one != row.verdict}


def write_verdicts(connection: sa.Connection, verdicts: dict[str, str]) -> None:
    """Write the results of `compute_verdicts`."""
    for amphora_id, verdict in verdicts.items():
        _update(connection, amphora_id, verdict=verdict)


def _update(connection: sa.Connection, amphora_id: str, **values: Any) -> None:
    connection.execute(unknown_amphora.update().where(unknown_amphora.c.amphora_id == amphora_id).values(**values))


def _cleanup_verdict(backend: str, grace: float) -> str:
    return (
        f"its machine in {backend} is an orphan: housekeeping removes it [amp_controller] orphan_grace ({grace:g} s) "
        "after its discovery, unless too many orphans exist at once"
    )
