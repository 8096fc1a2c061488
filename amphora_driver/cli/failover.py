# SPDX-License-Identifier: Apache-2.0
"""Commands about fail-overs, the circuit breaker and unknown amphorae.

Invariant: the commands read and write database rows only, so they work while no other process of the control plane
runs. A controller performs a requested fail-over as soon as one runs. Octavia receives no PENDING status, so users can
change their load balancers meanwhile. The commands refuse an amphora that is being replaced or deleted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from amphora_driver.cli import queries
from amphora_driver.cli.command import AMPHORA, LOAD_BALANCER, Command, Lister, ShowOne, Table, argument, operator_name
from amphora_driver.cli.formatting import Age, Duration, Rows, Timestamp, Value
from amphora_driver.database import clock
from amphora_driver.database.tables import amphora, duty, job
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.queue import local_socket
from amphora_driver.store import circuit_breaker, failovers, orphans, silent_amphorae
from amphora_driver.store.generations import Op
from amphora_driver.store.spare_pools import ROLE
from amphora_driver.telemetry.records import Scope

_LIST_HEAD = ("ID", "Cause", "Load balancer", "Amphora", "Began", "Served after", "Ended", "Outcome")
_REASON = argument("--reason", metavar="TEXT", default="an operator asked for it", help="Reason, for the history.")


class Timeline(Rows):
    """Rows of `failover_event`, oldest first."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(
            [{"at": row.at, "event": row.word, "amphora": row.amphora_id, "detail": row.detail} for row in rows]
        )

    def describe(self, row: dict[str, Any]) -> str:
        after = row["at"] - self._value[0]["at"]
        of = f" {row['amphora']}" if row["amphora"] else ""
        detail = f": {row['detail']}" if row["detail"] else ""
        return f"{after:+8.2f} s {row['event'].replace('_', ' ')}{of}{detail}"


class SilentAmphorae(Rows):
    """Rows of `silent_amphora`."""

    def __init__(self, rows: Sequence[Any]) -> None:
        names = {"amphora": "amphora_id", "load_balancer": "load_balancer_id"}
        names |= {name: name for name in ("kind", "since", "verdict")}
        super().__init__([{name: getattr(row, column) for name, column in names.items()} for row in rows])

    def describe(self, row: dict[str, Any]) -> str:
        since = Timestamp(row["since"]).human_readable()
        kind = row["kind"].replace("_", " ")
        return f"{row['amphora']} of {row['load_balancer']}: {kind} since {since}; {row['verdict']}"


class ListFailovers(Lister):
    """List fail-overs, newest first: cause, amphora, and seconds until the load balancer was served again."""

    read_only_mode = True
    arguments = (
        argument("--loadbalancer", metavar="ID", help="Only fail-overs of the load balancer with this id."),
        argument("--open", action="store_true", help="Only fail-overs in progress."),
        argument("--limit", type=int, default=100, metavar="NUMBER", help="Largest number of lines (default: 100)."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        query = sa.select(failover).order_by(failover.c.id.desc()).limit(parsed_args.limit)
        if parsed_args.loadbalancer:
            query = query.where(failover.c.load_balancer_id == parsed_args.loadbalancer)
        if parsed_args.open:
            query = query.where(failover.c.ended_at.is_(None))
        # In the read-only mode, the scope requests the fail-overs of this load balancer. Without a scope, only the
        # newest fail-overs of the fleet are available.
        scope = Scope(load_balancer=parsed_args.loadbalancer) if parsed_args.loadbalancer else None
        return _LIST_HEAD, map(_list_row, self.app.read(lambda connection: connection.execute(query).all(), scope))


class ShowFailover(ShowOne):
    """Show the cause and the events of one fail-over."""

    read_only_mode = True
    arguments = (argument("failover", type=int, metavar="ID", help="Number of the fail-over, from `failover list`."),)

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        number = parsed_args.failover
        query = sa.select(failover).where(failover.c.id == number)
        row, events = self.app.read(
            lambda connection: (connection.execute(query).first(), failovers.list_failover_events(connection, number)),
            Scope(failover=number),
        )
        if row is None:
            raise UnknownObject(
                f"show fail-over {number}", "no fail-over has this number", "List them: amphoractl failover list."
            )
        return {
            "ID": row.id,
            "Load balancer": row.load_balancer_id,
            "Amphora": row.amphora_id,
            "Cause": row.cause,
            "Reason": Value(row.reason),
            "Asked by": Value(row.asked_by),
            "Rotation": row.rotation_id,
            "Heard last": Timestamp(row.silent_since),
            "Began": Timestamp(row.begun_at),
            "Served": Timestamp(row.served_at),
            "Ended": Timestamp(row.ended_at),
            "Outcome": row.outcome,
            "Time line": Timeline(sorted(events, key=lambda one: (one.at, one.id))),
        }


class FailoverStatus(ShowOne):
    """Show whether silent amphorae are replaced now, which amphorae are silent, and what happens next."""

    read_only_mode = True

    def values(self, _parsed_args: argparse.Namespace) -> dict[str, Any]:
        def read(connection: sa.Connection) -> tuple[Any, ...]:
            unexpired = duty.c.leased_until > clock.now(connection)
            owner = sa.select(duty.c.owner).where(duty.c.name == silent_amphorae.DUTY, unexpired)
            return (
                connection.execute(owner).scalar(),
                circuit_breaker.read_breaker_rows(connection),
                silent_amphorae.list_silent_amphorae(connection),
                failovers.list_open_failovers(connection),
            )

        detector, rows, silent, in_progress = self.app.read(read)
        automatic, sight = rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.SIGHT)
        state = automatic.state if automatic is not None else circuit_breaker.CLOSED
        deciding = rows.get(circuit_breaker.OPERATOR) or automatic
        return {
            "Allowed now": Value(describe_permission(detector, rows, automatic=self.app.conf.amp_failover.automatic)),
            "Circuit breaker": f"held {circuit_breaker.OPEN}" if circuit_breaker.OPERATOR in rows else state,
            "Since": Timestamp(getattr(deciding, "since", None)),
            "Reason": Value(getattr(deciding, "reason", None)),
            "Next trial": Timestamp(
                automatic.trial_at if automatic is not None and state == circuit_breaker.OPEN else None
            ),
            "Detector": detector,
            "Watched": sight.watched if sight is not None else None,
            "Silent": SilentAmphorae(silent),
            "Fail-overs going on": len(in_progress),
        }


class ListUnknownAmphorae(Lister):
    """List machines that send heartbeats under an unknown amphora id.

    The control plane has no key for these heartbeats and cannot verify them. Such a heartbeat is a hint, not a proof.
    """

    read_only_mode = True

    def take_action(self, _parsed_args: argparse.Namespace) -> Table:
        rows = self.app.read(orphans.list_unknown_amphorae)
        return ("Amphora", "Address", "First heard", "Last heard", "Verdict"), (
            (row.amphora_id, row.address, Timestamp(row.first_at), Age(row.last_at), Value(row.verdict)) for row in rows
        )


def describe_permission(detector: str | None, rows: dict[str, circuit_breaker.BreakerRow], *, automatic: bool) -> str:
    """Return whether the detecting controller would replace a silent amphora now, or the reason."""
    sight, known = rows.get(circuit_breaker.SIGHT), rows.get(circuit_breaker.AUTOMATIC)
    held = rows.get(circuit_breaker.OPERATOR)
    if not automatic:
        return "nothing: [amp_failover] automatic is off"
    if held is not None:
        return f"nothing: the breaker is held open by {held.reason or 'an operator'}"
    if detector is None:
        return "nothing: no controller detects silent amphorae; is one running?"
    if sight is None or sight.state == circuit_breaker.BLIND:
        reason = sight.reason if sight is not None else "it has not read any heartbeat yet"
        return f"nothing: the control plane is blind ({reason})"
    if known is not None and known.state == circuit_breaker.OPEN:
        return f"nothing: the breaker is open ({known.reason})"
    if known is not None and known.state != circuit_breaker.CLOSED:
        return f"one fail-over at a time, for a trial ({known.reason})"
    return "fail-over of silent amphorae"


class OpenCircuitBreaker(Command):
    """Hold the circuit breaker open: no automatic fail-over begins until `circuit-breaker close`."""

    arguments = (argument("--reason", default="", metavar="WORDS", help="Reason, shown by `failover status`."),)

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        database = self.app.database
        reason = ": ".join(part for part in (operator_name(), parsed_args.reason) if part)
        database.write(lambda connection: circuit_breaker.hold_breaker_open(connection, reason, database.now()))
        self.app.stdout.write("The breaker is held open: no automatic fail-over begins.\n")


class CloseCircuitBreaker(Command):
    """Close the circuit breaker. Amphorae that are silent now count as dead and are replaced."""

    def take_action(self, _parsed_args: argparse.Namespace) -> None:
        database = self.app.database
        reason = f"closed by {operator_name()}"
        database.write(lambda connection: circuit_breaker.close_breaker(connection, reason, database.now()))
        self.app.stdout.write("The breaker is closed.\n")


class _RequestFailover(Command):
    """Records a request for fail-over, wakes a controller, and prints the next actions."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        message = self.app.database.write(lambda connection: self.request(connection, parsed_args))
        # Controllers on this host start the fail-over at once. Controllers on other hosts find it at their next poll of
        # the database.
        local_socket.wake_role(self.app.conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        self.app.stdout.write(message + "\n")

    def request(self, connection: sa.Connection, parsed_args: argparse.Namespace) -> str:
        """Write the rows and return the message."""
        raise NotImplementedError


class FailOverLoadBalancer(_RequestFailover):
    """Replace all amphorae of a load balancer, one at a time. Users can change it at the same time."""

    arguments = (LOAD_BALANCER, _REASON)

    def request(self, connection: sa.Connection, parsed_args: argparse.Namespace) -> str:
        chosen = queries.find_load_balancer_id(connection, parsed_args.load_balancer)
        attempt = f"fail over load balancer {chosen}"
        _refuse_if_deleted(connection, attempt, chosen)
        rows = _read_amphorae(connection, amphora.c.load_balancer_id == chosen)
        live = [row.id for row in rows if row.state != AmphoraState.RETIRING.value]
        if not live:
            reason = rows and _describe_replacement(connection, chosen)
            raise Conflict(attempt, reason or "it has no amphora yet: it is being created", "Wait until that is done.")
        return _request_failovers(connection, chosen, live, parsed_args.reason)


class FailOverAmphora(_RequestFailover):
    """Replace one amphora by a new one or by a warm spare."""

    arguments = (AMPHORA, _REASON)

    def request(self, connection: sa.Connection, parsed_args: argparse.Namespace) -> str:
        chosen = queries.find_amphora_id(connection, parsed_args.amphora)
        attempt = f"fail over amphora {chosen}"
        (row,) = _read_amphorae(connection, amphora.c.id == chosen)
        if row.role == ROLE:
            remedy = "Its pool replaces a spare that does not answer."
            raise Conflict(attempt, "it is a warm spare without a load balancer", remedy)
        _refuse_if_deleted(connection, attempt, row.load_balancer_id)
        if row.state == AmphoraState.RETIRING.value:
            reason = _describe_replacement(connection, row.load_balancer_id, chosen)
            raise Conflict(attempt, reason, "Wait until that is done.")
        return _request_failovers(connection, row.load_balancer_id, [chosen], parsed_args.reason)


def _request_failovers(
    connection: sa.Connection, load_balancer_id: str, amphora_ids: Sequence[str], reason: str
) -> str:
    trigger = failovers.FailoverTrigger(cause=failovers.Cause.OPERATOR, reason=reason, asked_by=operator_name())
    failovers.open_failovers(connection, load_balancer_id, amphora_ids, trigger, time.time())
    newest = max(row.id for row in failovers.list_open_failovers_of(connection, load_balancer_id))
    if len(amphora_ids) == 1:
        head = f"Amphora {amphora_ids[0]} is to be replaced"
        first = "a new amphora or takes a warm spare"
    else:
        head = f"{len(amphora_ids)} amphorae ({', '.join(amphora_ids)}) are to be replaced"
        first = "new amphorae or takes warm spares, one at a time"
    return (
        f"{head}. A controller boots {first}, moves the service there, and then deletes the old one. Follow it with: "
        f"amphoractl failover show {newest}"
    )


def _read_amphorae(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> Sequence[Any]:
    columns = (amphora.c.id, amphora.c.load_balancer_id, amphora.c.role, amphora.c.state)
    return connection.execute(sa.select(*columns).where(condition).order_by(amphora.c.created_at)).all()


def _refuse_if_deleted(connection: sa.Connection, attempt: str, load_balancer_id: str) -> None:
    op = connection.execute(sa.select(job.c.op).where(job.c.load_balancer_id == load_balancer_id)).scalar()
    if op != Op.APPLY:
        raise Conflict(attempt, "the load balancer is being deleted", "No action is needed.")


def _describe_replacement(connection: sa.Connection, load_balancer_id: str, amphora_id: str | None = None) -> str:
    """Return the reason for the refusal: the fail-over that already replaces the amphora."""
    rows = failovers.list_open_failovers_of(connection, load_balancer_id)
    of_amphora = [row for row in rows if amphora_id in (None, row.amphora_id)]
    if not of_amphora:
        return "it is being replaced already"
    first = of_amphora[0]
    ago = max(0.0, time.time() - first.begun_at)
    cause = f"{first.cause}: {first.reason}" if first.reason else first.cause
    return f"it is being replaced already (fail-over {first.id}, begun {ago:.0f} s ago because of {cause})"


def _list_row(row: Any) -> tuple[Any, ...]:
    after = None if row.served_at is None else row.served_at - row.begun_at
    return (
        *(row.id, row.cause, row.load_balancer_id, row.amphora_id, Timestamp(row.begun_at), Duration(after)),
        *(Timestamp(row.ended_at), row.outcome),
    )
