# SPDX-License-Identifier: Apache-2.0
"""Every rendered text is the expected one, byte for byte, and HAProxy takes it without a warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cases
import pytest

from amphora_driver.render.haproxy import render

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", cases.CASES)
def test_text(name, update_golden):
    rendered = render(cases.CASES[name])
    assert rendered.refused == ()
    file = HERE / f"{name}.cfg"
    if update_golden:
        file.write_text(rendered.text)
    assert rendered.text == file.read_text()


@pytest.mark.parametrize("name", cases.CASES)
def test_haproxy_takes_it(name, tmp_path):
    (tmp_path / "state").write_text("1\n")
    (tmp_path / "global.cfg").write_text(f"global\n    server-state-file {tmp_path}/state\n")
    (tmp_path / "lb.cfg").write_text(render(cases.CASES[name]).text)
    command = ["haproxy", "-c", "-dW", "-f", str(tmp_path / "global.cfg"), "-f", str(tmp_path / "lb.cfg")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_no_file_without_a_case():
    assert {file.stem for file in HERE.glob("*.cfg")} == set(cases.CASES)
