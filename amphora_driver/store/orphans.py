# SPDX-License-Identifier: Apache-2.0
"""What a backend has and no row of ours owns.

Invariant: a row is written before anything is made outside, and deleted after it is gone. So what a backend listed
*before* the rows were read, and what no row knows, belongs to nobody: a controller that was stopped in the middle of a
step went on after another one had finished its work. Such a thing is noted, and is nobody's for good only when it was
noted for long enough; what is owned or gone by then is forgotten again.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_seen, listener_statistics, orphan, vip_claim, work

if TYPE_CHECKING:
    from collections.abc import Collection

# Databases limit the number of values in one IN (...).
_CHUNK = 500


class OrphanKind(str, Enum):
    """What may belong to nobody."""

    MACHINE = "machine"
    """An amphora's machine, by the amphora's id."""
    PORTS = "ports"
    """An amphora's ports, by the amphora's id."""
    VIP = "vip"
    """A load balancer's VIPs, by the load balancer's id."""


def find_unowned(connection: sa.Connection, thing: OrphanKind, found: Collection[str]) -> set[str]:
    """Those of the ids a backend listed that no row owns; the backend was asked before this transaction began."""
    if thing is not OrphanKind.VIP:
        return _missing(connection, amphora.c.id, found)
    return _missing(connection, vip_claim.c.load_balancer_id, _missing(connection, work.c.load_balancer_id, found))


def read_orphans(connection: sa.Connection, thing: OrphanKind, backend: str) -> dict[str, float]:
    """What was noted of a backend, and when (seconds since 1970)."""
    rows = connection.execute(sa.select(orphan).where(orphan.c.kind == thing.value, orphan.c.backend == backend))
    return {row.id: row.found_at for row in rows}


def update_orphans(
    connection: sa.Connection, thing: OrphanKind, backend: str, found: Collection[str], now: float, grace: float
) -> list[str]:
    """Write down what belongs to nobody, and forget what was written down and is not among it any more.

    Args:
        connection: of `Database.write`.
        thing: what they are.
        backend: the name of the backend that has them.
        found: their ids.
        now: seconds since 1970.
        grace: seconds for which they may still come to somebody.

    Returns:
        Those that were noted so long ago.
    """
    mine = (orphan.c.kind == thing.value, orphan.c.backend == backend)
    before = read_orphans(connection, thing, backend)
    for one in sorted(before.keys() - set(found)):
        connection.execute(orphan.delete().where(*mine, orphan.c.id == one))
    for one in sorted(set(found) - before.keys()):
        connection.execute(orphan.insert().values(kind=thing.value, backend=backend, id=one, found_at=now))
    return sorted(one for one in found if before.get(one, now) <= now - grace)


def delete_stale_rows(connection: sa.Connection) -> int:
    """Delete what was written of amphorae and load balancers in the moment they went; returns how many rows."""
    seen = amphora_seen.delete().where(~sa.exists().where(amphora.c.id == amphora_seen.c.amphora_id))
    counted = listener_statistics.delete().where(
        ~sa.exists().where(work.c.load_balancer_id == listener_statistics.c.load_balancer_id)
    )
    return sum(connection.execute(one).rowcount for one in (seen, counted))


def _missing(connection: sa.Connection, column: sa.Column[str], ids: Collection[str]) -> set[str]:
    """Those of the ids that are not in a column."""
    asked = sorted(ids)
    known: set[str] = set()
    for start in range(0, len(asked), _CHUNK):
        chunk = asked[start : start + _CHUNK]
        known.update(connection.execute(sa.select(column).where(column.in_(chunk))).scalars())
    return set(asked) - known
