# SPDX-License-Identifier: Apache-2.0
"""Measures the loss of one Galera node while members change: killed, and without an answer as after a loss of power."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from amphora_driver.database.tables import amphora
from amphora_driver.database.tables_fleet import failover, silent_amphora
from amphora_driver.errors import StoreError
from simulated_fleet import at_rest, changes, processes
from simulated_fleet.deployment import Deployment, is_healthy
from simulated_fleet.events import Rows
from simulated_fleet.sampling import repeating

# The lost node: that of Octavia, of a controller, and of the driver.
_LOST = 0
# Seconds with changes before the loss, and after the return of the node.
_BEFORE, _AFTER = 10.0, 15.0
# A loss has no effect on requests that end this number of seconds after it, or later.
_LATE = 30.0


def lose_node(deployment: Deployment, seconds: float, per_minute: float, balancers: int) -> dict[str, Any]:
    """Lose the node twice for some seconds; return the figures of both losses."""
    deployment.start_other_controllers()
    plan = {"numbers": list(range(1, 1 + balancers)), "per_minute": per_minute}
    return {
        "per_minute": per_minute,
        "balancers": balancers,
        "killed": _lose(deployment, seconds, {**plan, "first": 40_000}, frozen=False),
        "frozen": _lose(deployment, seconds, {**plan, "first": 45_000}, frozen=True),
        "errors": at_rest.find_warnings(deployment, at_rest.ERROR),
    }


def _lose(deployment: Deployment, seconds: float, plan: dict[str, Any], *, frozen: bool) -> dict[str, Any]:
    cluster = deployment.cluster
    assert cluster is not None
    rows = Rows(deployment)
    known, machines = rows.count(failover), rows.count(amphora)
    rows.dispose()
    deployment.command(do="applied")
    lost = cluster.nodes[_LOST]
    conflicts, since = changes.read_conflicts(deployment), time.time()
    with _watched(deployment) as unhealthy, ThreadPoolExecutor(1) as pool:
        work = pool.submit(changes.make_changes, deployment, {**plan, "seconds": _BEFORE + seconds + _AFTER})
        time.sleep(_BEFORE)
        lost_at = time.time()
        (lost.freeze if frozen else lost.kill)()
        time.sleep(seconds)
        lost.kill()
        joined = cluster.restart(_LOST)
        lines = work.result()
        settled = _settle(deployment)
    rows = Rows(deployment)
    try:
        found = describe_lines(lines, lost_at)
        found |= {
            "seconds": seconds,
            "joined": joined,
            "settled": settled,
            "load_average": processes.load_average(),
            "unhealthy": {name: max(times) - lost_at for name, times in unhealthy.items()},
            # The counters of Galera begin anew with the returned node, those of the logs do not.
            "retries": changes.read_conflicts(deployment)["retries"] - conflicts["retries"],
            "pending": changes.count_pending(deployment),
            "failovers": rows.count(failover) - known,
            "silent": rows.count(silent_amphora),
            "lost": machines - rows.count(amphora, amphora.c.state == "ready"),
            **changes.measure_delays(deployment, since),
        }
    finally:
        rows.dispose()
    return {**found, "change": changes.measure_one(deployment, first=plan["first"] + 2_500)}


def describe_lines(lines: Sequence[dict[str, Any]], lost_at: float) -> dict[str, Any]:
    """Return the numbers of accepted and failed changes, and how long the loss affected them."""
    done = sorted((one for one in lines if "kind" in one), key=lambda one: one["at"])
    failed = sorted((one for one in lines if "error" in one), key=lambda one: one["at"])
    # The gap begins with the loss, because an earlier pause of the changes is no effect of it.
    times = [lost_at, *(one["at"] for one in done if lost_at < one["at"] < lost_at + _LATE)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    kinds = Counter(one["error"].partition(":")[0] for one in failed)
    return {
        "changes": len(done),
        "failures": len(failed),
        "kinds": dict(kinds.most_common()),
        "failed": [one["error"] for one in failed][:5],
        "last_failure": max((one["at"] - lost_at for one in failed), default=None),
        "early_failures": sum(one["at"] < lost_at for one in failed),
        "gap": max(gaps, default=None),
        # The accepted changes of each second since the loss.
        "course": sorted(Counter(int(one["at"] - lost_at) for one in done if one["at"] > lost_at).items()),
        "call": changes.distribution(one["call"] for one in done),
    }


def _settle(deployment: Deployment) -> bool:
    """Wait as `changes.wait_until_settled`; a balancer may still replace connections."""
    try:
        return changes.wait_until_settled(deployment)
    except StoreError:
        return changes.wait_until_settled(deployment)


@contextmanager
def _watched(deployment: Deployment) -> Iterator[dict[str, list[float]]]:
    """Yield the times at which a process was not healthy, which a thread collects while the block runs."""
    ports = {name: one.port for name, one in deployment.programs.items() if one.port}
    found: dict[str, list[float]] = {}

    def look() -> None:
        for name, port in ports.items():
            if not is_healthy(port):
                found.setdefault(name, []).append(time.time())

    with repeating(look):
        yield found
