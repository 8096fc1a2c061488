# SPDX-License-Identifier: Apache-2.0
"""Queries about load balancers and amphorae, and the lookup of an object by the prefix of its id.

Invariant: one reading transaction gives a consistent result, and the number of statements does not depend on the number
of load balancers. Functions without I/O interpret the rows.

Invariant: a prefix stands for exactly one object. The lookup refuses a prefix of several ids, so no command acts on the
wrong object. A pool of warm spares is not a load balancer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.joined_rows import join_rows, read_rows
from amphora_driver.database.rows import plain_columns
from amphora_driver.database.tables import amphora, amphora_heartbeat, desired_object, job, object_status, request
from amphora_driver.database.tables_fleet import failover, silent_amphora
from amphora_driver.errors import UnknownObject
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.store import desired_objects
from amphora_driver.store.generations import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_UNKNOWN = "unknown"
# A row of the table `job` with the operation `spares` belongs to a pool of warm spares, not to a load balancer.
IS_LOAD_BALANCER = job.c.op != Op.SPARES
# The operation is NULL if the load balancer of an amphora has no row in the table `job`. Such an amphora is no warm
# spare.
IS_NO_SPARE = sa.or_(job.c.op.is_(None), IS_LOAD_BALANCER)
# Maximum number of ids in the error about an ambiguous prefix.
_MAX_LISTED = 10
# Number of load balancers that a list reads at once.
_PART = 500
# The columns of a status that commands show.
STATUS_COLUMNS = (
    *(object_status.c.object_id, object_status.c.kind, object_status.c.provisioning, object_status.c.operating),
    *(object_status.c.reason, object_status.c.since, object_status.c.pending),
)
# The order of amphorae in lists.
_ORDER = (amphora.c.load_balancer_id, amphora.c.created_at, amphora.c.id)


class LoadBalancerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One load balancer.

    Attributes:
        work: row of the table `job`, with `to_report` and `pending` (numbers of objects).
        status: row of the load balancer's own status; None before the first report.
        name, addresses: name and VIPs; None and empty after the deletion of the load balancer.
        amphorae: rows of `amphora_query`, oldest first.
        since: acceptance time of the oldest request that is not applied (seconds since 1970).
        failovers: fail-overs in progress, oldest first.
        silent: ids of silent amphorae.
    """

    work: Any
    status: Any
    name: str | None = None
    addresses: tuple[str, ...] = ()
    amphorae: Sequence[Any] = ()
    since: float | None = None
    failovers: Sequence[Any] = ()
    silent: frozenset[str] = frozenset()


class _StatusRow(msgspec.Struct, frozen=True, array_like=True):
    """The columns of `list_statuses`."""

    load_balancer_id: str
    op: str
    object_id: str | None
    pending: int | None
    provisioning: str | None
    operating: str | None
    since: float | None


def iter_load_balancers(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], after: str | None = None
) -> Iterator[LoadBalancerSummary]:
    """Yield the load balancers that meet the conditions, ordered by id, and read them in parts.

    With `after`, only load balancers with a greater id.
    """
    own = job.c.load_balancer_id
    while True:
        here = conditions if after is None else (*conditions, own > after)
        part = sa.select(own).where(IS_LOAD_BALANCER, *here).order_by(own).limit(_PART)
        ids = connection.execute(part).scalars().all()
        if ids:
            yield from list_load_balancers(connection, *conditions, within=(ids[0], ids[-1]))
        if len(ids) < _PART:
            return
        after = ids[-1]


def iter_chosen(
    connection: sa.Connection, ids: Sequence[str], *conditions: sa.ColumnElement[bool]
) -> Iterator[LoadBalancerSummary]:
    """Yield the load balancers with these ids that meet the conditions, and read them in parts."""
    for first in range(0, len(ids), _PART):
        yield from list_load_balancers(connection, *conditions, job.c.load_balancer_id.in_(ids[first : first + _PART]))


def list_statuses(connection: sa.Connection) -> list[LoadBalancerSummary]:
    """Return all load balancers with their statuses and pending requests only, ordered by id."""
    status = (object_status.c.pending, object_status.c.provisioning, object_status.c.operating)
    columns = (job.c.load_balancer_id, job.c.op, object_status.c.object_id, *status, pending_since().label("since"))
    own = job.outerjoin(object_status, object_status.c.object_id == job.c.load_balancer_id)
    found = sa.select(*columns).select_from(own).where(IS_LOAD_BALANCER).subquery()
    rows = read_rows(connection, join_rows(found, found.c.load_balancer_id, *found.c), _StatusRow)
    rows.sort(key=lambda one: one.load_balancer_id)
    return [LoadBalancerSummary(work=row, status=row if row.object_id else None, since=row.since) for row in rows]


def list_load_balancers(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], within: tuple[str, str] | None = None
) -> list[LoadBalancerSummary]:
    """Return the load balancers that meet the conditions on the table `job`, ordered by id.

    With `within`, only load balancers from the first to the second id.
    """

    # Each table has its own condition on the ids. With a condition on `job` only, PostgreSQL reads the whole tables.
    def part(table: sa.Table) -> list[sa.ColumnElement[bool]]:
        return [] if within is None else [table.c.load_balancer_id.between(*within)]

    chosen = sa.select(job.c.load_balancer_id).where(IS_LOAD_BALANCER, *part(job), *conditions)
    more = (count_pending().label("pending"), count_unreported().label("to_report"), pending_since().label("since"))
    columns = (*plain_columns(job, "reread"), *more)
    work = sa.select(*columns).where(IS_LOAD_BALANCER, *part(job), *conditions).order_by(job.c.load_balancer_id)
    rows = connection.execute(work).all()

    def of_chosen(table: sa.Table, *more: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        return sa.and_(table.c.load_balancer_id.in_(chosen), *part(table), *more)

    main = of_chosen(object_status, object_status.c.kind == Kind.LOAD_BALANCER.value)
    statuses = {one.object_id: one for one in connection.execute(sa.select(*STATUS_COLUMNS).where(main))}
    object_of = of_chosen(desired_object, desired_object.c.kind == Kind.LOAD_BALANCER.value, ~desired_object.c.removed)
    bodies = connection.execute(sa.select(desired_object.c.id, desired_object.c.body).where(object_of))
    named = {one.id: desired_objects.read_name_and_addresses(one.body) for one in bodies}
    machines = _group_by_load_balancer(connection.execute(amphora_query().where(of_chosen(amphora))))
    in_progress = sa.select(failover).where(of_chosen(failover, failover.c.ended_at.is_(None))).order_by(failover.c.id)
    failovers = _group_by_load_balancer(connection.execute(in_progress))
    silent = _group_by_load_balancer(connection.execute(sa.select(silent_amphora).where(of_chosen(silent_amphora))))
    return [
        LoadBalancerSummary(
            work=row,
            status=statuses.get(row.load_balancer_id),
            name=name,
            addresses=addresses,
            amphorae=machines[row.load_balancer_id],
            since=row.since,
            failovers=failovers[row.load_balancer_id],
            silent=frozenset(one.amphora_id for one in silent[row.load_balancer_id]),
        )
        for row in rows
        for name, addresses in [named.get(row.load_balancer_id, (None, ()))]
    ]


def amphora_query(*, with_ports: bool = False) -> sa.Select[Any]:
    """Return a query of amphorae with last heartbeat and desired generation, without the heartbeat key.

    The ports and partners of an amphora are longer than all its other values together.
    """
    heard = amphora_heartbeat.c
    omitted = ("heartbeat_key",) if with_ports else ("heartbeat_key", "plugged", "partners")
    columns = (
        *plain_columns(amphora, *omitted),
        *(heard.seen_at, heard.holds_vip, heard.agent_version, heard.generation.label("heard")),
        *(job.c.generation.label("wanted"), job.c.op, job.c.topology),
        *(silent_amphora.c.kind.label("silent"), silent_amphora.c.verdict),
    )
    together = (
        amphora.outerjoin(amphora_heartbeat, heard.amphora_id == amphora.c.id)
        .outerjoin(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
        .outerjoin(silent_amphora, silent_amphora.c.amphora_id == amphora.c.id)
    )
    return sa.select(*columns).select_from(together).order_by(*_ORDER)


class CheckedAmphora(msgspec.Struct, frozen=True, array_like=True):
    """The columns of `amphora_query` that `status check` needs."""

    id: str
    load_balancer_id: str
    state: str
    seen_at: float | None
    silent: str | None
    drifts: bool | int | None
    drift: str | None
    near_limit: str | None
    certificate_issued_at: float | None
    certificate_expires_at: float | None
    agent_version: str | None
    image: str | None


_CHECKED = join_rows(
    amphora.outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id)
    .outerjoin(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
    .outerjoin(silent_amphora, silent_amphora.c.amphora_id == amphora.c.id),
    amphora.c.id,
    *(amphora.c.id, amphora.c.load_balancer_id, amphora.c.state, amphora_heartbeat.c.seen_at, silent_amphora.c.kind),
    *(amphora.c.drifts, amphora.c.drift, amphora.c.near_limit),
    *(amphora.c.certificate_issued_at, amphora.c.certificate_expires_at),
    *(amphora_heartbeat.c.agent_version, amphora.c.image),
).where(IS_NO_SPARE)


def list_checked_amphorae(connection: sa.Connection) -> list[CheckedAmphora]:
    """Return all amphorae except spares, ordered by id."""
    return sorted(read_rows(connection, _CHECKED, CheckedAmphora), key=lambda one: one.id)


def select_after(connection: sa.Connection, amphora_id: str) -> sa.ColumnElement[bool]:
    """Return the condition for the rows of `amphora_query` after this amphora.

    Raises:
        UnknownObject: no amphora has this id.
    """
    marker = connection.execute(sa.select(*_ORDER).where(amphora.c.id == amphora_id)).first()
    if marker is None:
        raise UnknownObject(f"list the rows after {amphora_id}", "no amphora has this id")
    following: sa.ColumnElement[bool] = sa.false()
    for column in reversed(_ORDER):
        value = getattr(marker, column.name)
        following = sa.or_(column > value, sa.and_(column == value, following))
    return following


def is_stale_row(before: float) -> sa.ColumnElement[bool]:
    """Return the condition of `is_stale` for `amphora_query`."""
    silent = sa.func.coalesce(amphora_heartbeat.c.seen_at, 0.0) < before
    return sa.and_(amphora.c.state != AmphoraState.BOOTING.value, silent)


def count_pending() -> sa.ScalarSelect[Any]:
    """Return a subquery for statements about `job`: number of objects that wait for a confirmation."""
    return _count_statuses(object_status.c.pending.is_not(None))


def count_unreported() -> sa.ScalarSelect[Any]:
    """Return a subquery for statements about `job`: number of objects with an unreported status."""
    return _count_statuses(object_status.c.version > object_status.c.reported)


def pending_since() -> sa.ColumnElement[Any]:
    """Return a column for statements about `job`: acceptance time of the oldest pending request."""
    # The condition on the generation lets the database use an index and skip the history of old requests.
    newer = sa.and_(request.c.load_balancer_id == job.c.load_balancer_id, request.c.generation > job.c.applied)
    unapplied = (newer, request.c.applied_at.is_(None))
    oldest = sa.select(sa.func.min(request.c.accepted_at)).where(*unapplied).scalar_subquery()
    # No request is newer than the job. So the database searches for requests of few load balancers of a fleet.
    return sa.case((job.c.generation > job.c.applied, oldest))


def provisioning_status(one: LoadBalancerSummary) -> str:
    """Return the provisioning status that Octavia's users see, as far as the driver's rows determine it."""
    row = one.status
    if row is None:
        return _UNKNOWN
    if row.pending is not None and row.provisioning != Provisioning.ERROR.value:
        if one.work.op == Op.DELETE:
            return "PENDING_DELETE"
        return "PENDING_UPDATE" if row.provisioning else "PENDING_CREATE"
    return str(row.provisioning or _UNKNOWN)


def operating_status(one: LoadBalancerSummary) -> str:
    """Return the operating status that Octavia's users see."""
    return str(one.status.operating or "OFFLINE") if one.status is not None else _UNKNOWN


def vip_holder(machines: Iterable[Any]) -> str | None:
    """Return the id of the amphora that holds the VIPs by the latest report, or of a SINGLE amphora."""
    ready = [one for one in machines if one.state != AmphoraState.BOOTING.value]
    holding = [one for one in ready if one.holds_vip]
    if holding:
        return str(max(holding, key=lambda one: one.seen_at or 0.0).id)
    alone = [one for one in ready if one.topology == "SINGLE" and one.confirmed]
    return str(alone[-1].id) if alone else None


def oldest_heartbeat(machines: Iterable[Any]) -> float | None:
    """Return the earliest last heartbeat of the ready amphorae; 0 if one has never sent a heartbeat."""
    ready = [one for one in machines if one.state == AmphoraState.READY.value]
    return min((one.seen_at or 0.0 for one in ready), default=None)


def is_stale(machine: Any, before: float) -> bool:
    """Whether an amphora that has booted has sent no heartbeat since a time (seconds since 1970)."""
    return machine.state != AmphoraState.BOOTING.value and bool((machine.seen_at or 0.0) < before)


def find_load_balancer_id(connection: sa.Connection, prefix: str, *, deleted: bool = False) -> str:
    """Return the id of the load balancer with this prefix; raises UnknownObject without exactly one.

    With `deleted`, the function finds deleted load balancers, of which only requests or fail-overs are recorded.
    """
    sources = [sa.select(job.c.load_balancer_id.label("id")).where(IS_LOAD_BALANCER)]
    if deleted:
        sources += [sa.select(table.c.load_balancer_id.label("id")) for table in (request, failover)]
    return _find_unique(connection, sources, "load balancer", prefix)


def find_amphora_id(connection: sa.Connection, prefix: str) -> str:
    """Return the id of the amphora or spare with this prefix; raises UnknownObject without exactly one."""
    return _find_unique(connection, [sa.select(amphora.c.id.label("id"))], "amphora", prefix)


def _find_unique(connection: sa.Connection, sources: list[sa.Select[Any]], noun: str, prefix: str) -> str:
    every = sa.union(*sources).subquery()
    query = sa.select(every.c.id).where(every.c.id.startswith(prefix, autoescape=True)).order_by(every.c.id)
    found = list(connection.execute(query.limit(_MAX_LISTED + 1)).scalars()) if prefix else []
    # A complete id may also be the beginning of longer ids. The complete id has priority.
    if prefix in found:
        return prefix
    if not found:
        remedy = f"List the ids: amphoractl {noun.replace(' ', '')} list."
        raise UnknownObject(f"find {noun} {prefix}", "nothing is recorded under this id", remedy)
    if len(found) > 1:
        listed = ", ".join(found[:_MAX_LISTED]) + (" and others" if len(found) > _MAX_LISTED else "")
        raise UnknownObject(f"find {noun} {prefix}", f"{listed} have this prefix", "Give more characters of the id.")
    return str(found[0])


def _count_statuses(condition: sa.ColumnElement[bool]) -> sa.ScalarSelect[Any]:
    counted = sa.select(sa.func.count()).where(object_status.c.load_balancer_id == job.c.load_balancer_id, condition)
    return counted.scalar_subquery()


def _group_by_load_balancer(rows: Iterable[Any]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.load_balancer_id].append(row)
    return found
