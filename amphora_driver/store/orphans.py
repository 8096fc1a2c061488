# SPDX-License-Identifier: Apache-2.0
"""Orphans: machines and ports of a backend that no row owns.

Invariant: a row exists before the backend creates a resource, and until the backend has deleted the resource. A
resource that was listed *before* the rows were read, and that no row owns, is an orphan. The usual cause is a stopped
controller that continued its step after another controller had finished the job. Cleanup waits until the orphan has
been recorded here for long enough. The record of a resource that gets an owner or disappears is deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import sqlalchemy as sa

from amphora_driver.database.rows import chunks
from amphora_driver.database.tables import amphora, amphora_heartbeat, job, listener_statistics, orphan, vip_claim


class OrphanKind(str, Enum):
    """Resources that may be orphans, by amphora id (machines, ports) or load balancer id (VIPs)."""

    MACHINE = "machine"
    PORTS = "ports"
    VIP = "vip"


def find_unowned(connection: sa.Connection, kind: OrphanKind, found: Collection[str]) -> set[str]:
    """Return the ids without an owner, of those a backend listed before this transaction."""
    if kind is not OrphanKind.VIP:
        return _missing(connection, amphora.c.id, found)
    return _missing(connection, vip_claim.c.load_balancer_id, _missing(connection, job.c.load_balancer_id, found))


def read_orphans(connection: sa.Connection, kind: OrphanKind, backend: str) -> dict[str, float]:
    """Return the recorded orphans of a backend, with their time of discovery (seconds since 1970)."""
    rows = connection.execute(sa.select(orphan).where(orphan.c.kind == kind.value, orphan.c.backend == backend))
    return {row.id: row.found_at for row in rows}


def update_orphans(
    connection: sa.Connection, kind: OrphanKind, backend: str, found: Collection[str], now: float, grace: float
) -> list[str]:
    """Replace the recorded orphans of a backend; return those recorded for `grace` seconds."""
    mine = (orphan.c.kind == kind.value, orphan.c.backend == backend)
    before = read_orphans(connection, kind, backend)
    for one in sorted(before.keys() - set(found)):
        connection.execute(orphan.delete().where(*mine, orphan.c.id == one))
    for one in sorted(set(found) - before.keys()):
        connection.execute(orphan.insert().values(kind=kind.value, backend=backend, id=one, found_at=now))
    return sorted(one for one in found if before.get(one, now) <= now - grace)


def delete_stale_rows(connection: sa.Connection) -> int:
    """Delete heartbeat and statistics rows without an owner; return their number.

    A health manager may write them at the moment of the owner's deletion.
    """
    seen = amphora_heartbeat.delete().where(~sa.exists().where(amphora.c.id == amphora_heartbeat.c.amphora_id))
    counted = listener_statistics.delete().where(
        ~sa.exists().where(job.c.load_balancer_id == listener_statistics.c.load_balancer_id)
    )
    return sum(connection.execute(one).rowcount for one in (seen, counted))


def _missing(connection: sa.Connection, column: sa.Column[str], ids: Collection[str]) -> set[str]:
    """Return the ids that are not in a column."""
    asked = sorted(ids)
    known: set[str] = set()
    for chunk in chunks(asked):
        known.update(connection.execute(sa.select(column).where(column.in_(chunk))).scalars())
    return set(asked) - known
