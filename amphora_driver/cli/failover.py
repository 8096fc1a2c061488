# SPDX-License-Identifier: Apache-2.0
"""Fail-overs, who is silent, what is allowed now, and who is heard that nobody knows.

Invariant: all of it is read from rows, and holding the breaker open or closing it writes one: it says the same, and
does what it says, whether or not any other process of ours is alive.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from cliff.columns import FormattableColumn
from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli.failover_request import who
from amphora_driver.cli.formatting import Age, Moment, Plain, Span
from amphora_driver.cli.terminal_escape import plain
from amphora_driver.database import clock
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import UnknownObject
from amphora_driver.store import circuit_breaker, failovers, silent_amphorae, unknown_amphorae

_LISTED = ("ID", "Cause", "Load balancer", "Amphora", "Began", "Served after", "Ended", "Outcome")
_SHOWN = (
    *("ID", "Load balancer", "Amphora", "Cause", "Reason", "Asked by", "Rotation", "Heard last", "Began"),
    *("Served", "Ended", "Outcome", "Time line"),
)
_MOST = 100


class TimeLine(FormattableColumn):
    """Events as rows of `failover_event`, the first one first; `from` is when the first of them was."""

    def human_readable(self) -> str:
        begin = self._value[0].at if self._value else 0.0
        return "\n".join(plain(_line(row, row.at - begin)) for row in self._value)

    def machine_readable(self) -> list[dict[str, Any]]:
        return [
            {
                "at": Moment(row.at).machine_readable(),
                "event": row.word,
                "amphora": row.amphora_id,
                "detail": row.detail,
            }
            for row in self._value
        ]


class Silent(FormattableColumn):
    """Rows of `silence`."""

    def human_readable(self) -> str:
        return "\n".join(
            plain(
                f"{row.amphora_id} of {row.load_balancer_id}: {row.kind.replace('_', ' ')} since "
                f"{Moment(row.since).human_readable()}; {row.verdict}"
            )
            for row in self._value
        )

    def machine_readable(self) -> list[dict[str, Any]]:
        return [
            {
                "amphora": row.amphora_id,
                "load_balancer": row.load_balancer_id,
                "kind": row.kind,
                "since": Moment(row.since).machine_readable(),
                "verdict": row.verdict,
            }
            for row in self._value
        ]


class ListFailovers(Lister):
    """Fail-overs, the newest first: why, of which amphora, and how long users waited."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--loadbalancer", metavar="ID", help="Only those of this load balancer.")
        parser.add_argument("--open", action="store_true", help="Only those that go on.")
        parser.add_argument("--limit", type=int, default=_MOST, metavar="NUMBER", help=f"At most so many ({_MOST}).")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        query = sa.select(failover).order_by(failover.c.id.desc()).limit(parsed_args.limit)
        if parsed_args.loadbalancer:
            query = query.where(failover.c.load_balancer_id == parsed_args.loadbalancer)
        if parsed_args.open:
            query = query.where(failover.c.ended_at.is_(None))
        rows = self.app.read(lambda connection: connection.execute(query).all())
        return _LISTED, (_listed(row) for row in rows)


class ShowFailover(ShowOne):
    """One fail-over: its cause, and what happened when."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("failover", type=int, metavar="ID", help="Its number, from `failover list`.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        number = parsed_args.failover
        query = sa.select(failover).where(failover.c.id == number)
        row, events = self.app.read(
            lambda connection: (connection.execute(query).first(), failovers.list_failover_events(connection, number))
        )
        if row is None:
            raise UnknownObject(f"show fail-over {number}", "there is none with this number", "See failover list.")
        times = tuple(Moment(at) for at in (row.silent_since, row.begun_at, row.served_at, row.ended_at))
        why = (row.cause, Plain(row.reason), Plain(row.asked_by), row.rotation_id)
        which = (row.id, row.load_balancer_id, row.amphora_id)
        return _SHOWN, (*which, *why, *times, row.outcome, TimeLine(sorted(events, key=lambda one: (one.at, one.id))))


class FailoverStatus(ShowOne):
    """Whether amphorae are replaced unasked now, who is silent, and what follows from that or why nothing does."""

    def take_action(self, _parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""

        def work(connection: sa.Connection) -> tuple[Any, ...]:
            held = sa.select(duty.c.owner).where(
                duty.c.name == silent_amphorae.DUTY, duty.c.leased_until > clock.now(connection)
            )
            return (
                connection.execute(held).scalar(),
                circuit_breaker.read_breaker_rows(connection),
                silent_amphorae.list_silent_amphorae(connection),
                failovers.list_open_failovers(connection),
            )

        detector, rows, silent, going = self.app.read(work)
        automatic, sight = rows.get(circuit_breaker.AUTOMATIC), rows.get(circuit_breaker.SIGHT)
        state = automatic.state if automatic is not None else circuit_breaker.CLOSED
        values = {
            "Allowed now": Plain(allowed(detector, rows, automatic=self.app.conf.failover.automatic)),
            "Breaker": f"held {circuit_breaker.OPEN}" if circuit_breaker.OPERATOR in rows else state,
            "Since": Moment(getattr(rows.get(circuit_breaker.OPERATOR) or automatic, "since", None)),
            "Reason": Plain(getattr(rows.get(circuit_breaker.OPERATOR) or automatic, "reason", None)),
            "Next trial": Moment(
                automatic.trial_at if automatic is not None and state == circuit_breaker.OPEN else None
            ),
            "Detector": detector,
            "Watched": sight.watched if sight is not None else None,
            "Silent": Silent(silent),
            "Fail-overs going on": len(going),
        }
        return tuple(values), tuple(values.values())


class OpenBreaker(Command):
    """Have nothing replaced unasked until `breaker close`, whatever falls silent."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--reason", default="", metavar="WORDS", help="Why, for those who look.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        database = self.app.database
        reason = ": ".join(part for part in (who(), parsed_args.reason) if part)
        database.write(lambda connection: circuit_breaker.hold_breaker_open(connection, reason, database.now()))
        self.app.stdout.write("The breaker is held open: no amphora is replaced unasked.\n")


class CloseBreaker(Command):
    """Have silent amphorae replaced again, one after the other: those that are silent now are taken for dead."""

    def take_action(self, _parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        database = self.app.database
        reason = f"closed by {who()}"
        database.write(lambda connection: circuit_breaker.close_breaker(connection, reason, database.now()))
        self.app.stdout.write("The breaker is closed.\n")


class ListZombies(Lister):
    """Who sends heartbeats under an id that nobody has. Signed by nobody we know: hints, never proof."""

    def take_action(self, _parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        head = ("Amphora", "Address", "First heard", "Last heard", "Verdict")
        rows = self.app.read(unknown_amphorae.list_unknown_amphorae)
        return head, (
            (row.amphora_id, row.address, Moment(row.first_at), Age(row.last_at), Plain(row.verdict)) for row in rows
        )


def allowed(detector: str | None, rows: dict[str, circuit_breaker.BreakerRow], *, automatic: bool) -> str:
    """Whether a silent amphora would be replaced now, and if not, why not.

    Args:
        detector: who looks for silent amphorae; None if nobody does.
        rows: the breaker's.
        automatic: option of [failover].
    """
    sight, known = rows.get(circuit_breaker.SIGHT), rows.get(circuit_breaker.AUTOMATIC)
    held = rows.get(circuit_breaker.OPERATOR)
    if not automatic:
        return "nothing: [failover] automatic is off"
    if held is not None:
        return f"nothing: the breaker is held open by {held.reason or 'an operator'}"
    if detector is None:
        return "nothing: no controller looks for silent amphorae; is one running?"
    if sight is None or sight.state == circuit_breaker.BLIND:
        return f"nothing: the control plane is blind ({sight.reason if sight is not None else 'it has not looked yet'})"
    if known is not None and known.state == circuit_breaker.OPEN:
        return f"nothing: the breaker is open ({known.reason})"
    if known is not None and known.state != circuit_breaker.CLOSED:
        return f"one fail-over at a time, for a trial ({known.reason})"
    return "fail-over of silent amphorae"


def _listed(row: Any) -> tuple[Any, ...]:
    after = None if row.served_at is None else row.served_at - row.begun_at
    return (
        *(row.id, row.cause, row.load_balancer_id, row.amphora_id, Moment(row.begun_at), Span(after)),
        *(Moment(row.ended_at), row.outcome),
    )


def _line(row: Any, after: float) -> str:
    words = f"{after:+8.2f} s {row.word.replace('_', ' ')}"
    amphora = f" {row.amphora_id}" if row.amphora_id else ""
    return f"{words}{amphora}{': ' + row.detail if row.detail else ''}"
