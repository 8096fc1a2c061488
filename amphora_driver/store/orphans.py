# SPDX-License-Identifier: Apache-2.0
"""Orphans (machines and ports that no row owns), and senders of heartbeats with unknown amphora ids.

Invariant: a row exists before the backend creates a resource, and until the backend has deleted the resource. A
resource that was listed *before* the rows were read, and that no row owns, is an orphan. The usual cause is a stopped
controller that continued its step after another controller had finished the job. Cleanup waits until the orphan has
been recorded here for long enough. The record of a resource that gets an owner or disappears is deleted.

The rows of unknown amphorae are hints, never proof, because no known key signs such a datagram. The number of rows is
limited, so a sender of random ids does no harm. No cleanup depends on these rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from amphora_driver.database.rows import chunks
from amphora_driver.database.tables import amphora, amphora_heartbeat, job, listener_statistics, orphan, vip_claim
from amphora_driver.database.tables_fleet import unknown_amphora

MAX_UNKNOWN_AMPHORAE = 100
# Maximum number of unknown amphora ids from one source address. More ids are a mistake or an attack.
MAX_UNKNOWN_PER_ADDRESS = 5
# The row of an unknown amphora is deleted after _UNKNOWN_PURGED_AFTER seconds without heartbeats. In a full table, a
# new row may replace a row without heartbeats for _UNKNOWN_REPLACED_AFTER seconds.
_UNKNOWN_PURGED_AFTER = 86_400.0
_UNKNOWN_REPLACED_AFTER = 300.0
_LONGEST_ADDRESS = 64
_ONLY_REPORTED = (
    "only reported: no compute backend of this deployment lists its machine. It may belong to another deployment, or a "
    "backend has lost it. Check its address"
)


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


class StaleRows(msgspec.Struct, frozen=True):
    """The owners of rows that are left without them.

    Attributes:
        amphora_ids: deleted amphorae with a row of `amphora_heartbeat`.
        load_balancer_ids: deleted load balancers with rows of `listener_statistics`.
    """

    amphora_ids: Sequence[str]
    load_balancer_ids: Sequence[str]


# A health manager may write a heartbeat or statistics at the moment of the owner's deletion.
_NO_AMPHORA = ~sa.exists().where(amphora.c.id == amphora_heartbeat.c.amphora_id)
_NO_LOAD_BALANCER = ~sa.exists().where(job.c.load_balancer_id == listener_statistics.c.load_balancer_id)


def find_stale_rows(connection: sa.Connection) -> StaleRows:
    """Find heartbeat and statistics rows without an owner, without any lock.

    On MariaDB, a DELETE that searches these rows locks every row of both tables in turn. Health managers write these
    rows every second, so on Galera their writes on other nodes aborted such a DELETE again and again.
    """
    seen = sa.select(amphora_heartbeat.c.amphora_id).where(_NO_AMPHORA)
    counted = sa.select(listener_statistics.c.load_balancer_id).where(_NO_LOAD_BALANCER).distinct()
    return StaleRows(connection.execute(seen).scalars().all(), connection.execute(counted).scalars().all())


def delete_stale_rows(connection: sa.Connection, stale: StaleRows) -> int:
    """Delete the rows of these owners that still have no owner; return their number."""
    deleted = 0
    for ids in chunks(sorted(stale.amphora_ids)):
        rows = amphora_heartbeat.c.amphora_id.in_(ids), _NO_AMPHORA
        deleted += connection.execute(amphora_heartbeat.delete().where(*rows)).rowcount
    for ids in chunks(sorted(stale.load_balancer_ids)):
        counted = listener_statistics.c.load_balancer_id.in_(ids), _NO_LOAD_BALANCER
        deleted += connection.execute(listener_statistics.delete().where(*counted)).rowcount
    return deleted


def _missing(connection: sa.Connection, column: sa.Column[str], ids: Collection[str]) -> set[str]:
    """Return the ids that are not in a column."""
    asked = sorted(ids)
    known: set[str] = set()
    for chunk in chunks(asked):
        known.update(connection.execute(sa.select(column).where(column.in_(chunk))).scalars())
    return set(asked) - known


class UnknownAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown id with the sender's address."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float


def record_unknown_amphorae(connection: sa.Connection, strays: Sequence[UnknownAmphora], now: float) -> int:
    """Insert or update unknown ids; return the number of ids beyond the limits."""
    connection.execute(unknown_amphora.delete().where(unknown_amphora.c.last_at < now - _UNKNOWN_PURGED_AFTER))
    ids = sorted(one.amphora_id for one in strays)
    recorded = sa.select(unknown_amphora.c.amphora_id).where(unknown_amphora.c.amphora_id.in_(ids))
    known = set(connection.execute(recorded).scalars())
    # A controller may have recorded an amphora after the arrival of its heartbeat, so the ids are checked again.
    owned = set(connection.execute(sa.select(amphora.c.id).where(amphora.c.id.in_(ids))).scalars())
    new = []
    for one in sorted(strays, key=lambda each: each.amphora_id):
        if one.amphora_id in known:
            _update_unknown(connection, one.amphora_id, address=one.address[:_LONGEST_ADDRESS], last_at=one.last_at)
        elif one.amphora_id not in owned:
            new.append(one)
    return _insert_all_unknown(connection, new, now) if new else 0


def _insert_all_unknown(connection: sa.Connection, new: Sequence[UnknownAmphora], now: float) -> int:
    rows = connection.execute(sa.select(unknown_amphora)).all()
    addresses = Counter(row.address for row in rows)
    replaceable = sorted((row.last_at, row.amphora_id) for row in rows if row.last_at < now - _UNKNOWN_REPLACED_AFTER)
    free = MAX_UNKNOWN_AMPHORAE - len(rows)
    omitted = 0
    for one in new:
        if free <= 0 and replaceable:
            connection.execute(unknown_amphora.delete().where(unknown_amphora.c.amphora_id == replaceable.pop(0)[1]))
            free += 1
        if free <= 0 or addresses[one.address] >= MAX_UNKNOWN_PER_ADDRESS:
            omitted += 1
        elif _insert_unknown(connection, one):
            free -= 1
            addresses[one.address] += 1
    return omitted


def _insert_unknown(connection: sa.Connection, one: UnknownAmphora) -> bool:
    values = {**msgspec.structs.asdict(one), "address": one.address[:_LONGEST_ADDRESS]}
    try:
        with connection.begin_nested():
            connection.execute(unknown_amphora.insert().values(**values))
    except IntegrityError:
        # Another health manager has just inserted this row, so nothing is left to do.
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
        _update_unknown(connection, amphora_id, verdict=verdict)


def _update_unknown(connection: sa.Connection, amphora_id: str, **values: Any) -> None:
    connection.execute(unknown_amphora.update().where(unknown_amphora.c.amphora_id == amphora_id).values(**values))


def _cleanup_verdict(backend: str, grace: float) -> str:
    return (
        f"its machine in {backend} is an orphan: housekeeping removes it [amp_controller] orphan_grace ({grace:g} s) "
        "after its discovery, unless too many orphans exist at once"
    )
