# SPDX-License-Identifier: Apache-2.0
"""Commands about load balancers.

Invariant: what is shown is what the rows say, wanted and served side by side, without interpretation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli.columns import Chosen, Counts, Moment, Requests
from amphora_driver.controller import configured, vips
from amphora_driver.errors import UnknownObject
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.vocabulary import Kind
from amphora_driver.render import haproxy
from amphora_driver.store import claims, wanted
from amphora_driver.store.tables import amphora, request, wanted_object, work

_LIST = {
    "ID": work.c.load_balancer_id,
    "Project": work.c.project_id,
    "Op": work.c.op,
    "Wanted": work.c.generation,
    "Applied": work.c.applied,
    "Dirty": work.c.dirty,
    "Owner": work.c.owner,
    "Attempts": work.c.attempts,
    "Error": work.c.error,
}


class ListLoadBalancers(Lister):
    """Load balancers: what generation is wanted, which one is served, and who works on it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--project", metavar="ID", help="Only those of this project.")
        parser.add_argument("--dirty", action="store_true", help="Only those with work left.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        query = sa.select(*_LIST.values()).order_by(work.c.load_balancer_id)
        if parsed_args.project:
            query = query.where(work.c.project_id == parsed_args.project)
        if parsed_args.dirty:
            query = query.where(work.c.dirty)
        rows = self.app.read(lambda connection: connection.execute(query).all())
        return tuple(_LIST), (tuple(row) for row in rows)


class ShowLoadBalancer(ShowOne):
    """One load balancer, with the calls accepted for it lately."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer.")
        parser.add_argument(
            "--requests", type=int, default=10, metavar="NUMBER", help="How many calls to show (default: 10)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        shown: dict[str, Any] = self.app.read(
            lambda connection: _show(connection, parsed_args.load_balancer, parsed_args.requests)
        )
        return tuple(shown), tuple(shown.values())


class ShowHistory(Lister):
    """The calls accepted for a load balancer, newest first: when, what became of them, after how long."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer; it may be gone.")
        parser.add_argument(
            "--requests", type=int, default=100, metavar="NUMBER", help="How many calls to show (default: 100)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        sought = parsed_args.load_balancer
        rows = self.app.read(lambda connection: _requests(connection, sought, parsed_args.requests))
        if not rows:
            raise UnknownObject(f"show the history of load balancer {sought}", "nothing is recorded under this id")
        return ("Generation", "Action", "Object", "Accepted", "Applied", "Seconds", "Outcome"), map(_told, rows)


class RenderLoadBalancer(Command):
    """Print the haproxy.cfg that the recorded load balancer becomes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print; 1 if a part of it cannot be rendered."""
        tree = self.app.read(lambda connection: wanted.load_tree(connection, parsed_args.load_balancer))
        rendered = haproxy.render(tree, defaults=configured.defaults(self.app.conf), shared_tickets=True)
        self.app.stdout.write(rendered.text if rendered.text is not None else "# HAProxy is not wanted\n")
        for refusal in rendered.refused:
            self.app.stderr.write(f"{refusal}\n")
        return 1 if rendered.refused else 0


def _show(connection: sa.Connection, load_balancer_id: str, requests: int) -> dict[str, Any]:
    row = connection.execute(sa.select(work).where(work.c.load_balancer_id == load_balancer_id)).first()
    if row is None:
        raise UnknownObject(f"show load balancer {load_balancer_id}", "nothing is recorded under this id")
    shown = {name: getattr(row, column.name) for name, column in _LIST.items()}
    return {
        **shown,
        "Topology": row.topology,
        "Compute": row.compute,
        "Network": row.network,
        **_vips(connection, load_balancer_id),
        "Profile": Chosen(_profile(connection, load_balancer_id)),
        "Committed": row.committed,
        "Epoch": row.epoch,
        "Leased until": Moment(row.leased_until),
        "Next attempt": Moment(row.free_at or None),
        "Objects": Counts(_objects(connection, load_balancer_id)),
        "Amphorae": Counts(_amphorae(connection, load_balancer_id)),
        "Requests": Requests(_requests(connection, load_balancer_id, requests)),
    }


def _vips(connection: sa.Connection, load_balancer_id: str) -> dict[str, Any]:
    """The addresses, what they have besides, and why something of it is missing.

    Octavia's users see no address that was found after the creation: an operator finds it here.
    """
    try:
        node: LoadBalancer = wanted.load(connection, Kind.LOAD_BALANCER, load_balancer_id)
    except UnknownObject:
        return {}
    wish = claims.wish_of(connection, load_balancer_id)
    waiting = "" if wish is None else f" ({wish.reason}; asked {wish.attempts} times)"
    shown: dict[str, Any] = {"VIPs": ", ".join(vip.address or f"not known yet{waiting}" for vip in node.vips)}
    if node.vip_qos_policy_id:
        shown["QoS policy"] = node.vip_qos_policy_id
    if node.vip_sg_ids:
        shown["Security groups"] = ", ".join(node.vip_sg_ids)
    row = connection.execute(sa.select(work.c.vip_applied).where(work.c.load_balancer_id == load_balancer_id)).one()
    given = vips.given_of(row)
    if given is not None and given.refused:
        shown["Refused"] = given.refused
    return shown


def _profile(connection: sa.Connection, load_balancer_id: str) -> dict[str, Any]:
    """What was chosen at creation, without what has a line of its own; nothing of one that is being removed."""
    try:
        node = wanted.load(connection, Kind.LOAD_BALANCER, load_balancer_id)
    except UnknownObject:
        return {}
    chosen: dict[str, Any] = msgspec.to_builtins(node.profile)
    return {name: value for name, value in chosen.items() if name not in ("topology", "compute", "network")}


def _objects(connection: sa.Connection, load_balancer_id: str) -> dict[str, int]:
    kind = wanted_object.c.kind
    query = (
        sa.select(kind, sa.func.count())
        .where(wanted_object.c.load_balancer_id == load_balancer_id, ~wanted_object.c.removed)
        .group_by(kind)
        .order_by(kind)
    )
    return dict(connection.execute(query).tuples().all())


def _amphorae(connection: sa.Connection, load_balancer_id: str) -> dict[str, int]:
    state = amphora.c.state
    query = (
        sa.select(state, sa.func.count())
        .where(amphora.c.load_balancer_id == load_balancer_id)
        .group_by(state)
        .order_by(state)
    )
    return dict(connection.execute(query).tuples().all())


def _requests(connection: sa.Connection, load_balancer_id: str, limit: int) -> list[dict[str, Any]]:
    names = ("generation", "action", "object_id", "accepted_at", "applied_at", "outcome")
    query = (
        sa.select(*(request.c[name] for name in names))
        .where(request.c.load_balancer_id == load_balancer_id)
        .order_by(request.c.id.desc())
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def _told(row: dict[str, Any]) -> tuple[Any, ...]:
    accepted, applied = row["accepted_at"], row["applied_at"]
    seconds = None if applied is None else round(applied - accepted, 3)
    return (
        *(row["generation"], row["action"], row["object_id"]),
        *(Moment(accepted), Moment(applied), seconds, row["outcome"]),
    )
