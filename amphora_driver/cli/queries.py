# SPDX-License-Identifier: Apache-2.0
"""What is recorded of load balancers, put together from all tables that know something of them.

Invariant: everything is of one reading transaction, and a fleet costs as many statements as one load balancer. What a
row means is decided by functions without I/O.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli import id_prefix
from amphora_driver.database.tables import amphora, amphora_seen, request, status, wanted_object, work
from amphora_driver.database.tables_fleet import failover, silence
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.store.requests import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_UNKNOWN = "unknown"


class Named(msgspec.Struct, frozen=True):
    """Of a recorded load balancer what everybody wants to see; the rest of the row is not decoded."""

    name: str | None = None
    vip: Vip | None = None
    additional_vips: tuple[Vip, ...] = ()


class Balancer(msgspec.Struct, frozen=True, kw_only=True):
    """One load balancer.

    Attributes:
        work: its row of the table `work`, with `to_report` and `pending` (numbers of objects) beside it.
        status: of the load balancer itself; None if nothing was ever said.
        named: None once it is removed.
        amphorae: rows of `amphora` and what was heard of each, the oldest first.
        since: when the oldest request was accepted that is not applied yet (seconds since 1970).
        failovers: those that go on, the oldest first.
        silent: ids of amphorae nobody hears.
    """

    work: Any
    status: Any
    named: Named | None
    amphorae: Sequence[Any] = ()
    since: float | None = None
    failovers: Sequence[Any] = ()
    silent: frozenset[str] = frozenset()


def balancers(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[Balancer]:
    """Load balancers, by id.

    Args:
        connection: of a reading transaction.
        conditions: on the table `work`.
    """
    chosen = sa.select(work.c.load_balancer_id).where(id_prefix.IS_LOAD_BALANCER, *conditions)
    rows = connection.execute(_work(chosen)).all()

    def mine(table: sa.Table, *more: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        return sa.and_(table.c.load_balancer_id.in_(chosen), *more)

    main = mine(status, status.c.kind == Kind.LOAD_BALANCER.value)
    said = {one.object_id: one for one in connection.execute(sa.select(status).where(main))}
    object_of = mine(wanted_object, wanted_object.c.kind == Kind.LOAD_BALANCER.value, ~wanted_object.c.removed)
    bodies = connection.execute(sa.select(wanted_object.c.id, wanted_object.c.body).where(object_of))
    named = {one.id: msgspec.json.decode(one.body, type=Named) for one in bodies}
    machines = _grouped(connection.execute(amphorae().where(mine(amphora))))
    going_on = sa.select(failover).where(mine(failover, failover.c.ended_at.is_(None))).order_by(failover.c.id)
    failovers = _grouped(connection.execute(going_on))
    silent = _grouped(connection.execute(sa.select(silence).where(mine(silence))))
    return [
        Balancer(
            work=row,
            status=said.get(row.load_balancer_id),
            named=named.get(row.load_balancer_id),
            amphorae=machines[row.load_balancer_id],
            since=row.since,
            failovers=failovers[row.load_balancer_id],
            silent=frozenset(one.amphora_id for one in silent[row.load_balancer_id]),
        )
        for row in rows
    ]


def amphorae() -> sa.Select[Any]:
    """Amphorae with what was heard of each and what is wanted of it, without the key; conditions may follow."""
    heard = amphora_seen.c
    columns = (
        *(column for column in amphora.c if column.name != "heartbeat_key"),
        *(heard.seen_at, heard.holds_vip, heard.agent_version, heard.generation.label("heard")),
        *(work.c.generation.label("wanted"), work.c.op, work.c.topology),
        *(silence.c.kind.label("silent"), silence.c.verdict),
    )
    together = (
        amphora.outerjoin(amphora_seen, heard.amphora_id == amphora.c.id)
        .outerjoin(work, work.c.load_balancer_id == amphora.c.load_balancer_id)
        .outerjoin(silence, silence.c.amphora_id == amphora.c.id)
    )
    order = (amphora.c.load_balancer_id, amphora.c.created_at, amphora.c.id)
    return sa.select(*columns).select_from(together).order_by(*order)


def pending() -> sa.ScalarSelect[Any]:
    """How many objects of a load balancer wait to be confirmed; for a statement about `work`."""
    return _number(status.c.pending.is_not(None))


def to_report() -> sa.ScalarSelect[Any]:
    """Of how many objects Octavia is to be told; likewise."""
    return _number(status.c.version > status.c.reported)


def pending_since() -> sa.ScalarSelect[Any]:
    """When the oldest request was accepted that is not applied yet; likewise."""
    return (
        sa.select(sa.func.min(request.c.accepted_at))
        .where(request.c.load_balancer_id == work.c.load_balancer_id, request.c.applied_at.is_(None))
        .scalar_subquery()
    )


def provisioning(one: Balancer) -> str:
    """The provisioning status Octavia's users see, as far as it follows from our rows."""
    said = one.status
    if said is None:
        return _UNKNOWN
    if said.pending is not None and said.provisioning != Provisioning.ERROR.value:
        if one.work.op == Op.DELETE:
            return "PENDING_DELETE"
        return "PENDING_UPDATE" if said.provisioning else "PENDING_CREATE"
    return str(said.provisioning or _UNKNOWN)


def operating(one: Balancer) -> str:
    """The operating status Octavia's users see."""
    return str(one.status.operating or "OFFLINE") if one.status is not None else _UNKNOWN


def holder(machines: Iterable[Any]) -> str | None:
    """The amphora that has the VIPs, as far as they say: the one that said so last; one on its own has them."""
    ready = [one for one in machines if one.state != AmphoraState.BOOTING.value]
    holding = [one for one in ready if one.holds_vip]
    if holding:
        return str(max(holding, key=lambda one: one.seen_at or 0.0).id)
    alone = [one for one in ready if one.topology == "SINGLE" and one.confirmed]
    return str(alone[-1].id) if alone else None


def heard_least(machines: Iterable[Any]) -> float | None:
    """When the amphora was heard that was not heard for the longest time; 0 if one that is ready never was."""
    ready = [one for one in machines if one.state == AmphoraState.READY.value]
    return min((one.seen_at or 0.0 for one in ready), default=None)


def is_stale(machine: Any, before: float) -> bool:
    """Whether an amphora that should be heard was not.

    Args:
        machine: a row of `amphorae`.
        before: when it should have been heard at the latest (seconds since 1970).
    """
    if machine.state == AmphoraState.BOOTING.value:
        return False
    return bool((machine.seen_at or 0.0) < before)


def _work(chosen: sa.Select[Any]) -> sa.Select[Any]:
    more = (pending().label("pending"), to_report().label("to_report"), pending_since().label("since"))
    query = sa.select(*(column for column in work.c if column.name != "reread"), *more)
    return query.where(work.c.load_balancer_id.in_(chosen)).order_by(work.c.load_balancer_id)


def _number(condition: sa.ColumnElement[bool]) -> sa.ScalarSelect[Any]:
    counted = sa.select(sa.func.count()).where(status.c.load_balancer_id == work.c.load_balancer_id, condition)
    return counted.scalar_subquery()


def _grouped(rows: Iterable[Any]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.load_balancer_id].append(row)
    return found
