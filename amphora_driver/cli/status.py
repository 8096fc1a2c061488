# SPDX-License-Identifier: Apache-2.0
"""Whether all is as it should be, before and after an upgrade and every morning.

Invariant: as with OpenStack's own checks the exit status is 0 where every check succeeded, 1 where one warns, 2 where
one failed. The checks do not depend on one another: without a database the rest is looked at all the same.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from cliff.lister import Lister

from amphora_driver.cli import host_checks, id_prefix, queries, status_checks
from amphora_driver.cli.formatting import Plain
from amphora_driver.cli.status_checks import Check, Result, failure, warning, well
from amphora_driver.database import schema_check
from amphora_driver.database.tables import work
from amphora_driver.database.tables_fleet import authority, process, rotation, zombie
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import circuit_breaker, failovers, process_registry, resyncs

HEAD = ("Check", "Result", "Details")


class CheckStatus(Lister):
    """Check the control plane and the fleet: exit status 0 if all is well, 1 for warnings, 2 for failures."""

    worst = Result.SUCCESS

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--problems", action="store_true", help="Only what is not as it should be.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        found = list(self._all())
        self.worst = max((one.result for one in found), default=Result.SUCCESS)
        shown = (one for one in found if one.result or not parsed_args.problems)
        return HEAD, ((one.name, one.result.word, Plain(one.details)) for one in shown)

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Print, and say with the exit status how bad it is."""
        return int(super().run(parsed_args)) or int(self.worst)

    def _all(self) -> Iterator[Check]:
        conf = self.app.conf
        yield host_checks.bounded("Doorbells", lambda: host_checks.doorbells(conf))
        yield host_checks.bounded("Broker", lambda: host_checks.broker(conf))
        fits = _schema(self.app)
        yield fits
        if fits.result is Result.FAILURE:
            yield warning("Everything else", "was not looked at: it needs the database")
            return
        database = self.app.database
        yield host_checks.bounded("Keys", lambda: host_checks.keys(conf, database))
        yield host_checks.bounded("Backends", lambda: host_checks.backends(conf, database))
        now = database.now()
        try:
            rows = self.app.read(_rows)
        except AmphoraDriverError as error:
            yield failure("Database", str(error))
            return
        yield from _of_rows(conf, rows, now)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """All that is looked at, of one moment."""

    processes: Any
    balancers: list[queries.Balancer]
    machines: Any
    failovers: Any
    rotations: Any
    breaker: dict[str, circuit_breaker.BreakerRow]
    zombies: Any
    authorities: Any
    resyncs: Any


def _schema(app: Any) -> Check:
    try:
        wrong = schema_check.describe_mismatch(app.recorded_schema())
        if wrong is None:
            app.database.read(schema_check.require_utf8mb4)
    except AmphoraDriverError as error:
        return failure("Database", str(error))
    if wrong is not None:
        return failure("Database", f"{wrong[0]}. {wrong[1]}")
    return well("Database", f"schema {schema_check.known_revisions()[-1]}, the one of this version")


def _rows(connection: sa.Connection) -> Rows:
    machines = queries.amphorae().where(sa.or_(work.c.op.is_(None), id_prefix.IS_LOAD_BALANCER))
    alive = sa.select(authority).where(authority.c.state != "gone").order_by(authority.c.id)
    return Rows(
        processes=connection.execute(sa.select(process).order_by(process.c.host, process.c.name)).all(),
        balancers=queries.balancers(connection),
        machines=connection.execute(machines).all(),
        failovers=failovers.list_open_failovers(connection),
        rotations=connection.execute(sa.select(rotation).where(rotation.c.ended_at.is_(None))).all(),
        breaker=circuit_breaker.read_breaker_rows(connection),
        zombies=connection.execute(sa.select(zombie)).all(),
        authorities=connection.execute(alive).all(),
        resyncs=resyncs.list_resyncs(connection),
    )


def _of_rows(conf: Any, rows: Rows, now: float) -> Iterator[Check]:
    # What a change may take until it is over or in ERROR, with a machine that boots in it.
    patience = conf.controller.boot_timeout + conf.controller.operation_timeout
    known = {one.work.load_balancer_id for one in rows.balancers}
    agents = host_checks.hosts_of(rows.processes, now, process_registry.ProcessKind.PROVIDER_AGENT.value)
    here = socket.gethostname() in agents
    yield from status_checks.of_processes(rows.processes, now, process_registry.installed_version())
    questions: dict[str, Callable[[], Check]] = {
        "Octavia's sockets": lambda: host_checks.sockets(conf, elsewhere=any(agents.values()), here=here),
        "Authorities": lambda: host_checks.authorities(conf, rows.authorities, now),
        "Certificates": lambda: status_checks.of_certificates(rows.machines, now),
        "Breaker": lambda: status_checks.of_breaker(rows.breaker),
        "Witnesses": lambda: status_checks.of_witnesses(conf.failover.witnesses, rows.machines),
        "Silent amphorae": lambda: status_checks.of_silence(rows.machines, now, conf.failover.silent_after),
        "Fail-overs": lambda: status_checks.of_failovers(
            [one for one in rows.failovers if one.load_balancer_id in known], now, conf.rotation.patience
        ),
        "Rotations": lambda: status_checks.of_rotations(rows.rotations),
        "Drift": lambda: status_checks.of_drift(rows.machines),
        "Zombies": lambda: status_checks.of_zombies(rows.zombies),
        "Agents": lambda: status_checks.of_agents(rows.machines, process_registry.installed_version()),
        "Images": lambda: status_checks.of_images(rows.machines, now, conf.rotation.image_days),
        "Octavia's records": lambda: status_checks.of_resyncs(rows.resyncs, now, patience),
    }
    yield from status_checks.of_work(rows.balancers, now, patience)
    for name, question in questions.items():
        yield host_checks.bounded(name, question)
