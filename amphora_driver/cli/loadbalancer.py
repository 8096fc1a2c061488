# SPDX-License-Identifier: Apache-2.0
"""Commands about load balancers.

Invariant: the commands show the recorded rows, desired and confirmed generation side by side. Programs read the
column names, so these never change.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli import formatting, history, queries
from amphora_driver.cli.command import LOAD_BALANCER, Lister, PagedLister, ShowOne, Table, argument
from amphora_driver.cli.formatting import Age, Counts, Remaining, Timestamp, Value, ValueList
from amphora_driver.cli.jobs import waits_for
from amphora_driver.cli.queries import LoadBalancerSummary
from amphora_driver.database.tables import desired_object, job, object_status, request
from amphora_driver.errors import UnknownObject
from amphora_driver.model.enums import Kind, Operating, Provisioning
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.reconcile import vip_allocation
from amphora_driver.store import desired_objects, vip_claims
from amphora_driver.store.generations import Op
from amphora_driver.telemetry.records import Scope

LIST_HEAD = (
    *("ID", "Name", "Project", "Topology", "Provisioning", "Operating", "Wanted", "Applied", "Amphorae", "Has VIPs"),
    *("Last heartbeat", "Waits for", "Attempts", "Error", "Fail-over"),
)
LONG_HEAD = (*LIST_HEAD, "Reason", "VIPs", "Pending since", "Next attempt", "Owner", "Op", "Dirty", "Drift")
# An ACTIVE object with one of these operating statuses needs no explanation.
_HEALTHY = {Operating.ONLINE.value, Operating.NO_MONITOR.value}
_STATUS_HELP = (
    "Only load balancers with this provisioning or operating status or prefix of it (PENDING); can be repeated."
)


class ListLoadBalancers(PagedLister):
    """List load balancers: statuses, desired and applied generation, amphorae, and pending changes."""

    read_only_mode = True
    arguments = (
        argument("--project", metavar="ID", help="Only load balancers of this project."),
        argument("--status", action="append", metavar="STATUS", help=_STATUS_HELP),
        argument(
            "--stale", action="store_true", help="Only load balancers with an amphora without a recent heartbeat."
        ),
        argument("--unfinished", action="store_true", help="Only load balancers with a job that is not done."),
        argument("--long", action="store_true", help="Show more columns: reason, VIPs, owner of the job, and drift."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        conditions = [job.c.project_id == parsed_args.project] if parsed_args.project else []
        conditions += [job.c.dirty] if parsed_args.unfinished else []
        words = tuple(word.upper() for word in parsed_args.status or ())
        before = time.time() - self.app.conf.amp_failover.silent_after if parsed_args.stale else None
        head, now = LONG_HEAD if parsed_args.long else LIST_HEAD, time.time()

        def is_listed(one: LoadBalancerSummary) -> bool:
            return before is None or any(queries.is_stale(machine, before) for machine in one.amphorae)

        def has_status(one: LoadBalancerSummary) -> bool:
            return any(status.upper().startswith(words) for status in _statuses(one))

        def read(connection: sa.Connection) -> list[tuple[Any, ...]]:
            marker = parsed_args.marker
            after = queries.find_load_balancer_id(connection, marker) if marker else None
            if words:
                # Usually few load balancers have the requested status. So the command selects them first, and then
                # reads the amphorae and names of these load balancers only.
                own_ids = (one.work.load_balancer_id for one in queries.list_statuses(connection) if has_status(one))
                ids = [one for one in own_ids if after is None or one > after]
                found = queries.iter_chosen(connection, ids, *conditions)
            else:
                found = queries.iter_load_balancers(connection, *conditions, after=after)
            rows = (_row(one, now)[: len(head)] for one in found if is_listed(one))
            # The query has already skipped the rows up to the marker, so `page` must not search for the marker.
            return list(self.page(rows, argparse.Namespace(**{**vars(parsed_args), "marker": None})))

        return head, self.app.read(read)


class ShowLoadBalancer(ShowOne):
    """Show one load balancer: statuses, amphorae, fail-overs, and the latest requests.

    *Reasons* lists each object of the load balancer with a status other than ACTIVE and ONLINE, and the reason of the
    status. Octavia's API shows the status without a reason.
    """

    read_only_mode = True
    arguments = (
        LOAD_BALANCER,
        argument(
            "--requests", type=int, default=10, metavar="NUMBER", help="Number of requests to show (default: 10)."
        ),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        now = time.time()
        shown: dict[str, Any] = self.app.read(
            lambda connection: _details(connection, parsed_args.load_balancer, parsed_args.requests, now),
            Scope(load_balancer=parsed_args.load_balancer),
        )
        return shown


class ShowHistory(Lister):
    """List the events of a load balancer, newest first: requests with their outcome, fail-overs, resyncs."""

    read_only_mode = True
    arguments = (
        argument(
            "load_balancer",
            metavar="ID",
            help="Id of the load balancer, or a unique prefix of it; also of a deleted one.",
        ),
        argument("--limit", type=int, default=100, metavar="NUMBER", help="Largest number of lines (default: 100)."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        prefix, limit = parsed_args.load_balancer, max(1, parsed_args.limit)

        def read(connection: sa.Connection) -> list[history.HistoryEvent]:
            chosen = queries.find_load_balancer_id(connection, prefix, deleted=True)
            return history.list_events(connection, chosen, limit)

        return history.HEAD, map(history.to_row, self.app.read(read, Scope(load_balancer=prefix)))


def _row(one: LoadBalancerSummary, now: float) -> tuple[Any, ...]:
    """Return the values in the order of `LONG_HEAD`."""
    row, heard = one.work, queries.oldest_heartbeat(one.amphorae)
    pending = row.dirty or row.to_report or row.pending or row.committed < row.generation
    causes = sorted({failover.cause for failover in one.failovers})
    states = dict(sorted(Counter(machine.state for machine in one.amphorae).items()))
    silent = {"silent": len(one.silent)} if one.silent else {}
    return (
        *(row.load_balancer_id, Value(one.name), row.project_id, row.topology),
        *(*_statuses(one), row.generation, row.applied),
        *(Counts({**states, **silent}), Value(queries.vip_holder(one.amphorae)), Age(heard or None)),
        *(Value(waits_for(row, now) if pending else None), row.attempts, Value(row.error), ValueList(causes)),
        *(Value(one.status.reason if one.status else None), ValueList(one.addresses), Age(one.since, "")),
        *(Remaining(row.due_at if row.dirty and row.due_at else None), Value(row.owner), row.op, bool(row.dirty)),
        ValueList(sorted({machine.drift for machine in one.amphorae if machine.drift})),
    )


def _statuses(one: LoadBalancerSummary) -> tuple[str, str]:
    return queries.provisioning_status(one), queries.operating_status(one)


def _details(connection: sa.Connection, text: str, requests: int, now: float) -> dict[str, Any]:
    load_balancer_id = queries.find_load_balancer_id(connection, text)
    (one,) = queries.list_load_balancers(connection, job.c.load_balancer_id == load_balancer_id)
    row = one.work
    listed = dict(zip(LONG_HEAD, _row(one, now), strict=True))
    for name in ("VIPs", "Drift", "Amphorae", "Fail-over"):
        del listed[name]
    try:
        node: LoadBalancer | None = desired_objects.load_object(connection, Kind.LOAD_BALANCER, load_balancer_id)
    except UnknownObject:
        node = None
    # The topology and the two backends are left out, because other lines of the output show them.
    profile: dict[str, Any] = {} if node is None else msgspec.to_builtins(node.profile)
    profile = {name: value for name, value in profile.items() if name not in ("topology", "compute", "network")}
    return {
        **listed,
        "Status since": Timestamp((one.status.since or None) if one.status else None),
        "Committed": row.committed,
        "Epoch": row.epoch,
        "Leased until": Timestamp(row.leased_until),
        "Objects pending": row.pending,
        "To report": row.to_report,
        "Reasons": formatting.StatusReasons(find_status_reasons(_statuses_of(connection, load_balancer_id), row, now)),
        "Compute": Value(row.compute),
        "Network": Value(row.network),
        **(_vips(connection, node) if node is not None else {}),
        "Profile": formatting.Profile(profile),
        "Spare pool": Value(row.spare_pool),
        "Objects": Counts(_objects(connection, load_balancer_id)),
        "Amphorae": formatting.Amphorae([_amphora_fields(machine, one) for machine in one.amphorae]),
        "Fail-overs": formatting.Failovers([dict(failover._mapping) for failover in one.failovers]),  # noqa: SLF001 - SQLAlchemy documents this name
        "Requests": formatting.Requests(_requests(connection, load_balancer_id, requests)),
    }


def find_status_reasons(statuses: Iterable[Any], work: Any, now: float) -> list[dict[str, Any]]:
    """Return the objects whose status needs an explanation, with the reason.

    Args:
        statuses: rows with `queries.STATUS_COLUMNS` and the column `removed` of `desired_object`.
        work: row of `job` with the column `to_report`.
        now: seconds since 1970.
    """
    found = []
    for row in statuses:
        provisioning, operating = _object_provisioning(row, work), row.operating or Operating.OFFLINE.value
        if provisioning == Provisioning.ACTIVE.value and operating in _HEALTHY:
            continue
        reasons = [row.reason] if row.reason else []
        if provisioning.startswith("PENDING"):
            # The reason why a change waits comes first, because the other reasons may belong to earlier changes.
            reasons.insert(0, f"the change waits for {waits_for(work, now)}")
        if provisioning != Provisioning.ACTIVE.value and work.error and work.error not in reasons:
            reasons.append(f"last error of the job: {work.error}")
        found.append(
            {
                "kind": "l7policy" if row.kind == Kind.L7POLICY.value else row.kind[:-1],
                "id": row.object_id,
                "provisioning": provisioning,
                "operating": operating,
                "since": row.since or None,
                "reason": "; ".join(reasons) or "no reason is recorded",
            }
        )
    return found


def _object_provisioning(row: Any, work: Any) -> str:
    """Return the provisioning status of an object that Octavia's users see."""
    if row.pending is None or row.provisioning == Provisioning.ERROR.value:
        return str(row.provisioning or "unknown")
    if work.op == Op.DELETE or row.removed:
        return "PENDING_DELETE"
    return "PENDING_UPDATE" if row.provisioning else "PENDING_CREATE"


def _statuses_of(connection: sa.Connection, load_balancer_id: str) -> Sequence[Any]:
    """Return the statuses of all objects of a load balancer, except of deleted ones."""
    query = (
        sa.select(*queries.STATUS_COLUMNS, desired_object.c.removed)
        .outerjoin(desired_object, desired_object.c.id == object_status.c.object_id)
        .where(object_status.c.load_balancer_id == load_balancer_id)
        .order_by(object_status.c.kind, object_status.c.object_id)
    )
    rows = connection.execute(query).all()
    return [row for row in rows if row.provisioning != Provisioning.DELETED.value]


def _amphora_fields(row: Any, one: LoadBalancerSummary) -> dict[str, Any]:
    names = (
        *("id", "role", "state", "management_address", "confirmed", "heard", "seen_at", "certificate_expires_at"),
        *("image", "agent_version", "drift", "audited_at", "reason"),
    )
    return {
        **{name: getattr(row, name) for name in names},
        "has_vips": row.id == queries.vip_holder(one.amphorae),
        "silent": row.silent,
        "verdict": row.verdict,
        "drifts": bool(row.drifts),
    }


def _vips(connection: sa.Connection, node: LoadBalancer) -> dict[str, Any]:
    """Return the VIPs, their QoS policy and security groups, and the reason for missing VIPs.

    Octavia does not show an address that was allocated after the creation; an operator finds it here.
    """
    pending = vip_claims.read_pending_request(connection, node.id)
    waiting = "" if pending is None else f" ({pending.reason}; asked {pending.attempts} times)"
    shown: dict[str, Any] = {"VIPs": ", ".join(vip.address or f"not known yet{waiting}" for vip in node.vips)}
    if node.vip_qos_policy_id:
        shown["QoS policy"] = node.vip_qos_policy_id
    if node.vip_sg_ids:
        shown["Security groups"] = ", ".join(node.vip_sg_ids)
    row = connection.execute(sa.select(job.c.vip_applied).where(job.c.load_balancer_id == node.id)).one()
    given = vip_allocation.read_applied_options(row)
    if given is not None and given.refused:
        shown["Refused"] = given.refused
    return shown


def _objects(connection: sa.Connection, load_balancer_id: str) -> dict[str, int]:
    kind = desired_object.c.kind
    recorded = (desired_object.c.load_balancer_id == load_balancer_id, ~desired_object.c.removed)
    query = sa.select(kind, sa.func.count()).where(*recorded).group_by(kind).order_by(kind)
    return dict(connection.execute(query).tuples().all())


def _requests(connection: sa.Connection, load_balancer_id: str, limit: int) -> list[dict[str, Any]]:
    names = ("generation", "action", "object_id", "accepted_at", "applied_at", "outcome")
    query = sa.select(*(request.c[name] for name in names)).where(request.c.load_balancer_id == load_balancer_id)
    return [dict(row) for row in connection.execute(query.order_by(request.c.id.desc()).limit(limit)).mappings()]
