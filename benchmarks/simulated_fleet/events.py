# SPDX-License-Identifier: Apache-2.0
"""Measures events in a fleet: due certificates, a rotation, many lost amphorae, an outage of the database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_heartbeat, job
from amphora_driver.database.tables_fleet import circuit_breaker, failover, rotation, rotation_item, silent_amphora
from amphora_driver.store import circuit_breaker as breakers
from simulated_fleet import at_rest, changes, sampling, shape
from simulated_fleet.deployment import Deployment, is_healthy

_EVERY = 0.2


class Rows:
    """Reads and writes of the measuring program."""

    def __init__(self, deployment: Deployment) -> None:
        self._database = deployment.open_database()

    def all(self, query: Any) -> list[Any]:
        return list(self._database.read(lambda connection: connection.execute(query).all()))

    def count(self, table: sa.Table, *conditions: Any) -> int:
        return int(self.all(sa.select(sa.func.count()).select_from(table).where(*conditions))[0][0])

    def write(self, statement: Any) -> int:
        return int(self._database.write(lambda connection: connection.execute(statement).rowcount))

    def now(self) -> float:
        return self._database.now()

    def dispose(self) -> None:
        self._database.dispose()


def renew_certificates(deployment: Deployment, seconds: float, balancers: int) -> dict[str, Any]:
    """Let the certificates of many load balancers become due at once; watch their renewals."""
    rows = Rows(deployment)
    try:
        ids = [shape.identifier("lb", number) for number in range(balancers)]
        begun = time.time()
        due = rows.write(
            amphora.update()
            .where(amphora.c.load_balancer_id.in_(ids))
            .values(certificate_issued_at=begun - 6.9 * 86400)
        )
        before = at_rest.read_cpu(deployment)
        spread = at_rest.watch_agents(deployment, seconds)["renewals"]
        cpu = _used(deployment, before, seconds)
        renewed = rows.count(amphora, amphora.c.certificate_issued_at >= begun)
    finally:
        rows.dispose()
    return {"due": due, "renewed": renewed, "seconds": seconds, "spread": spread, "cpu": cpu}


def rotate(deployment: Deployment, seconds: float, at_once: int) -> dict[str, Any]:
    """Rotate the whole fleet for some seconds, then abort the rotation."""
    rows = Rows(deployment)
    try:
        before, begun = at_rest.read_cpu(deployment), time.time()
        commands = {"rotate": at_rest.run_command(deployment, "rotate", "--all", "--max-unavailable", str(at_once))}
        with sampling.sampled(*deployment.counters_urls) as samples:
            time.sleep(seconds)
            commands["rotation show"] = at_rest.run_command(deployment, "rotation", "show")
            done = rows.all(sa.select(rotation_item).where(rotation_item.c.state == "done"))
            passed = time.time() - begun
            newest = rows.all(sa.select(sa.func.max(rotation.c.id)))[0][0]
            at_rest.run_command(deployment, "rotation", "abort", str(newest))
            settled = wait(lambda: not rows.count(rotation_item, rotation_item.c.state == "running"), 120.0)
        failed = rows.count(rotation_item, rotation_item.c.state == "failed")
        lasted = [row.ended_at - row.begun_at for row in done]
        unserved = rows.count(amphora, amphora.c.state != "ready")
    finally:
        rows.dispose()
    return {
        "at_once": at_once,
        "seconds": passed,
        "balancers": len(done),
        "failed": failed,
        "settled": settled,
        "not_ready": unserved,
        "each": changes.distribution(lasted),
        "commands": commands,
        "samples": samples.summary(),
        "cpu": _used(deployment, before, passed),
    }


def lose_amphorae(deployment: Deployment, number: int, patience: float) -> dict[str, Any]:
    """Take the power of many amphorae of different load balancers at once.

    If the circuit breaker opens, an operator closes it, as its description demands for amphorae that are really dead.
    """
    rows = Rows(deployment)
    try:
        lost = _choose(rows, number)
        known = rows.count(failover)
        before, begun = at_rest.read_cpu(deployment), time.time()
        found: dict[str, Any] = {"lost": len(lost), "amphorae": deployment.amphorae}
        with sampling.sampled(*deployment.counters_urls) as samples:
            deployment.command(do="lose", amphora_ids=lost)
            mine = silent_amphora.c.amphora_id.in_(lost)
            opened = sa.and_(circuit_breaker.c.name == breakers.AUTOMATIC, circuit_breaker.c.state != breakers.CLOSED)
            found["detected"] = wait(
                lambda: rows.count(silent_amphora, mine) + rows.count(failover) - known >= len(lost), patience
            )
            found["breaker_opened"] = bool(rows.count(circuit_breaker, opened))
            found["begun_before_decision"] = rows.count(failover) - known
            if found["breaker_opened"]:
                found["closed_after"] = time.time() - begun
                found["close"] = at_rest.run_command(deployment, "circuit-breaker", "close")
            closed = time.time()
            found["replaced"] = wait(lambda: not rows.count(amphora, amphora.c.id.in_(lost)), patience)
            found["replacing_seconds"] = time.time() - closed
            wait(lambda: not rows.count(failover, failover.c.ended_at.is_(None)), patience)
            served = rows.all(sa.select(failover).where(failover.c.begun_at >= begun))
        found["failovers"] = len(served)
        found["unserved"] = sum(row.served_at is None for row in served)
        found["wrong"] = sum(row.amphora_id not in lost for row in served)
        found["left"] = rows.count(amphora, amphora.c.id.in_(lost))
        found["served"] = changes.distribution(row.served_at - row.begun_at for row in served if row.served_at)
        found["cpu"] = _used(deployment, before, time.time() - begun)
        found["seconds"] = time.time() - begun
        found["samples"] = samples.summary()
    finally:
        rows.dispose()
    return found


def _choose(rows: Rows, number: int) -> list[str]:
    """Return amphorae that are spread over the fleet, one of each load balancer."""
    every = rows.all(
        sa.select(sa.func.min(amphora.c.id))
        .where(amphora.c.state == "ready", amphora.c.load_balancer_id != shape.identifier("lb", changes.LARGE))
        .group_by(amphora.c.load_balancer_id)
        .order_by(amphora.c.load_balancer_id)
    )
    step = max(1, len(every) // number)
    return [row[0] for row in every[::step]][:number]


def stop_database(deployment: Deployment, seconds: float, watched: float = 20.0) -> dict[str, Any]:
    """Kill the database, start it after some seconds, wait until everything works again, and watch the fleet."""
    rows = Rows(deployment)
    known, machines = rows.count(failover), rows.count(amphora)
    rows.dispose()
    lines = _count_lines(deployment)
    memory = at_rest.read_memory(deployment)
    deployment.server.kill()
    begun, before = time.monotonic(), at_rest.read_cpu(deployment, database=False)
    time.sleep(seconds)
    cpu = _used(deployment, before, time.monotonic() - begun, database=False)
    written = {name: now - lines[name] for name, now in _count_lines(deployment).items()}
    after = at_rest.read_memory(deployment, database=False)
    outage = time.monotonic() - begun
    deployment.restart_database()
    started, since = time.monotonic(), time.time()
    rows = Rows(deployment)
    found: dict[str, Any] = {"seconds": outage, "cpu": cpu, "log_lines": written}
    found["memory"] = {name: [memory[name], value] for name, value in after.items()}
    try:
        services = [one for one in deployment.programs.values() if one.port]
        found["healthy"] = wait(lambda: all(is_healthy(one.port) for one in services), 120.0)
        old = sa.and_(amphora_heartbeat.c.seen_at < since, amphora_heartbeat.c.amphora_id == amphora.c.id)
        outdated = sa.select(sa.func.count()).select_from(amphora.join(amphora_heartbeat, old))
        found["heartbeats"] = wait(lambda: not rows.all(outdated)[0][0], 120.0)
        found["since_start"] = time.monotonic() - started
        spread = at_rest.watch_agents(deployment, watched)
        found["spread"] = spread["drift audits"]
        found["failovers"] = rows.count(failover) - known
        found["silent"] = rows.count(silent_amphora)
        found["lost"] = machines - rows.count(amphora, amphora.c.state == "ready")
        found["open_jobs"] = rows.count(job, job.c.dirty)
    finally:
        rows.dispose()
    found["change"] = changes.measure_one(deployment)
    return found


def _count_lines(deployment: Deployment) -> dict[str, int]:
    return {name: len(re.findall(b"\n", one.log.read_bytes())) for name, one in deployment.programs.items()}


def _used(
    deployment: Deployment, before: dict[str, float], seconds: float, *, database: bool = True
) -> dict[str, float]:
    now = at_rest.read_cpu(deployment, database=database)
    return {name: (value - before.get(name, 0.0)) / seconds for name, value in now.items()}


def wait(is_met: Callable[[], bool], patience: float) -> float | None:
    """Wait for a condition; return the seconds, or None if it was not met in time."""
    begun = time.monotonic()
    while time.monotonic() - begun < patience:
        if is_met():
            return time.monotonic() - begun
        time.sleep(_EVERY)
    return None
