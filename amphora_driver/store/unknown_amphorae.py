# SPDX-License-Identifier: Apache-2.0
"""Who sends heartbeats under an id that nobody has.

Invariant: hints, never proof: such a datagram is signed by no key we know. There are at most so many rows, however many
ids somebody makes up, and nothing is ever removed because of one: only what a compute backend itself lists as a machine
of ours is, by the rule for everything that belongs to nobody.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.tables import amphora, orphan
from amphora_driver.database.tables_fleet import zombie
from amphora_driver.store.orphans import OrphanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ROWS = 100
# Rows of one sender's address. An amphora has an address of its own.
MAX_ROWS_PER_ADDRESS = 5
# Seconds after which an id that is not heard any more is forgotten, and after which its row makes room for another one.
_PURGED_AFTER = 86_400.0
_REPLACED_AFTER = 300.0
_LONGEST_ADDRESS = 64
_ONLY_REPORTED = (
    "only reported: no compute backend of ours lists its machine. It may be another deployment's, or one that a "
    "backend has lost; look at its address"
)


class UnknownAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """One that was heard: from where, and when (seconds since 1970)."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float


def record_unknown_amphorae(connection: sa.Connection, strays: Sequence[UnknownAmphora], now: float) -> int:
    """Write down which ids were heard; returns the number of ids without room."""
    connection.execute(zombie.delete().where(zombie.c.last_at < now - _PURGED_AFTER))
    ids = sorted(one.amphora_id for one in strays)
    known = set(connection.execute(sa.select(zombie.c.amphora_id).where(zombie.c.amphora_id.in_(ids))).scalars())
    # The row of an amphora may have come meanwhile.
    owned = set(connection.execute(sa.select(amphora.c.id).where(amphora.c.id.in_(ids))).scalars())
    new = []
    for one in sorted(strays, key=lambda each: each.amphora_id):
        if one.amphora_id in known:
            heard = {"address": one.address[:_LONGEST_ADDRESS], "last_at": one.last_at}
            connection.execute(zombie.update().where(zombie.c.amphora_id == one.amphora_id).values(**heard))
        elif one.amphora_id not in owned:
            new.append(one)
    return _insert_all(connection, new, now) if new else 0


def _insert_all(connection: sa.Connection, new: Sequence[UnknownAmphora], now: float) -> int:
    rows = connection.execute(sa.select(zombie.c.amphora_id, zombie.c.address, zombie.c.last_at)).all()
    addresses = Counter(row.address for row in rows)
    replaceable = sorted((row.last_at, row.amphora_id) for row in rows if row.last_at < now - _REPLACED_AFTER)
    room = MAX_ROWS - len(rows)
    left_out = 0
    for one in new:
        if room <= 0 and replaceable:
            connection.execute(zombie.delete().where(zombie.c.amphora_id == replaceable.pop(0)[1]))
            room += 1
        if room <= 0 or addresses[one.address] >= MAX_ROWS_PER_ADDRESS:
            left_out += 1
        elif _insert(connection, one):
            room -= 1
            addresses[one.address] += 1
    return left_out


def _insert(connection: sa.Connection, one: UnknownAmphora) -> bool:
    values = {**msgspec.structs.asdict(one), "address": one.address[:_LONGEST_ADDRESS]}
    try:
        with connection.begin_nested():
            connection.execute(zombie.insert().values(**values))
    except IntegrityError:
        # Another health manager has inserted the same id at the same time.
        return False
    return True


def list_unknown_amphorae(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """All that are known, who was heard last first."""
    return connection.execute(sa.select(zombie).order_by(zombie.c.last_at.desc(), zombie.c.amphora_id)).all()


def compute_verdicts(connection: sa.Connection, grace: float) -> dict[str, str]:
    """What is to be said of those of which something else is written so far, by amphora id.

    Args:
        connection: a reading transaction's will do.
        grace: [controller] orphan_grace.
    """
    machine = sa.and_(orphan.c.id == zombie.c.amphora_id, orphan.c.kind == OrphanKind.MACHINE.value)
    query = sa.select(zombie.c.amphora_id, zombie.c.verdict, orphan.c.backend).outerjoin(orphan, machine)
    said = {}
    for row in connection.execute(query):
        verdict = _ONLY_REPORTED if row.backend is None else _cleanup_verdict(row.backend, grace)
        if verdict != row.verdict:
            said[row.amphora_id] = verdict
    return said


def write_verdicts(connection: sa.Connection, verdicts: dict[str, str]) -> None:
    """Write down what `compute_verdicts` said."""
    for amphora_id, verdict in verdicts.items():
        connection.execute(zombie.update().where(zombie.c.amphora_id == amphora_id).values(verdict=verdict))


def _cleanup_verdict(backend: str, grace: float) -> str:
    return (
        f"its machine is with {backend} and belongs to nobody: housekeeping removes it [controller] orphan_grace "
        f"({grace:g} s) after it was found, unless too much belongs to nobody at once"
    )
