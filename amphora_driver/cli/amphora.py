# SPDX-License-Identifier: Apache-2.0
"""Commands about amphorae and warm spares.

Invariant: the queries never read the heartbeat key, so no command can show it. `amphora list` excludes warm spares,
which belong to no load balancer. `spare list` counts a booting spare as booting, never as ready. Programs read the
column names, so these never change.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli import queries
from amphora_driver.cli.command import AMPHORA, Lister, PagedLister, ShowOne, Table, argument
from amphora_driver.cli.formatting import Age, Counts, Partners, Ports, Timestamp, Value, YesNo
from amphora_driver.database.tables import amphora, job
from amphora_driver.model.amphora import AmphoraState, describe_resources
from amphora_driver.store import spare_pools
from amphora_driver.store.spare_pools import SparePoolSpec

LIST_HEAD = (
    *("ID", "Load balancer", "Role", "State", "Has VIPs", "Address", "Wanted", "Confirmed", "Reported generation"),
    *("Last heartbeat", "Silent", "Certificate expires", "Image", "Agent version", "Drift"),
)
SPARES_HEAD = (
    *("Pool", "Compute", "Flavor", "Zone", "Image tag", "Wanted", "Ready", "Booting", "Leaving", "Load balancers"),
    *("Images", "Attempts", "Error"),
)


class ListAmphorae(PagedLister):
    """List amphorae: load balancer, confirmed generation, VIPs and last heartbeat of each."""

    read_only_mode = True
    arguments = (
        argument("--loadbalancer", metavar="ID", help="Only amphorae of this load balancer."),
        argument("--project", metavar="ID", help="Only amphorae of this project's load balancers."),
        argument("--status", metavar="STATE", help="Only amphorae in this state: booting, ready, retiring."),
        argument("--stale", action="store_true", help="Only amphorae without a recent heartbeat."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        def read(connection: sa.Connection) -> Sequence[Any]:
            query = queries.amphora_query().where(queries.IS_NO_SPARE)
            if parsed_args.loadbalancer:
                chosen = queries.find_load_balancer_id(connection, parsed_args.loadbalancer)
                query = query.where(amphora.c.load_balancer_id == chosen)
            if parsed_args.project:
                query = query.where(job.c.project_id == parsed_args.project)
            if parsed_args.status:
                query = query.where(amphora.c.state == parsed_args.status.lower())
            if parsed_args.stale:
                query = query.where(queries.is_stale_row(time.time() - self.app.conf.amp_failover.silent_after))
            if parsed_args.marker:
                query = query.where(queries.select_after(connection, parsed_args.marker))
            # The query reads one row more than the limit. This row shows that the list continues.
            limit = self.page_size(parsed_args)
            return connection.execute(query.limit(limit + 1) if limit > 0 else query).all()

        rows: Sequence[Any] = self.app.read(read)
        # The query has already skipped the rows up to the marker, so `page` must not search for the marker.
        return LIST_HEAD, self.page(map(_list_row, rows), argparse.Namespace(**{**vars(parsed_args), "marker": None}))


class ShowAmphora(ShowOne):
    """Show everything that is recorded about one amphora."""

    read_only_mode = True
    arguments = (AMPHORA,)

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        def read(connection: sa.Connection) -> Any:
            chosen = queries.find_amphora_id(connection, parsed_args.amphora)
            return connection.execute(queries.amphora_query(with_ports=True).where(amphora.c.id == chosen)).one()

        row = self.app.read(read)
        return {
            **dict(zip(LIST_HEAD, _list_row(row), strict=True)),
            "Verdict": Value(row.verdict),
            "Reason": Value(row.reason),
            "Compute ID": Value(row.compute_id),
            "Host": Value(row.host),
            "Zone": Value(row.zone),
            "Created": Timestamp(row.created_at),
            "Booted": Timestamp(row.booted_at),
            "Ready": Timestamp(row.ready_at),
            "Confirmed at": Timestamp(row.confirmed_at),
            "Handed over": bool(row.handed_over),
            "Drains until": Timestamp(row.drains_until or None),
            "Certificate issued": Timestamp(row.certificate_issued_at),
            "Certificate authority": Value(row.certificate_authority),
            "Trusts": Value(row.trusts),
            "Compared": Age(row.audited_at),
            "Drifts": bool(row.drifts),
            "Near limit": Value(describe_resources(row.near_limit.split(",")) if row.near_limit else None),
            "Partners": Partners(msgspec.json.decode(row.partners) if row.partners else []),
            "Ports": Ports(msgspec.json.decode(row.plugged) if row.plugged else []),
        }


class ListSpares(Lister):
    """List the pools of warm spares: desired, ready and booting spares, and load balancers that use them."""

    read_only_mode = True

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        def read(connection: sa.Connection) -> list[tuple[Any, ...]]:
            return _spare_rows(connection, self.app.conf.amp_spares.number)

        return SPARES_HEAD, self.app.read(read)


def _list_row(row: Any) -> tuple[Any, ...]:
    return (
        *(row.id, row.load_balancer_id, row.role, row.state, YesNo(row.holds_vip), Value(row.management_address)),
        *(Value(row.wanted), row.confirmed, Value(row.heard), Age(row.seen_at), Value(row.silent)),
        *(Timestamp(row.certificate_expires_at), Value(row.image), Value(row.agent_version), Value(row.drift)),
    )


def _spare_rows(connection: sa.Connection, configured: int) -> list[tuple[Any, ...]]:
    pools = spare_pools.list_pools(connection)
    spares = connection.execute(
        sa.select(amphora.c.load_balancer_id, amphora.c.state, amphora.c.image)
        .join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
        .where(job.c.op == spare_pools.OP)
    ).all()
    counted = sa.select(job.c.spare_pool, sa.func.count()).where(job.c.spare_pool.is_not(None))
    users: dict[str | None, int] = dict(connection.execute(counted.group_by(job.c.spare_pool)).tuples().all())
    return [
        _spare_row(pool, [one for one in spares if one.load_balancer_id == pool.load_balancer_id], users, configured)
        for pool in pools
    ]


def _spare_row(pool: Any, spares: Sequence[Any], users: dict[str | None, int], configured: int) -> tuple[Any, ...]:
    spec = msgspec.json.decode(pool.spares, type=SparePoolSpec)
    user_count = users.get(pool.load_balancer_id, 0)
    wanted = (configured if spec.number is None else spec.number) if user_count else 0
    states = Counter(one.state for one in spares)
    images = Counter(one.image for one in spares if one.image and one.state == AmphoraState.READY.value)
    return (
        *(pool.load_balancer_id, spec.compute, spec.compute_flavor, spec.compute_zone, spec.image_tag, wanted),
        *(states[one.value] for one in (AmphoraState.READY, AmphoraState.BOOTING, AmphoraState.RETIRING)),
        *(user_count, Counts(images), pool.attempts, pool.error),
    )
