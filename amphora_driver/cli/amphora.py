# SPDX-License-Identifier: Apache-2.0
"""Commands about amphorae.

Invariant: the heartbeat key is not among the columns that are read, so that it cannot be shown. Warm spares belong to
no load balancer, and are not in the list. The names of columns never change: programs read them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli import id_prefix, queries
from amphora_driver.cli.formatting import Age, Moment, Partners, Plain, Ports, Said
from amphora_driver.database.tables import amphora, work

LIST_HEAD = (
    *("ID", "Load balancer", "Role", "State", "Has VIPs", "Address", "Wanted", "Confirmed", "Reported generation"),
    *("Last heartbeat", "Silent", "Certificate expires", "Image", "Agent version", "Drift"),
)


class ListAmphorae(Lister):
    """Amphorae: whom they serve, what they confirmed, who has the VIPs, when they were heard."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--loadbalancer", metavar="ID", help="Only those of this load balancer.")
        parser.add_argument("--project", metavar="ID", help="Only those of load balancers of this project.")
        parser.add_argument("--status", metavar="STATE", help="Only those in this state: booting, ready or retiring.")
        parser.add_argument("--stale", action="store_true", help="Only those that should be heard and are not.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""

        def look(connection: sa.Connection) -> Sequence[Any]:
            # A row whose load balancer is gone is shown all the same.
            query = queries.amphorae().where(sa.or_(work.c.op.is_(None), id_prefix.IS_LOAD_BALANCER))
            if parsed_args.loadbalancer:
                chosen = id_prefix.load_balancer(connection, parsed_args.loadbalancer)
                query = query.where(amphora.c.load_balancer_id == chosen)
            if parsed_args.project:
                query = query.where(work.c.project_id == parsed_args.project)
            if parsed_args.status:
                query = query.where(amphora.c.state == parsed_args.status.lower())
            return connection.execute(query).all()

        rows: Sequence[Any] = self.app.read(look)
        if parsed_args.stale:
            before = time.time() - self.app.conf.failover.silent_after
            rows = [row for row in rows if queries.is_stale(row, before)]
        return LIST_HEAD, map(_listed, rows)


class ShowAmphora(ShowOne):
    """All that is recorded of one amphora."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("amphora", metavar="ID", help="Id of the amphora, or the beginning of it.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""

        def look(connection: sa.Connection) -> Any:
            sought = id_prefix.amphora_id(connection, parsed_args.amphora)
            return connection.execute(queries.amphorae().where(amphora.c.id == sought)).one()

        shown = _shown(self.app.read(look))
        return tuple(shown), tuple(shown.values())


def _listed(row: Any) -> tuple[Any, ...]:
    return (
        *(row.id, row.load_balancer_id, row.role, row.state, Said(row.holds_vip), Plain(row.management_address)),
        *(Plain(row.wanted), row.confirmed, Plain(row.heard), Age(row.seen_at), Plain(row.silent)),
        *(Moment(row.certificate_expires_at), Plain(row.image), Plain(row.agent_version), Plain(row.drift)),
    )


def _shown(row: Any) -> dict[str, Any]:
    return {
        **dict(zip(LIST_HEAD, _listed(row), strict=True)),
        "Verdict": Plain(row.verdict),
        "Reason": Plain(row.reason),
        "Compute ID": Plain(row.compute_id),
        "Created": Moment(row.created_at),
        "Booted": Moment(row.booted_at),
        "Ready": Moment(row.ready_at),
        "Confirmed at": Moment(row.confirmed_at),
        "Handed over": bool(row.handed_over),
        "Drains until": Moment(row.drains_until or None),
        "Certificate issued": Moment(row.certificate_issued_at),
        "Certificate authority": Plain(row.certificate_authority),
        "Trusts": Plain(row.trusts),
        "Compared": Age(row.audited_at),
        "Drifts": bool(row.drifts),
        "Partners": Partners(msgspec.json.decode(row.partners) if row.partners else []),
        "Ports": Ports(msgspec.json.decode(row.plugged) if row.plugged else []),
    }
