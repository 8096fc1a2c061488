# SPDX-License-Identifier: Apache-2.0
"""Measures a simulated fleet: real control plane and database, simulated amphorae. See README.md.

    .sandbox/test-venv/bin/python benchmarks/fleet.py                       # everything: several hours
    .sandbox/test-venv/bin/python benchmarks/fleet.py --sizes 100 --seconds 30 --scenarios rest --database sqlite
    .sandbox/test-venv/bin/python benchmarks/fleet.py --report              # tables and plots of the stored results

Results are in `benchmarks/out/fleet.json`; tables and plots are written to `docs/reference/`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from simulated_fleet import at_rest, report
from simulated_fleet.deployment import Deployment, Options

_OUT = Path(__file__).parent / "out/fleet.json"
_DOCS = Path(__file__).parents[1] / "docs/reference"


def main() -> int:
    """Run the scenarios, keep their results, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000,10000", help="numbers of load balancers")
    parser.add_argument("--scenarios", default="rest", help="rest")
    parser.add_argument("--database", default="mariadb", choices=["sqlite", "mariadb", "postgresql"])
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two heartbeats of an amphora")
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of a measurement at rest")
    parser.add_argument("--busy", type=float, default=10.0, help="per cent of the amphorae with traffic")
    parser.add_argument("--out", type=Path, default=_OUT, help="file of the results")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="folder of the report")
    parser.add_argument("--label", default="", help="name of the results, for a comparison of two revisions")
    parser.add_argument("--report", action="store_true", help="write the report of the stored results only")
    chosen = parser.parse_args()
    # A signal ends all processes of the deployment too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    if not chosen.report:
        for size in map(int, chosen.sizes.split(",")):
            for scenario in chosen.scenarios.split(","):
                found = _run(scenario, size, chosen)
                results[f"{scenario}{chosen.label}/{chosen.database}/{size}"] = found
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                chosen.out.write_text(json.dumps(results, indent=1))
    report.write(results, chosen.docs)
    return 0


def _run(scenario: str, size: int, chosen: argparse.Namespace) -> dict[str, object]:
    options = Options(database=chosen.database, interval=chosen.interval, controllers=chosen.controllers)
    with tempfile.TemporaryDirectory(prefix="adf-") as folder:
        begun = time.monotonic()
        with Deployment(Path(folder), options).run(size) as deployment:
            print(f"{scenario}: {size} load balancers, rows in {time.monotonic() - begun:.0f} s", flush=True)
            deployment.start_all()
            deployment.command(do="busy", percent=chosen.busy)
            found = at_rest.measure(deployment, chosen.seconds)
            found["options"] = {"interval": chosen.interval, "busy": chosen.busy, "controllers": chosen.controllers}
            print(json.dumps(found["warnings"], indent=1), flush=True)
            return found


if __name__ == "__main__":
    sys.exit(main())
