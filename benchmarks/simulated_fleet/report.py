# SPDX-License-Identifier: Apache-2.0
"""Writes the stored results as tables (Markdown) and plots (SVG)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulated_fleet import plots, report_events
from simulated_fleet.report_events import table

PROCESSES = {"controller0": "controller", "health": "health manager", "reporter": "provider agent"}
OTHERS = {
    "octavia": "octavia-driver-agent",
    "database": "database",
    "balancer": "HAProxy in front of the database",
    "agents": "simulated agents",
}
# The users of the database whose rows are counted. The other statements are Octavia's.
_READERS = {"controller": "controller", "health": "health manager", "reporter": "provider agent"}
_MOST_TABLES = 8
_GALERA = [
    "The figures of the database are sums of three nodes. Each process uses the node of its host through HAProxy.",
    "The figure of HAProxy contains its health checks.",
    "",
]

Results = dict[str, Any]


def write(results: Results, docs: Path) -> None:
    """Write `fleet-figures.md`, and the plots into `fleet/`."""
    lines = ["# Figures of a simulated fleet", ""]
    lines += ["`benchmarks/fleet.py` writes this page ([method](../../benchmarks/README.md#fleet))."]
    lines += ["The columns are numbers of load balancers.", ""]
    for database in ("mariadb", "galera", "postgresql", "sqlite"):
        found = _of(results, "rest", database)
        if found:
            lines += _at_rest(found, database)
            _plot(found, docs / "fleet", database)
        for size, one in _of(results, "changes", database).items():
            lines += report_events.describe_changes(one, database, size)
        for size in dict.fromkeys(int(name.split("/")[2]) for name in results):
            lines += report_events.describe_events(results, database, size)
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "fleet-figures.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _of(results: Results, scenario: str, database: str) -> dict[int, Any]:
    names = [name.split("/") for name in results]
    return {
        int(size): results[f"{what}/{kind}/{size}"]
        for what, kind, size in sorted(names, key=lambda one: int(one[2]))
        if (what, kind) == (scenario, database)
    }


def _at_rest(found: dict[int, Any], database: str) -> list[str]:
    some = next(iter(found.values()))
    options = some["options"]
    lines = [f"## At rest, {database}", ""]
    lines += [
        f"One heartbeat of each amphora in {options['interval']:g} s.",
        f"{options['busy']:g} % of the amphorae have traffic.",
        "The provider agent is a part of octavia-driver-agent. Octavia's other processes execute its status calls.",
        "Load average of the machine (two processors) during the measurements: "
        + ", ".join(f"{one['load_average']:.1f}" for one in found.values())
        + ".",
        *(_GALERA if database == "galera" else [""]),
    ]
    sizes = list(found)
    head = ["", *(f"{size:,}" for size in sizes)]
    rows = [["amphorae", *(f"{one['amphorae']:,}" for one in found.values())]]
    named = {**PROCESSES, **OTHERS}
    if not any("balancer" in one["cpu"] for one in found.values()):
        del named["balancer"]
    rows += _rows(found, "processor", named, lambda one, name: one["cpu"].get(name), "{:.3f}")
    rows += _rows(found, "memory (PSS), MiB", named, lambda one, name: one["memory"].get(name), "{:.0f}")
    users = {"all": "all", **_READERS}
    rows += _rows(found, "statements/s", users, lambda one, name: one["statements"].get(name), "{:.1f}")
    rows += _rows(found, "rows read/s", _READERS, lambda one, name: one.get("rows", {}).get(name), "{:,.0f}")
    rows += _rows(found, "start, s of processor time", PROCESSES, lambda one, name: _start(one, name, 1), "{:.1f}")
    rows += _rows(found, "start, s", PROCESSES, lambda one, name: _start(one, name, 0), "{:.1f}")
    lines += table(head, rows)
    lines += [
        "### Commands and pages",
        "",
        "Seconds, and seconds of processor time (of the client, or of the process).",
        "",
    ]
    commands = dict.fromkeys(name for one in found.values() for name in one["commands"])
    pages = dict.fromkeys(name for one in found.values() for name in one["pages"])
    rows = [
        [f"`amphoractl {name}`", *(_timed(one["commands"].get(name)) for one in found.values())] for name in commands
    ]
    rows += [[f"`GET {name}`", *(_timed(one["pages"].get(name)) for one in found.values())] for name in pages]
    lines += table(head, rows)
    lines += ["### Tables", "", "Rows, and MiB with indexes.", ""]
    last = found[sizes[-1]]["tables"]
    largest = sorted(last, key=lambda name: -last[name][0])[:_MOST_TABLES]
    rows = [[f"`{name}`", *(_size(one["tables"].get(name)) for one in found.values())] for name in largest]
    lines += table(head, rows)
    if len(found) > 1:
        files = {"cpu": "processor", "memory": "memory", "statements": "statements", "commands": "commands and pages"}
        lines += [
            f"![{text} by number of load balancers](fleet/{database}-{name}.svg)\n" for name, text in files.items()
        ]
    return lines


def _rows(
    found: dict[int, Any], what: str, names: dict[str, str], value: Callable[[Any, str], float | None], form: str
) -> list[list[str]]:
    return [
        [
            f"{what}: {text}",
            *("" if (one := value(each, name)) is None else form.format(one) for each in found.values()),
        ]
        for name, text in names.items()
    ]


def _start(one: Any, name: str, place: int) -> float | None:
    values = one["starts"].get(name)
    return None if values is None else values[place]


def _timed(one: Any) -> str:
    return "" if one is None else f"{one['seconds']:.2f} ({one['cpu']:.2f})"


def _size(one: Sequence[float] | None) -> str:
    return "" if one is None else f"{one[0]:,.0f} ({one[1]:.1f})"


def _plot(found: dict[int, Any], folder: Path, database: str) -> None:
    if len(found) < 2:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def series(
        names: dict[str, str], value: Callable[[Any, str], float | None]
    ) -> dict[str, list[tuple[float, float]]]:
        made = {
            text: [(size, y) for size, one in found.items() if (y := value(one, name)) is not None]
            for name, text in names.items()
        }
        return {text: points for text, points in made.items() if points}

    load = {**PROCESSES, "octavia": OTHERS["octavia"], "database": OTHERS["database"]}
    timed = {
        **{f"c:{one}": one for one in ("loadbalancer list", "amphora list", "status check", "certificate list")},
        **{f"p:{one}": f"GET {one}" for one in ("/", "/metrics", "/status.json")},
    }

    def duration(one: Any, name: str) -> float | None:
        known = one["commands" if name.startswith("c:") else "pages"].get(name[2:])
        return None if known is None else known["seconds"]

    charts = {
        "cpu": plots.chart("Processor at rest", "processors", series(load, lambda o, n: o["cpu"].get(n)), 0.2, 1e-3),
        "memory": plots.chart("Memory at rest", "MiB", series(PROCESSES, lambda o, n: o["memory"].get(n)), 300),
        "statements": plots.chart(
            "Statements", "1/s", series(_READERS, lambda o, n: o["statements"].get(n)), floor=0.1
        ),
        "commands": plots.chart("Commands and pages", "seconds", series(timed, duration), 1.0, 1e-2),
    }
    for name, text in charts.items():
        (folder / f"{database}-{name}.svg").write_text(text, encoding="utf-8")
