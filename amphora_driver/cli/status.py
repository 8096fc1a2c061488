# SPDX-License-Identifier: Apache-2.0
"""The command `status check`, for use before and after an upgrade and for monitoring.

Invariant: the exit status follows OpenStack's upgrade checks: 0 for success, 1 for a warning, 2 for a failure. The
checks are independent of each other. Checks without a need for the database run without it.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.cli import host_checks, queries, status_checks
from amphora_driver.cli.command import Lister, Table, argument
from amphora_driver.cli.formatting import Value
from amphora_driver.cli.host_checks import run_check
from amphora_driver.cli.status_checks import Check, Result, failure, success, warning
from amphora_driver.database import schema_check
from amphora_driver.database.tables_fleet import certificate_authority, process, rotation, unknown_amphora
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.installation import installed_version
from amphora_driver.store import circuit_breaker, failovers, process_registry, resyncs, sealed_secrets
from amphora_driver.store.sealed_secrets import ExpiringSecret
from amphora_driver.telemetry.process_groups import DEAD_AFTER

HEAD = ("Check", "Result", "Details")
_DAY = 86_400.0
_MAX_EXPIRING = 1000


class CheckStatus(Lister):
    """Check the control plane and the amphorae. Exit status 0: success, 1: warnings, 2: failures.

    In the read-only mode, the checks of this host are omitted: sockets, broker, keys, files, backends, Octavia's API.
    """

    read_only_mode = True
    arguments = (argument("--problems", action="store_true", help="Show only warnings and failures."),)
    worst = Result.SUCCESS

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        found = list(self._run_all())
        self.worst = max((one.result for one in found), default=Result.SUCCESS)
        shown = (one for one in found if one.result or not parsed_args.problems)
        return HEAD, ((one.name, one.result.word, Value(one.details)) for one in shown)

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Print the checks; return the worst result as the exit status."""
        return int(super().run(parsed_args)) or int(self.worst)

    def _run_all(self) -> Iterator[Check]:
        if self.app.records is not None:
            yield from self._run_on_records()
            return
        conf = self.app.conf
        yield run_check("Local sockets", lambda: host_checks.check_local_sockets(conf))
        yield run_check("Broker", lambda: host_checks.check_broker(conf))
        yield run_check("Octavia's providers", lambda: host_checks.check_provider(conf))
        schema = _check_schema(self.app)
        yield schema
        if schema.result is Result.FAILURE:
            yield warning("not checked: the checks need the database. Repair the database first.", "Everything else")
            return
        database = self.app.database
        now = database.now()
        # The database server computes the rows of a large fleet while this process decrypts the secrets.
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(self._read_rows, now)
            yield run_check("Keys", lambda: host_checks.check_keys(conf, database))
            yield run_check("Backends", lambda: host_checks.check_backends(conf, database))
            yield run_check("Log targets", lambda: host_checks.check_log_certificate(conf, now))
            try:
                rows = reading.result()
            except AmphoraDriverError as error:
                yield failure(str(error), "Database")
                return
        yield from _check_rows(conf, rows, now, host=True)

    def _run_on_records(self) -> Iterator[Check]:
        """Check the records of a status page."""
        try:
            rows = self._read_rows(time.time())
        except AmphoraDriverError as error:
            yield failure(str(error), "Status page")
            return
        found = self.app.records.newest
        yield success(f"a process of version {found.version} answers", "Status page")
        yield from _check_rows(self.app.conf, rows, found.at, host=False)

    def _read_rows(self, now: float) -> Rows:
        before = now + self.app.conf.amp_tls.expiry_days * _DAY
        rows: Rows = self.app.read(lambda connection: _read_rows(connection, now, before))
        return rows


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one reading transaction, as input of the checks."""

    processes: Any
    load_balancers: list[queries.LoadBalancerSummary]
    machines: Any
    failovers: Any
    rotations: Any
    breaker: dict[str, circuit_breaker.BreakerRow]
    unknown_amphorae: Any
    authorities: Any
    resyncs: Any
    expiring: Sequence[ExpiringSecret]


def _check_schema(app: Any) -> Check:
    try:
        state = app.recorded_schema()
        wrong = schema_check.describe_mismatch(state)
        if wrong is None:
            app.database.read(schema_check.require_utf8mb4)
    except AmphoraDriverError as error:
        return failure(str(error), "Database")
    if wrong is not None:
        return failure(f"{wrong[0]}. {wrong[1]}", "Database")
    if schema_check.pending_contracts(state):
        happened = schema_check.describe_schema(state)
        return warning(f"{happened}. When all processes have it: {schema_check.DRIVER.command} --contract.", "Database")
    return success(schema_check.describe_schema(state), "Database")


def _read_rows(connection: sa.Connection, now: float, expiry_before: float) -> Rows:
    authority = certificate_authority.c
    columns = (authority.id, authority.kind, authority.state, authority.expires_at)
    current = sa.select(*columns).where(authority.state != "gone").order_by(authority.id)
    return Rows(
        processes=connection.execute(sa.select(process).order_by(process.c.host, process.c.name)).all(),
        load_balancers=queries.list_statuses(connection),
        machines=queries.list_checked_amphorae(connection),
        failovers=failovers.list_open_failovers(connection),
        rotations=connection.execute(sa.select(rotation).where(rotation.c.ended_at.is_(None))).all(),
        breaker=circuit_breaker.read_breaker_rows(connection),
        unknown_amphorae=connection.execute(sa.select(unknown_amphora)).all(),
        authorities=connection.execute(current).all(),
        resyncs=resyncs.list_resyncs(connection),
        expiring=sealed_secrets.list_expiring(connection, now, expiry_before, _MAX_EXPIRING),
    )


def _check_rows(conf: Any, rows: Rows, now: float, *, host: bool) -> Iterator[Check]:
    """Yield the checks of rows, and with `host` those that also read files and sockets of this host."""
    # The time-outs of a boot and of an operation limit the duration of a change. A change that is open for longer shows
    # a problem.
    max_seconds = conf.amp_controller.boot_timeout + conf.amp_controller.operation_timeout
    known = {one.work.load_balancer_id for one in rows.load_balancers}
    yield from status_checks.check_processes(rows.processes, now, installed_version())
    checks: dict[str, Callable[[], Check]] = {
        "Octavia's sockets": lambda: _check_octavia_sockets(conf, rows.processes, now),
        "Certificate authorities": lambda: host_checks.check_authorities(conf, rows.authorities, now),
        "Recorded authorities": lambda: status_checks.check_authorities(
            host_checks.recorded_authorities(rows.authorities), now
        ),
        "Certificates": lambda: status_checks.check_certificates(rows.machines, now),
        "TLS certificates": lambda: status_checks.check_tls_certificates(rows.expiring, now, conf.amp_tls.expiry_days),
        "Circuit breaker": lambda: status_checks.check_breaker(rows.breaker),
        "Witnesses": lambda: status_checks.check_witnesses(conf.amp_failover.witnesses, rows.machines),
        "Silent amphorae": lambda: status_checks.check_silent_amphorae(
            rows.machines, now, conf.amp_failover.silent_after
        ),
        "Fail-overs": lambda: status_checks.check_failovers(
            [one for one in rows.failovers if one.load_balancer_id in known], now, conf.amp_rotation.replacement_timeout
        ),
        "Rotations": lambda: status_checks.check_rotations(rows.rotations),
        "Drift": lambda: status_checks.check_drift(rows.machines),
        "Limits": lambda: status_checks.check_limits(rows.machines),
        "Unknown amphorae": lambda: status_checks.check_unknown_amphorae(rows.unknown_amphorae),
        "Agents": lambda: status_checks.check_agents(rows.machines, installed_version()),
        "Images": lambda: status_checks.check_images(rows.machines, now, conf.amp_rotation.image_days),
        "Octavia's records": lambda: status_checks.check_resyncs(rows.resyncs, now, max_seconds),
    }
    yield from status_checks.check_load_balancers(rows.load_balancers, now, max_seconds)
    omitted = {"Recorded authorities"} if host else {"Octavia's sockets", "Certificate authorities"}
    for name, check in checks.items():
        if name not in omitted:
            yield run_check(name, check)


def _check_octavia_sockets(conf: Any, processes: Sequence[Any], now: float) -> Check:
    agents = [row for row in processes if row.kind == process_registry.ProcessKind.PROVIDER_AGENT.value]
    here = any(row.host == socket.gethostname() for row in agents)
    elsewhere = any(now - row.seen_at <= DEAD_AFTER for row in agents)
    return host_checks.check_octavia_sockets(conf, elsewhere=elsewhere, here=here)
