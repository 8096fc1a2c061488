# SPDX-License-Identifier: Apache-2.0
"""Measures calls to the real octavia-driver-agent: processor time of each call and of each object.

    .sandbox/test-venv/bin/python benchmarks/status_calls.py [--calls N] [--objects N,N] [--parallel N,N] [--prepared]

Octavia's tables are in MariaDB; octavia-driver-agent runs as installed, without a provider agent. The processor time
is that of octavia-driver-agent with its forks, and of MariaDB. Other programs of the machine make it longer.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavia_lib.api.drivers import driver_lib
from simulated_fleet import processes, shape
from simulated_fleet.deployment import Deployment, Options

_BALANCERS = 120


def main() -> int:
    """Measure calls with different numbers of objects, then calls in parallel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--objects", default="1,10,100,300")
    parser.add_argument("--parallel", default="4,8", help="numbers of calls at the same time")
    parser.add_argument("--balancers", type=int, default=_BALANCERS, help="load balancers in Octavia's tables")
    parser.add_argument("--prepared", action="store_true", help="compile the SQL statements before the first fork")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out/status_calls.json")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="adf-") as folder:
        options = Options(database="mariadb", plain_agent=True)
        with Deployment(Path(folder), options).run(chosen.balancers) as deployment:
            deployment.start_driver_agent(prepared=chosen.prepared)
            sizes, parallels = (
                list(map(int, filter(None, one.split(",")))) for one in (chosen.objects, chosen.parallel)
            )
            found = _measure(deployment, chosen.calls, sizes, parallels, chosen.balancers)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1))
    return 0


def _measure(
    deployment: Deployment, calls: int, sizes: list[int], parallels: list[int], balancers: int
) -> list[dict[str, object]]:
    run = deployment.folder / "run"
    library = driver_lib.DriverLibrary(
        status_socket=str(run / "status.sock"), stats_socket=str(run / "stats.sock"), get_socket=str(run / "get.sock")
    )
    trees = [shape.load_balancer(number) for number in range(balancers)]
    members = [one.id for tree in trees for pool in tree.pools for one in pool.members]
    listeners = [one.id for tree in trees for one in tree.listeners]
    calls_of = {
        "statuses": lambda number, size: library.update_loadbalancer_status(_statuses(_some(members, size), number)),
        "statistics": lambda number, size: library.update_listener_statistics(_totals(_some(listeners, size), number)),
    }
    found: list[dict[str, object]] = []
    cases = [(size, 1) for size in sizes] + [(sizes[-1], parallel) for parallel in parallels]
    for size, parallel in cases:
        for name, call in calls_of.items():
            times = _timed(deployment, lambda number, call=call, size=size: call(number, size), calls, parallel)
            found.append({"call": name, "objects": size, "parallel": parallel, **times})
            print(json.dumps(found[-1]), flush=True)
    return found


def _statuses(ids: list[str], number: int) -> dict[str, list[dict[str, str]]]:
    word = ("ONLINE", "ERROR")[number % 2]
    return {"members": [{"id": one, "operating_status": word} for one in ids]}


def _totals(ids: list[str], number: int) -> dict[str, list[dict[str, object]]]:
    counters = ("active_connections", "bytes_in", "bytes_out", "request_errors", "total_connections")
    return {"listeners": [{"id": one, **dict.fromkeys(counters, number)} for one in ids]}


def _some(ids: list[str], size: int) -> list[str]:
    return (ids * (size // len(ids) + 1))[:size]


def _timed(deployment: Deployment, call: Callable[[int], object], calls: int, parallel: int) -> dict[str, float]:
    """Return the processor time and the duration of one call."""
    call(0)
    agent = deployment.programs["reporter"]
    before = processes.cpu_seconds(agent.pids()), processes.cpu_seconds(deployment.server_pids().get("database", []))
    begun = time.monotonic()
    with ThreadPoolExecutor(parallel) as pool:
        for one in [pool.submit(call, 1 + number) for number in range(calls)]:
            one.result()
    seconds = time.monotonic() - begun
    time.sleep(0.5)  # the agent waits for its ended forks; their processor time counts afterwards
    after = processes.cpu_seconds(agent.pids()), processes.cpu_seconds(deployment.server_pids().get("database", []))
    return {
        "agent_cpu": (after[0] - before[0]) / calls,
        "database_cpu": (after[1] - before[1]) / calls,
        "seconds": seconds / calls,
        "load_average": processes.load_average(),
    }


if __name__ == "__main__":
    sys.exit(main())
