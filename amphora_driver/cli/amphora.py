# SPDX-License-Identifier: Apache-2.0
"""Commands about amphorae.

Invariant: the heartbeat key is not among the columns that are read, so that it cannot be shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli.columns import Age, Moment, Partners, Ports, Said
from amphora_driver.errors import UnknownObject
from amphora_driver.store.tables import amphora, amphora_seen

_LIST = {
    "ID": amphora.c.id,
    "Load balancer": amphora.c.load_balancer_id,
    "Role": amphora.c.role,
    "State": amphora.c.state,
    "Has VIPs": amphora_seen.c.holds_vip,
    "Address": amphora.c.management_address,
    "Confirmed": amphora.c.confirmed,
    "Last heartbeat": amphora_seen.c.seen_at,
    "Certificate expires": amphora.c.certificate_expires_at,
}
_SHOW = {
    **_LIST,
    "Reported generation": amphora_seen.c.generation,
    "Compute ID": amphora.c.compute_id,
    "Created": amphora.c.created_at,
    "Ready": amphora.c.ready_at,
    "Drains until": amphora.c.drains_until,
    "Reason": amphora.c.reason,
    "Partners": amphora.c.partners,
    "Ports": amphora.c.plugged,
}
_SHAPES: dict[str, Callable[[Any], object]] = {
    "Has VIPs": Said,
    "Last heartbeat": Age,
    "Certificate expires": Moment,
    "Created": Moment,
    "Ready": Moment,
    "Drains until": lambda at: Moment(at or None),
    "Partners": lambda text: Partners(msgspec.json.decode(text) if text else []),
    "Ports": lambda text: Ports(msgspec.json.decode(text) if text else []),
}


class ListAmphorae(Lister):
    """Amphorae: whom they serve, what they confirmed, who has the VIPs, when they were heard."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--loadbalancer", metavar="ID", help="Only those of this load balancer.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        query = _select(_LIST).order_by(amphora.c.load_balancer_id, amphora.c.created_at, amphora.c.id)
        if parsed_args.loadbalancer:
            query = query.where(amphora.c.load_balancer_id == parsed_args.loadbalancer)
        rows = self.app.read(lambda connection: connection.execute(query).all())
        return tuple(_LIST), (_shaped(_LIST, row) for row in rows)


class ShowAmphora(ShowOne):
    """All that is recorded of one amphora."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("amphora", metavar="ID", help="Id of the amphora.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        query = _select(_SHOW).where(amphora.c.id == parsed_args.amphora)
        row = self.app.read(lambda connection: connection.execute(query).first())
        if row is None:
            raise UnknownObject(f"show amphora {parsed_args.amphora}", "nothing is recorded under this id")
        return tuple(_SHOW), _shaped(_SHOW, row)


def _select(columns: dict[str, Any]) -> sa.Select[Any]:
    together = amphora.outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
    return sa.select(*columns.values()).select_from(together)


def _shaped(columns: dict[str, Any], row: sa.Row[Any]) -> tuple[Any, ...]:
    return tuple(_SHAPES[name](value) if name in _SHAPES else value for name, value in zip(columns, row, strict=True))
