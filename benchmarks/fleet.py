# SPDX-License-Identifier: Apache-2.0
"""Measures a simulated fleet: real control plane and database, simulated amphorae. See README.md.

    .sandbox/test-venv/bin/python benchmarks/fleet.py                       # everything: half an hour
    .sandbox/test-venv/bin/python benchmarks/fleet.py --sizes 100 --seconds 30 --scenarios rest --database sqlite
    .sandbox/test-venv/bin/python benchmarks/fleet.py --report              # tables and plots of the stored results

Each size is measured at rest. The other scenarios follow in the same deployment of the largest size. Results are in
`benchmarks/out/fleet.json`; tables and plots are written to `docs/reference/`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simulated_fleet import at_rest, changes, events, node_outage, report
from simulated_fleet.deployment import Deployment, Options

_OUT = Path(__file__).parent / "out/fleet.json"
_DOCS = Path(__file__).parents[1] / "docs/reference"
SCENARIOS = ("rest", "renewal", "changes", "rotation", "loss", "outage")
_MEMBERS = 10_000
_PATIENCE = 300.0


def main() -> int:
    """Run the scenarios, keep their results, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", default="100,1000,10000", help="numbers of load balancers")
    add("--scenarios", default=",".join(SCENARIOS), help=", ".join(SCENARIOS))
    add("--database", default="mariadb", choices=["sqlite", "mariadb", "galera", "postgresql"])
    add("--broker", action="store_true", help="hints to other hosts over RabbitMQ")
    add("--interval", type=float, default=10.0, help="seconds between two heartbeats of an amphora")
    add("--controllers", type=int, default=3, help="number of controllers from the scenario `changes` on")
    add("--seconds", type=float, default=60.0, help="duration of a measurement at rest, and of each part of others")
    add("--busy", type=float, default=10.0, help="per cent of the amphorae with traffic")
    add("--per-minute", type=float, default=1000.0, help="changes of members in a minute")
    add("--changing", type=int, default=500, help="number of load balancers that change")
    add("--members", type=int, default=_MEMBERS, help="members of the load balancer that must delay no other one")
    add("--lost", type=int, default=500, help="number of amphorae that are lost at once")
    add("--due", type=int, default=300, help="number of load balancers whose certificates are due at once")
    add("--at-once", type=int, default=50, help="load balancers that a rotation replaces at the same time")
    add("--outage", type=float, default=60.0, help="seconds without the database, or without a node")
    add("--out", type=Path, default=_OUT, help="file of the results")
    add("--docs", type=Path, default=_DOCS, help="folder of the report")
    add("--label", default="", help="name of the results, for a comparison of two revisions")
    add("--report", action="store_true", help="write the report of the stored results only")
    chosen = parser.parse_args()
    # A signal ends all processes of the deployment too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    if not chosen.report:
        sizes = sorted(map(int, chosen.sizes.split(",")))
        for size in sizes:
            for scenario, found in _run(size, chosen, only_rest=size != sizes[-1]):
                results[f"{scenario}{chosen.label}/{chosen.database}/{size}"] = found
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                chosen.out.write_text(json.dumps(results, indent=1))
    report.write(results, chosen.docs)
    return 0


def _run(size: int, chosen: argparse.Namespace, *, only_rest: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the chosen scenarios in one deployment; yield the result of each."""
    wanted = [one for one in SCENARIOS if one in chosen.scenarios.split(",") and (one == "rest" or not only_rest)]
    options = Options(
        database=chosen.database, interval=chosen.interval, controllers=chosen.controllers, broker=chosen.broker
    )
    members = {changes.LARGE: chosen.members} if "changes" in wanted else None
    with tempfile.TemporaryDirectory(prefix="adf-") as folder:
        begun = time.monotonic()
        with Deployment(Path(folder), options).run(size, members) as deployment:
            _print(f"{size} load balancers, rows in {time.monotonic() - begun:.0f} s")
            deployment.start_all(controllers=1)
            deployment.command(do="busy", percent=chosen.busy)
            at_rest.settle(deployment)
            for scenario, work in _works(deployment, size, chosen).items():
                if scenario in wanted:
                    found = {**work(), "options": {**vars(chosen), "out": "", "docs": ""}}
                    found["problems"] = at_rest.find_warnings(deployment)
                    _print(f"{scenario}: {time.monotonic() - begun:.0f} s; {json.dumps(found['problems'], indent=1)}")
                    yield scenario, found


def _works(deployment: Deployment, size: int, chosen: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the scenarios in their order. In a small fleet they concern a part of it."""
    seconds = chosen.seconds
    changing, lost, due = min(chosen.changing, size - 1), min(chosen.lost, size // 20), min(chosen.due, size // 2)
    return {
        "rest": lambda: at_rest.measure(deployment, seconds),
        "renewal": lambda: events.renew_certificates(deployment, seconds, due),
        "changes": lambda: changes.measure(deployment, seconds, chosen.per_minute, changing),
        "rotation": lambda: events.rotate(deployment, seconds, chosen.at_once),
        "loss": lambda: events.lose_amphorae(deployment, lost, _PATIENCE),
        "outage": lambda: _stop_database(deployment, chosen, changing),
    }


def _stop_database(deployment: Deployment, chosen: argparse.Namespace, changing: int) -> dict[str, Any]:
    """Stop the database, or one node of a cluster: its other nodes serve."""
    if deployment.cluster is None:
        return events.stop_database(deployment, chosen.outage)
    return node_outage.lose_node(deployment, chosen.outage, chosen.per_minute, changing)


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
