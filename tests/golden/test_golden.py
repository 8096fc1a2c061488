# SPDX-License-Identifier: Apache-2.0
"""Every rendered text is the expected one, byte for byte, and HAProxy takes it without a warning."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import cases
import pytest

from amphora_driver.model.loadbalancer import LoadBalancer
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


@pytest.fixture
def haproxy(tmp_path):
    """A running HAProxy with one backend; the way to its runtime API."""
    sock = tmp_path / "s"
    (tmp_path / "cfg").write_text(
        f"global\n    stats socket {sock} level admin\n"
        "defaults\n    timeout connect 1s\n    timeout server 1s\nbackend b\n    balance roundrobin\n"
    )
    process = subprocess.Popen(["haproxy", "-db", "-f", str(tmp_path / "cfg")], stderr=subprocess.DEVNULL)
    while not sock.exists():
        assert process.poll() is None
        time.sleep(0.02)

    def ask(command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(sock))
            connection.sendall(f"{command}\n".encode())
            return connection.makefile().read().strip()

    yield ask
    process.terminate()
    process.wait(10)


def test_every_server_line_can_be_added_at_run_time(haproxy):
    lines = {line.split(maxsplit=1)[1] for case in cases.CASES.values() for line in server_lines(case)}
    assert len(lines) > 10
    for number, line in enumerate(sorted(lines)):
        name, _, rest = line.partition(" ")
        assert haproxy(f"add server b/{name}-{number} {rest}") == "New server registered."


def server_lines(case: LoadBalancer) -> list[str]:
    return [line.strip() for line in render(case).text.splitlines() if line.startswith("    server ")]


def test_no_file_without_a_case():
    assert {file.stem for file in HERE.glob("*.cfg")} == set(cases.CASES)
