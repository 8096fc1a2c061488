# SPDX-License-Identifier: Apache-2.0
"""Measures an amphora beside a plain HAProxy with equal binds and members, in turns. See README.md.

    .sandbox/test-venv/bin/python benchmarks/dataplane.py                      # everything: ten minutes
    .sandbox/test-venv/bin/python benchmarks/dataplane.py --members 10 --parts compared --cases requests
    .sandbox/test-venv/bin/python benchmarks/dataplane.py --report             # the page of the stored results

Needs root, HAProxy, nftables, openssl and wrk (`apt-get install wrk`). Results are in `benchmarks/out/dataplane.json`;
`docs/reference/dataplane-figures.md` is the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dataplane"), str(ROOT / "tests"), str(Path(__file__).parent)]

from data_plane import cases, kinds, report, served_changes, settings  # noqa: E402 (only after sys.path is set)
from data_plane.place import OTHER, Place  # noqa: E402
from data_plane.sides import Amphora, Plain  # noqa: E402
from pki import Authority  # noqa: E402

_OUT = Path(__file__).parent / "out/dataplane.json"
_DOCS = ROOT / "docs/reference"
_ALL = "1,10,100,1000,10000"
# Numbers of members with the further cases, with changes under load, and with changes that are timed.
_FURTHER, _CHANGED, _TIMED = (10,), (10, 1000, 10_000), (10, 1000, 10_000)


def main() -> int:
    """Run the parts, keep their results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default=_ALL, help="numbers of members")
    parser.add_argument("--parts", default="compared,served,settings")
    parser.add_argument("--cases", default="", help="names of cases; empty for all")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of slices for each row")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a slice")
    parser.add_argument("--times", type=int, default=100, help="timed changes of each kind")
    parser.add_argument("--out", type=Path, default=_OUT, help="file of the results")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="folder of the page")
    parser.add_argument("--report", action="store_true", help="write the page of the stored results only")
    chosen = parser.parse_args()
    # A signal ends all programs in the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    if not chosen.report:
        if shutil.which("wrk") is None:
            parser.error("wrk is not installed: apt-get install wrk")
        results |= _run(chosen)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(results, indent=1))
    report.write(results, chosen.docs)
    return 0


def _run(chosen: argparse.Namespace) -> dict[str, Any]:
    load, begun = os.getloadavg()[0], time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="adp-") as folder:
        place = Place(Path(folder))
        try:
            certificate = Authority("benchmark").issue("www.example.com").pem
            (place.folder / "listener.pem").write_text(certificate)
            amphora = Amphora(place, certificate)
            members = [int(one) for one in chosen.members.split(",")]
            for part in chosen.parts.split(","):
                found[part] = {"compared": _compared, "served": _served, "settings": _settings}[part](
                    place, amphora, members, chosen
                )
            found["machine"] = _machine(place, chosen, load)
        finally:
            place.close()
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return found


def _selected(kind: kinds.Kind, number: int, chosen: argparse.Namespace) -> list[cases.Case]:
    names = chosen.cases.split(",") if chosen.cases else [one.name for one in cases.CASES]
    return [
        one
        for one in cases.CASES
        if one.kind is kind and one.name in names and (one.always or number in _FURTHER or chosen.cases)
    ]


def _compared(place: Place, amphora: Amphora, members: list[int], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    found, plain = [], Plain(place, beside=amphora)
    changed = [one for one in members if one in _CHANGED] or members
    for number in members:
        for kind in kinds.KINDS.values():
            selected = _selected(kind, number, chosen)
            if not selected:
                continue
            with cases.sink(place), amphora.serving(kind, number), plain.serving(kind, number):
                for case in selected:
                    for changing in (False, True) if case.always and number in changed else (False,):
                        slices = cases.compare(
                            place, (amphora, plain), case,
                            pairs=chosen.pairs, seconds=chosen.seconds, changing=changing,
                        )  # fmt: skip
                        row = {"members": number, "case": case.name, "unit": case.unit, "changing": changing}
                        found.append({**row, "seconds": chosen.seconds, **asdict(slices)})
                        _show(found[-1], slices)
    return found


def _show(row: dict[str, Any], slices: cases.Compared) -> None:
    rate, cost = slices.ratio("rate"), slices.ratio("cost")
    what = " with changes" if row.get("changing") else ""
    costs = f"{1 / cost:.3f}" if cost else "-"
    rates = f"{slices.first[0].rate:>12,.0f} {slices.second[0].rate:>12,.0f} ratio {rate or 0:.3f} cost {costs}"
    print(f"{row.get('members', ''):>6} {row['case'] + what:30} {rates} {row.get('setting', '')}", flush=True)


def _served(_: Place, amphora: Amphora, members: list[int], chosen: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for number in [one for one in members if one in _TIMED] or members:
        with amphora.serving(kinds.HTTP, number):
            found[str(number)] = served_changes.measure(amphora, chosen.times)
        for step, each in found[str(number)].items():
            shown = {
                name: [round(served_changes.quantile(values, q), 1) for q in (0.5, 0.99)]
                for name, values in each.items()
            }
            print(f"{number:>6} {step:8} {shown}", flush=True)
    return found


def _settings(place: Place, _: Amphora, members: list[int], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    number = min(members, key=lambda one: abs(one - 10))
    known = {one.name: one for one in cases.CASES}
    for setting in settings.SETTINGS:
        other = Plain(place, OTHER, setting.changes, name="other")
        usual = Plain(place, changes=settings.NO_OFFLOADS if setting.changes.offloads else settings.AMPHORA)
        for case in [known[name] for name in setting.cases if not chosen.cases or name in chosen.cases.split(",")]:
            with cases.sink(place), usual.serving(case.kind, number), other.serving(case.kind, number):
                slices = cases.compare(place, (other, usual), case, pairs=chosen.pairs, seconds=chosen.seconds)
            found.append({"setting": setting.name, "case": case.name, **asdict(slices)})
            _show(found[-1], slices)
    return found


def _machine(place: Place, chosen: argparse.Namespace, load: float) -> dict[str, Any]:
    said = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True).stdout
    return {
        "haproxy": said.split()[2].partition("-")[0],
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "balancing": len(place.balancing),
        "loading": len(place.loading),
        "seconds": chosen.seconds,
        "pairs": chosen.pairs,
        "load": load,
    }


if __name__ == "__main__":
    sys.exit(main())
