# SPDX-License-Identifier: Apache-2.0
"""Writes the stored results as a page of tables (Markdown)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_plane.served_changes import quantile

TARGET = 0.95
SERVED_TARGET = 20.0

Results = dict[str, Any]


def write(results: Results, docs: Path) -> None:
    """Write `dataplane-figures.md`."""
    lines = ["# Figures of the data plane", ""]
    lines += ["`benchmarks/dataplane.py` writes this page ([method](../../benchmarks/README.md#data-plane)):"]
    lines += [
        "an amphora beside a plain HAProxy, in turns. [Data plane](../explanation/data-plane.md) explains it.",
        "",
    ]
    if "machine" in results:
        lines += [*_machine(results["machine"], results.get("compared", ())), ""]
    for changing, title in ((False, "Without changes"), (True, "With ten member changes in a second")):
        if found := [one for one in results.get("compared", []) if one["changing"] is changing]:
            lines += [f"## {title}", "", *_compared(found, changing=changing)]
    if served := results.get("served"):
        lines += ["## From a push to the served change", "", *_served(served)]
    if settings := results.get("settings"):
        lines += ["## Settings", "", *_settings(settings)]
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "dataplane-figures.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _machine(found: dict[str, Any], compared: Sequence[dict[str, Any]]) -> list[str]:
    where = f"the balancer has {found['balancing']}, client and members have {found['loading']}"
    pairs = " or ".join(map(str, sorted({len(one["first"]) for one in compared} or {found["pairs"]})))
    slices = f"Each slice lasts {found['seconds']:g} s, and each row has {pairs} pairs of slices."
    return [
        f"HAProxy {found['haproxy']}, Linux {found['kernel']}, {found['processors']} processors: {where}.",
        f"{slices} Load average before the run: {found['load']:.1f}.",
    ]


def _compared(found: Sequence[dict[str, Any]], *, changing: bool) -> list[str]:
    lines = [
        "Rates count requests, connections, handshakes, packets or bodies per second. *Medium bodies* have 20 kB,",
        "those of *throughput* 256 KiB. Rates are medians. *Ratio* is the median of the pairs' ratios, amphora to",
        f"plain; the target is at least {TARGET}. *Cost* is the processor time of HAProxy for one unit in microseconds",
        "(for UDP: of the sender, in which the kernel forwards). The ratio of costs is plain to amphora, so that more",
        "is better in both columns.",
        "",
    ]
    head = ["", "members", "amphora", "plain", "ratio", "cost: amphora", "plain", "ratio"]
    rows = [_row(one, changing=changing) for one in found]
    if changing:
        lines[-1:] = ["*Others* is the number of processors that the rest of the amphora uses.", ""]
        head += ["changes/s", "others"]
    timed = [one for one in found if one["case"] == "latency"]
    latency = [[f"{one['members']:,}", *_latency(one["first"]), *_latency(one["second"])] for one in timed]
    lines += _table(head, rows)
    if not latency:
        return lines
    lines += ["Latency in milliseconds, with two connections:", ""]
    return lines + _table(["members", "amphora: p50", "p99", "plain: p50", "p99"], latency)


def _row(one: dict[str, Any], *, changing: bool) -> list[str]:
    first, second = one["first"], one["second"]
    row = [one["case"], f"{one['members']:,}", f"{_median(first, 'rate'):,.0f}", f"{_median(second, 'rate'):,.0f}"]
    row += [_marked(_ratio(first, second, "rate"))]
    row += [f"{_median(first, 'cost'):.2f}", f"{_median(second, 'cost'):.2f}"]
    row += [_marked(_ratio(second, first, "cost"))]
    if changing:
        row += [f"{_median(first, 'changes'):.1f}", f"{_median(first, 'others'):.2f}"]
    return row


def _latency(slices: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{_median(slices, name):.2f}" for name in ("p50", "p99")]


def _median(slices: Iterable[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in slices)


def _ratio(first: Iterable[dict[str, Any]], second: Iterable[dict[str, Any]], name: str) -> float:
    pairs = [(one[name], other[name]) for one, other in zip(first, second, strict=True)]
    return statistics.median(one / other for one, other in pairs if other) if all(b for _, b in pairs) else 0.0


def _marked(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= TARGET else f"**{ratio:.2f}**"


def _served(found: dict[str, Any]) -> list[str]:
    lines = [
        "Milliseconds from the push of one changed member until the running HAProxy has the change, and until the",
        f"agent has confirmed it. The target is {SERVED_TARGET:.0f} ms (p99, 10,000 members in one pool).",
        "",
    ]
    rows = []
    for members, steps in found.items():
        for step, each in steps.items():
            words = [f"{quantile(each[name], share):.1f}" for name in ("served", "answered") for share in (0.5, 0.99)]
            rows.append([f"{int(members):,}", step, str(len(each["served"])), *words])
    head = ["members", "change", "number", "served p50", "p99", "answered p50", "p99"]
    return lines + _table(head, rows)


def _settings(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["The ratio is with the setting to the setting of an amphora; above 1 the setting is faster.", ""]
    rows = [
        [one["setting"], one["case"], f"{_ratio(one['first'], one['second'], 'rate'):.2f}",
         f"{_ratio(one['second'], one['first'], 'cost'):.2f}"]
        for one in found
    ]  # fmt: skip
    return lines + _table(["setting", "case", "rate", "cost"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
