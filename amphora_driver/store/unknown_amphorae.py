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
# Rows per sender address. Each amphora has its own address.
MAX_ROWS_PER_ADDRESS = 5
# Seconds without heartbeats after which a row is deleted, and after which a new id may replace it.
_PURGED_AFTER = 86_400.0
_REPLACED_AFTER = 300.0
_LONGEST_ADDRESS = 64
_ONLY_REPORTED = (
    "only reported: no compute backend of this deployment lists its machine. It may belong to another deployment, or a "
    "backend has lost it. Check its address"
)


class UnknownAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown id with the sender's address; times are seconds since 1970."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float


def record_unknown_amphorae(connection: sa.Connection, strays: Sequence[UnknownAmphora], now: float) -> int:
    """Insert or update unknown ids; return the number of ids beyond the limits."""
    connection.execute(unknown_amphora.delete().where(unknown_amphora.c.last_at < now - _PURGED_AFTER))
    ids = sorted(one.amphora_id for one in strays)
    known = set(
        connection.execute(
            sa.select(unknown_amphora.c.amphora_id).where(unknown_amphora.c.amphora_id.in_(ids))
        ).scalars()
    )
    # An amphora with this id may have been inserted since.
    owned = set(connection.execute(sa.select(amphora.c.id).where(amphora.c.id.in_(ids))).scalars())
    new = []
    for one in sorted(strays, key=lambda each: each.amphora_id):
        if one.amphora_id in known:
            heard = {"address": one.address[:_LONGEST_ADDRESS], "last_at": one.last_at}
            connection.execute(
                unknown_amphora.update().where(unknown_amphora.c.amphora_id == one.amphora_id).values(**heard)
            )
        elif one.amphora_id not in owned:
            new.append(one)
    return _insert_all(connection, new, now) if new else 0


def _insert_all(connection: sa.Connection, new: Sequence[UnknownAmphora], now: float) -> int:
    rows = connection.execute(
        sa.select(unknown_amphora.c.amphora_id, unknown_amphora.c.address, unknown_amphora.c.last_at)
    ).all()
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
        # Another health manager has inserted the same id at the same time.
        return False
    return True


def list_unknown_amphorae(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return all rows, the most recent heartbeat first."""
    return connection.execute(
        sa.select(unknown_amphora).order_by(unknown_amphora.c.last_at.desc(), unknown_amphora.c.amphora_id)
    ).all()


def compute_verdicts(connection: sa.Connection, grace: float) -> dict[str, str]:
    """Return changed verdicts by amphora id.

    Args:
        connection: of a reading transaction.
        grace: [amp_controller] orphan_grace.
    """
    machine = sa.and_(orphan.c.id == unknown_amphora.c.amphora_id, orphan.c.kind == OrphanKind.MACHINE.value)
    query = sa.select(unknown_amphora.c.amphora_id, unknown_amphora.c.verdict, orphan.c.backend).outerjoin(
        orphan, machine
    )
    changed = {}
    for row in connection.execute(query):
        verdict = _ONLY_REPORTED if row.backend is None else _cleanup_verdict(row.backend, grace)
        if verdict != row.verdict:
            changed[row.amphora_id] = verdict
    return changed


def write_verdicts(connection: sa.Connection, verdicts: dict[str, str]) -> None:
    """Write the results of `compute_verdicts`."""
    for amphora_id, verdict in verdicts.items():
        connection.execute(
            unknown_amphora.update().where(unknown_amphora.c.amphora_id == amphora_id).values(verdict=verdict)
        )


def _cleanup_verdict(backend: str, grace: float) -> str:
    return (
        f"its machine in {backend} is an orphan: housekeeping removes it [amp_controller] orphan_grace ({grace:g} s) "
        "after its discovery, unless too many orphans exist at once"
    )
