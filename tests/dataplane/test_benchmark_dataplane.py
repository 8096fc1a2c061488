# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/dataplane.py`, once, at the smallest size: every part, and each kind of listener."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from amphora_lab import ROOT

pytestmark = pytest.mark.root
CASES = ("latency", "TLS handshakes", "TCP throughput", "UDP packets")


def measured(tmp_path, *words: str) -> tuple[dict, str]:
    """Run the program with these words; return its results and its page."""
    out = tmp_path / "out.json"
    program = [sys.executable, str(ROOT / "benchmarks/dataplane.py"), "--out", str(out), "--docs", str(tmp_path)]
    smallest = ["--members", "1", "--pairs", "1", "--seconds", "0.3", "--times", "1"]
    run = subprocess.run([*program, *smallest, *words], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), (tmp_path / "dataplane-figures.md").read_text()


def test_the_amphora_and_the_plain_haproxy_serve_each_case(tmp_path):
    found, page = measured(tmp_path, "--parts", "compared,served", "--cases", ",".join(CASES))
    rows = {(row["case"], row["changing"]): row for row in found["compared"]}
    always = [name for name in CASES if name != "TCP throughput"]
    assert set(rows) == {*((name, changing) for name in always for changing in (False, True)), (CASES[2], False)}
    for (name, changing), row in rows.items():
        (amphora,), (plain,) = row["first"], row["second"]
        assert amphora["rate"] > 0, name
        assert plain["rate"] > 0, name
        assert amphora["cost"] > 0, name
        assert (amphora["changes"] > 0) == changing, "the agent made the changes"
        assert f"| {name} | 1 |" in page
        assert amphora["errors"] == 0 or name == "UDP packets", row
    steps = found["served"]["1"]
    assert all(0 < each["served"][0] <= each["answered"][0] + 10 for each in steps.values())
    assert list(steps) == ["add", "weight", "remove"]


def test_a_setting_is_compared_with_that_of_an_amphora(tmp_path):
    found, page = measured(tmp_path, "--parts", "settings", "--cases", "TLS resumed,UDP bulk")
    assert [row["case"] for row in found["settings"]] == ["TLS resumed", "TLS resumed", "UDP bulk"]
    assert "| `no-tls-tickets` | TLS resumed |" in page
