# SPDX-License-Identifier: Apache-2.0
"""Commands about load balancers.

Invariant: what is shown is what the rows say, wanted and served side by side, without interpretation. The names of
columns never change: programs read them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli import history, id_prefix, queries
from amphora_driver.cli.formatting import (
    Age,
    Chosen,
    Counts,
    Failovers,
    Left,
    Listed,
    Machines,
    Moment,
    Plain,
    Requests,
)
from amphora_driver.cli.jobs import waits_for
from amphora_driver.cli.queries import Balancer
from amphora_driver.cli.terminal_escape import plain
from amphora_driver.database.tables import request, wanted_object, work
from amphora_driver.errors import UnknownObject
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.reconcile import defaults, vip_allocation
from amphora_driver.render import haproxy
from amphora_driver.store import desired_objects, vip_claims

LIST_HEAD = (
    *("ID", "Name", "Project", "Topology", "Provisioning", "Operating", "Wanted", "Applied", "Amphorae", "Has VIPs"),
    *("Last heartbeat", "Waits for", "Attempts", "Error", "Fail-over"),
)
LONG_HEAD = (*LIST_HEAD, "Reason", "VIPs", "Pending since", "Next attempt", "Owner", "Op", "Dirty", "Drift")


class ListLoadBalancers(Lister):
    """Load balancers: what is wanted and what is served, how they are, and what they wait for."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--project", metavar="ID", help="Only those of this project.")
        parser.add_argument(
            "--status",
            action="append",
            metavar="STATUS",
            help="Only those with this provisioning or operating status, or one that begins so (PENDING); repeatable.",
        )
        parser.add_argument(
            "--stale", action="store_true", help="Only those with an amphora that should be heard and is not."
        )
        parser.add_argument("--dirty", action="store_true", help="Only those with work left.")
        parser.add_argument("--long", action="store_true", help="Also reasons, VIPs, who works on it, and drift.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        conditions = [work.c.project_id == parsed_args.project] if parsed_args.project else []
        conditions += [work.c.dirty] if parsed_args.dirty else []
        found: list[Balancer] = self.app.read(lambda connection: queries.balancers(connection, *conditions))
        if parsed_args.status:
            words = tuple(word.upper() for word in parsed_args.status)
            found = [one for one in found if any(status.upper().startswith(words) for status in _statuses(one))]
        if parsed_args.stale:
            before = time.time() - self.app.conf.failover.silent_after
            found = [one for one in found if any(queries.is_stale(machine, before) for machine in one.amphorae)]
        head, now = LONG_HEAD if parsed_args.long else LIST_HEAD, time.time()
        return head, (_row(one, now)[: len(head)] for one in found)


class ShowLoadBalancer(ShowOne):
    """One load balancer: how it is and why, its amphorae, what is being done to it, and the calls accepted lately."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer, or the beginning of it.")
        parser.add_argument(
            "--requests", type=int, default=10, metavar="NUMBER", help="How many calls to show (default: 10)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        now = time.time()
        shown: dict[str, Any] = self.app.read(
            lambda connection: _show(connection, parsed_args.load_balancer, parsed_args.requests, now)
        )
        return tuple(shown), tuple(shown.values())


class ShowHistory(Lister):
    """What happened to a load balancer, newest first: calls and what became of them, fail-overs step by step."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument(
            "load_balancer", metavar="ID", help="Id of the load balancer, or the beginning of it; it may be gone."
        )
        parser.add_argument(
            "--limit", type=int, default=100, metavar="NUMBER", help="How many lines to show (default: 100)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        sought, limit = parsed_args.load_balancer, max(1, parsed_args.limit)

        def look(connection: sa.Connection) -> list[history.Line]:
            return history.of(connection, id_prefix.load_balancer(connection, sought, gone=True), limit)

        return history.HEAD, (history.shown(line) for line in self.app.read(look))


class RenderLoadBalancer(Command):
    """Print the haproxy.cfg that the recorded load balancer becomes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer, or the beginning of it.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print; 1 if a part of it cannot be rendered."""

        def load(connection: sa.Connection) -> LoadBalancer:
            return desired_objects.load_tree(connection, id_prefix.load_balancer(connection, parsed_args.load_balancer))

        tree = self.app.read(load)
        rendered = haproxy.render(tree, defaults=defaults.defaults(self.app.conf), shared_tickets=True)
        self.app.stdout.write(rendered.text if rendered.text is not None else "# HAProxy is not wanted\n")
        for refusal in rendered.refused:
            self.app.stderr.write(f"{plain(str(refusal))}\n")
        return 1 if rendered.refused else 0


def _row(one: Balancer, now: float) -> tuple[Any, ...]:
    """A line of the list, in the order of `LONG_HEAD`."""
    row, heard = one.work, queries.heard_least(one.amphorae)
    waits = waits_for(row, now) if row.dirty or row.to_report or row.pending or row.committed < row.generation else None
    return (
        *(row.load_balancer_id, Plain(one.named.name if one.named else None), row.project_id, row.topology),
        *(*_statuses(one), row.generation, row.applied),
        *(Counts(_states(one)), Plain(queries.holder(one.amphorae)), Age(heard or None)),
        *(Plain(waits), row.attempts, Plain(row.error), Listed(sorted({failover.cause for failover in one.failovers}))),
        *(Plain(one.status.reason if one.status else None), Listed(_addresses(one)), Age(one.since, "")),
        *(Left(row.free_at if row.dirty and row.free_at else None), Plain(row.owner), row.op, bool(row.dirty)),
        Listed(sorted({machine.drift for machine in one.amphorae if machine.drift})),
    )


def _statuses(one: Balancer) -> tuple[str, str]:
    return queries.provisioning(one), queries.operating(one)


def _states(one: Balancer) -> dict[str, int]:
    states = [machine.state for machine in one.amphorae]
    found = {state: states.count(state) for state in sorted(set(states))}
    return {**found, **({"silent": len(one.silent)} if one.silent else {})}


def _addresses(one: Balancer) -> list[str]:
    if one.named is None or one.named.vip is None:
        return []
    return [vip.address for vip in (one.named.vip, *one.named.additional_vips) if vip.address]


def _show(connection: sa.Connection, text: str, requests: int, now: float) -> dict[str, Any]:
    load_balancer_id = id_prefix.load_balancer(connection, text)
    (one,) = queries.balancers(connection, work.c.load_balancer_id == load_balancer_id)
    row = one.work
    listed = dict(zip(LONG_HEAD, _row(one, now), strict=True))
    for name in ("VIPs", "Drift", "Amphorae", "Fail-over"):
        del listed[name]
    return {
        **listed,
        "Status since": Moment((one.status.since or None) if one.status else None),
        "Committed": row.committed,
        "Epoch": row.epoch,
        "Leased until": Moment(row.leased_until),
        "Objects pending": row.pending,
        "To report": row.to_report,
        "Compute": Plain(row.compute),
        "Network": Plain(row.network),
        **_vips(connection, load_balancer_id),
        "Profile": Chosen(_profile(connection, load_balancer_id)),
        "Spare pool": Plain(row.spare_pool),
        "Objects": Counts(_objects(connection, load_balancer_id)),
        "Amphorae": Machines([_machine(machine, one) for machine in one.amphorae]),
        "Fail-overs": Failovers([dict(failover._mapping) for failover in one.failovers]),  # noqa: SLF001 - SQLAlchemy's public name
        "Requests": Requests(_requests(connection, load_balancer_id, requests)),
    }


def _machine(row: Any, one: Balancer) -> dict[str, Any]:
    names = (
        *("id", "role", "state", "management_address", "confirmed", "heard", "seen_at", "certificate_expires_at"),
        *("image", "agent_version", "drift", "audited_at", "reason"),
    )
    silent = {"silent": row.silent, "verdict": row.verdict, "drifts": bool(row.drifts)}
    return {
        **{name: getattr(row, name) for name in names},
        "has_vips": row.id == queries.holder(one.amphorae),
        **silent,
    }


def _vips(connection: sa.Connection, load_balancer_id: str) -> dict[str, Any]:
    """The addresses, what they have besides, and why something of it is missing.

    Octavia's users see no address that was found after the creation: an operator finds it here.
    """
    try:
        node: LoadBalancer = desired_objects.load_object(connection, Kind.LOAD_BALANCER, load_balancer_id)
    except UnknownObject:
        return {}
    wish = vip_claims.read_pending_request(connection, load_balancer_id)
    waiting = "" if wish is None else f" ({wish.reason}; asked {wish.attempts} times)"
    shown: dict[str, Any] = {"VIPs": ", ".join(vip.address or f"not known yet{waiting}" for vip in node.vips)}
    if node.vip_qos_policy_id:
        shown["QoS policy"] = node.vip_qos_policy_id
    if node.vip_sg_ids:
        shown["Security groups"] = ", ".join(node.vip_sg_ids)
    row = connection.execute(sa.select(work.c.vip_applied).where(work.c.load_balancer_id == load_balancer_id)).one()
    given = vip_allocation.given_of(row)
    if given is not None and given.refused:
        shown["Refused"] = given.refused
    return shown


def _profile(connection: sa.Connection, load_balancer_id: str) -> dict[str, Any]:
    """What was chosen at creation, without what has a line of its own; nothing of one that is being removed."""
    try:
        node = desired_objects.load_object(connection, Kind.LOAD_BALANCER, load_balancer_id)
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


def _requests(connection: sa.Connection, load_balancer_id: str, limit: int) -> list[dict[str, Any]]:
    names = ("generation", "action", "object_id", "accepted_at", "applied_at", "outcome")
    query = (
        sa.select(*(request.c[name] for name in names))
        .where(request.c.load_balancer_id == load_balancer_id)
        .order_by(request.c.id.desc())
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]
