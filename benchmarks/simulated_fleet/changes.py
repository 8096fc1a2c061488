# SPDX-License-Identifier: Apache-2.0
"""Measures changes of members: from the acceptance of a request until every amphora serves it.

The first part changes many load balancers at a fixed rate. The second part does the same while a load balancer with
thousands of members changes without a pause, which must delay no other one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job, object_status, request
from simulated_fleet import at_rest, galera_cluster, processes, sampling, shape
from simulated_fleet.deployment import Deployment

# The load balancer with many members. Its number is that of a large one.
LARGE = 0
_PATIENCE = 120.0
_RETRY = re.compile(rb"a database transaction failed in attempt (\d+)")


def measure(deployment: Deployment, seconds: float, per_minute: float, balancers: int) -> dict[str, Any]:
    """Run both parts, and compare the delays of all load balancers except the large one."""
    deployment.start_other_controllers()
    chosen = list(range(1, 1 + balancers))
    found: dict[str, Any] = {"per_minute": per_minute, "balancers": balancers, "controllers": _controllers(deployment)}
    plan = {"numbers": chosen, "per_minute": per_minute, "seconds": seconds}
    # The first change of a load balancer fills the caches of the controllers, and the simulator issues a certificate.
    make_changes(deployment, {**plan, "seconds": 60.0 * balancers / per_minute, "first": 30_000})
    wait_until_settled(deployment)
    found["alone"] = _run(deployment, plan)
    found["beside"] = _run(deployment, {**plan, "large": LARGE, "first": 10_000})
    found["members"] = _count_members(deployment)
    found["errors"] = at_rest.find_warnings(deployment, at_rest.ERROR)
    return found


def measure_one(deployment: Deployment, first: int = 20_000) -> dict[str, Any]:
    """Change one member; return the delays."""
    since = time.time()
    deployment.command(do="applied")
    lines = make_changes(deployment, {"numbers": [1], "per_minute": 60.0, "seconds": 1.0, "first": first})
    wait_until_settled(deployment)
    return {"failed": [line for line in lines if "error" in line], **measure_delays(deployment, since)}


def _controllers(deployment: Deployment) -> int:
    return sum(name.startswith("controller") for name in deployment.programs)


def _count_members(deployment: Deployment) -> int:
    pool = shape.identifier("pool", LARGE, 0)
    query = "SELECT count(*) FROM desired_object WHERE parent_id = '{}' AND kind = 'members'"
    engine = sa.create_engine(deployment.counters_urls[0])
    with engine.connect() as connection:
        count = int(connection.exec_driver_sql(query.format(pool)).scalar_one())
    engine.dispose()
    return count


def _run(deployment: Deployment, plan: dict[str, Any]) -> dict[str, Any]:
    deployment.command(do="applied")
    locks = sampling.LockCounters(*deployment.counters_urls)
    conflicts = read_conflicts(deployment)
    before, cpu, begun, since = locks.read(), at_rest.read_cpu(deployment), time.monotonic(), time.time()
    counters = processes.DatabaseCounters(*deployment.counters_urls)
    statements = counters.read()
    try:
        with sampling.sampled(*deployment.counters_urls) as samples:
            lines = make_changes(deployment, plan)
            settled = wait_until_settled(deployment)
        passed = time.monotonic() - begun
        used = {name: (now - cpu.get(name, 0.0)) / passed for name, now in at_rest.read_cpu(deployment).items()}
        after = {name: (now - statements.get(name, 0.0)) / passed for name, now in counters.read().items()}
        locked = {name: value - before[name] for name, value in locks.read().items() if name != "longest"}
        locked |= {name: value for name, value in locks.read().items() if name == "longest"}
    finally:
        locks.dispose()
        counters.dispose()
    done = [line for line in lines if "kind" in line]
    return {
        "seconds": passed,
        "settled": settled,
        "load_average": processes.load_average(),
        "changes": len(done),
        "waited": sum(line["busy"] > 0 for line in done if line["number"] != LARGE),
        "failed": [line for line in lines if "error" in line][:5],
        "failures": sum("error" in line for line in lines),
        "call": distribution(line["call"] for line in done),
        **measure_delays(deployment, since),
        "samples": samples.summary(),
        "locks": locked,
        "attempts": count_attempts(deployment),
        "conflicts": {name: value - conflicts[name] for name, value in read_conflicts(deployment).items()},
        "pending": count_pending(deployment),
        "cpu": used,
        "memory": at_rest.read_memory(deployment),
        "statements": after,
    }


def make_changes(deployment: Deployment, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute a plan of `octavia_changes`; return its lines."""
    path = deployment.folder / "log/changes.log"
    with path.open("ab") as log:
        made = subprocess.run(
            [sys.executable, "-m", "simulated_fleet.octavia_changes", json.dumps(plan)],
            env=deployment.environment(deployment.configuration), stdout=subprocess.PIPE, stderr=log,
            text=True, check=False,
        )  # fmt: skip
    assert made.returncode == 0, path.read_text()[-3000:]
    return [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]


def read_conflicts(deployment: Deployment) -> dict[str, float]:
    """Return the retries of transactions in the logs of all processes, and the conflicts that Galera has counted."""
    found: dict[str, float] = {"retries": len(_find_retries(deployment))}
    if deployment.cluster is not None:
        found |= galera_cluster.WriteSetCounters(deployment.counters_urls).read()
    return found


def count_attempts(deployment: Deployment) -> int:
    """Return the attempts of the transaction that was repeated most often since the start of the processes."""
    return 1 + max(_find_retries(deployment), default=0)


def _find_retries(deployment: Deployment) -> list[int]:
    """Return the number of the failed attempt of each line about a repeated transaction."""
    logs = [one.read_bytes() for one in (deployment.folder / "log").glob("*.log")]
    return [int(number) for log in logs for number in _RETRY.findall(log)]


def count_pending(deployment: Deployment) -> int:
    """Return the number of Octavia's load balancers and members without a final status."""
    engine = sa.create_engine(deployment.octavia_url)
    query = "SELECT count(*) FROM {} WHERE provisioning_status LIKE 'PENDING%%'"
    with engine.connect() as connection:
        found = [connection.exec_driver_sql(query.format(one)).scalar_one() for one in ("load_balancer", "member")]
    engine.dispose()
    return sum(map(int, found))


def wait_until_settled(deployment: Deployment) -> bool:
    """Wait until every change is confirmed, and every status is reported to Octavia."""
    database = deployment.open_database()
    open_jobs = sa.select(sa.func.count()).select_from(job).where(job.c.dirty | (job.c.committed < job.c.generation))
    unreported = sa.select(sa.func.count()).where(object_status.c.unreported == sa.true())
    end = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < end:
            if not any(database.read(lambda c: [c.execute(one).scalar_one() for one in (open_jobs, unreported)])):
                return True
            time.sleep(0.2)
    finally:
        database.dispose()
    return False


def measure_delays(deployment: Deployment, since: float) -> dict[str, Any]:
    """Return the distributions of the delays of the requests since a time, of the large load balancer and the others.

    A request is served when the last amphora of its load balancer has applied its generation or a later one.
    """
    database = deployment.open_database()
    try:
        rows = database.read(lambda c: c.execute(sa.select(request).where(request.c.accepted_at >= since)).all())
        ids = {row.load_balancer_id for row in rows}
        machines = database.read(lambda c: c.execute(sa.select(amphora.c.id, amphora.c.load_balancer_id)).all())
    finally:
        database.dispose()
    serving: dict[str, list[str]] = defaultdict(list)
    for machine in machines:
        if machine.load_balancer_id in ids:
            serving[machine.load_balancer_id].append(machine.id)
    applied: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for _, amphora_id, generation, at in deployment.command(do="applied"):
        applied[amphora_id].append((generation, at))
    large = shape.identifier("lb", LARGE)
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        name = "large" if row.load_balancer_id == large else "others"
        times = [_first_at(applied[one], row.generation) for one in serving[row.load_balancer_id]]
        if None in times or not times:
            found[f"{name} not served"].append(0.0)
        else:
            found[f"{name} served"].append(max(one for one in times if one is not None) - row.accepted_at)
        if row.applied_at is not None:
            found[f"{name} confirmed"].append(row.applied_at - row.accepted_at)
    return {
        "requests": len(rows),
        "not_served": sum(len(found[f"{name} not served"]) for name in ("large", "others")),
        "delays": {
            f"{name} {what}": distribution(found[f"{name} {what}"])
            for name in ("others", "large")
            for what in ("served", "confirmed")
            if found[f"{name} {what}"]
        },
    }


def _first_at(applied: Sequence[tuple[int, float]], generation: int) -> float | None:
    """Return the time of the first bundle with at least this generation. The generations only grow."""
    place = bisect_left(applied, (generation, 0.0))
    return applied[place][1] if place < len(applied) else None


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Return number, median, percentiles and maximum."""
    found = sorted(values)
    if not found:
        return {"number": 0}
    at = {"p50": 50, "p90": 90, "p99": 99}
    places = {name: found[min(len(found) - 1, len(found) * percent // 100)] for name, percent in at.items()}
    return {"number": len(found), **places, "most": found[-1]}
