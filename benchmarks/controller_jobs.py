# SPDX-License-Identifier: Apache-2.0
"""Measures the processor time and the SQL statements of a controller for one new load balancer, on MariaDB.

    .sandbox/test-venv/bin/python benchmarks/controller_jobs.py [--times N] [--profile FILE] [--statements]

The jobs are those of the case `flow` of the side-by-side benchmark: production code and real rows, with agents,
machines and networks that answer at once. The two topologies alternate. `--profile` adds as many jobs with cProfile and
writes the functions that need most of the time as text; `--statements` prints the statements of one job.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import mariadb  # noqa: E402
import sqlalchemy as sa  # noqa: E402
from adapter_flow import Flow  # noqa: E402
from adapter_store import Store  # noqa: E402
from cryptography.fernet import Fernet  # noqa: E402

from amphora_driver.database.vault import Vault  # noqa: E402

OPERATIONS = ("lb_create_single", "lb_create_active_standby")
_WARM = 3
_LINES = 20


class Controller(Store, Flow):
    """A controller without worker threads."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._vault = Vault([Fernet.generate_key()])
        self.db_setup(url)
        self.flow_setup()
        self._number = 0

    def prepare(self, operation: str) -> int:
        self._number += 1
        self.flow_prepare(operation, None, self._number)
        return self._number

    def run(self, operation: str, number: int) -> float:
        """Run a prepared job; return its processor time in seconds."""
        begun = time.process_time()
        self.flow_run(operation, number)
        used = time.process_time() - begun
        if (found := self.flow_check(operation, number)) is not True:
            raise RuntimeError(found)
        return used

    def print_statements(self, operation: str) -> None:
        number = self.prepare(operation)
        sent: list[str] = []

        def note(_connection, _cursor, text, *_more):
            sent.append(" ".join(text.split())[:150])

        def ended(_connection):
            sent.append("COMMIT")

        writing, engines = self.database.engine, self.database.engines
        for engine in engines:
            sa.event.listen(engine, "before_cursor_execute", note)
        sa.event.listen(writing, "commit", ended)
        self.run(operation, number)
        for engine in engines:
            sa.event.remove(engine, "before_cursor_execute", note)
        sa.event.remove(writing, "commit", ended)
        print(f"== {operation}", *sent, sep="\n")


def main() -> int:
    """Measure once, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=40, help="number of load balancers of each topology")
    parser.add_argument("--profile", type=Path, help="write a profile to this file")
    parser.add_argument("--statements", action="store_true", help="print the statements of one job of each topology")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cj-") as folder, mariadb.server("bench") as (url,):
        controller = Controller(Path(folder), url)
        used: dict[str, list[float]] = {one: [] for one in OPERATIONS}
        for turn in range(_WARM + chosen.times):
            for operation in OPERATIONS:
                seconds = controller.run(operation, controller.prepare(operation))
                if turn >= _WARM:
                    used[operation].append(seconds)
        print(json.dumps({name: _figures(values) for name, values in used.items()}))
        if chosen.statements:
            for operation in OPERATIONS:
                controller.print_statements(operation)
        if chosen.profile is not None:
            chosen.profile.write_text(_profile(controller, chosen.times))
    return 0


def _figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "mean_ms": round(sum(ordered) / len(ordered) * 1000, 2),
        "median_ms": round(ordered[len(ordered) // 2] * 1000, 2),
        "least_ms": round(ordered[0] * 1000, 2),
    }


def _profile(controller: Controller, times: int) -> str:
    texts = []
    for operation in OPERATIONS:
        measured = cProfile.Profile()
        for _ in range(times):
            number = controller.prepare(operation)
            measured.runcall(controller.run, operation, number)
        text = io.StringIO()
        pstats.Stats(measured, stream=text).strip_dirs().sort_stats("tottime").print_stats(_LINES)
        kept = [one.rstrip() for one in text.getvalue().splitlines() if one.strip()]
        texts.append("\n".join([f"== {operation}, {times} jobs", *kept]))
    return "\n\n".join([*texts, ""])


if __name__ == "__main__":
    sys.exit(main())
