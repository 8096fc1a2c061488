# SPDX-License-Identifier: Apache-2.0
"""The rendered text equals the expected one byte for byte, and HAProxy accepts it without a warning."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import cases
import pytest
from haproxy_versions import complaints, every_version, write_files

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.render.haproxy import render

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", cases.CASES)
def test_the_text_equals_the_golden_file(name, update_golden):
    rendered = render(cases.CASES[name], shared_tickets=True)
    assert rendered.refused == ()
    file = HERE / f"{name}.cfg"
    if update_golden:
        file.write_text(rendered.text)
    assert rendered.text == file.read_text()


@every_version
@pytest.mark.parametrize("tickets", [True, False])
def test_haproxy_accepts_the_text(version, tmp_path, tickets):
    rendered = {name: render(case, shared_tickets=tickets) for name, case in cases.CASES.items()}
    assert complaints(version.here(), rendered, tmp_path) == {}


@pytest.fixture
def haproxy(tmp_path):
    """The runtime API of an HAProxy with one backend and all files that server lines name."""
    sock = tmp_path / "s"
    files = {file.name: file for case in cases.CASES.values() for file in render(case).files}
    write_files(files.values(), tmp_path)
    place = {"certificate": "crt", "ca": "ca-file", "crl": "crl-file"}
    known = [(place[str(file.secret.purpose)], name) for name, file in files.items() if file.secret]
    servers = [
        f"    server known{number} 127.0.0.1:1 ssl verify none {keyword} {name} disabled\n"
        for number, (keyword, name) in enumerate(known)
    ]
    (tmp_path / "cfg").write_text(
        f"global\n    stats socket {sock} level admin\n"
        "defaults\n    timeout connect 1s\n    timeout server 1s\nbackend known\n"
        + "".join(servers)
        + "backend b\n    balance roundrobin\n"
    )
    command = ["haproxy", "-db", "-f", str(tmp_path / "cfg")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
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
    assert len(lines) > 30
    for number, line in enumerate(sorted(lines)):
        name, _, rest = line.partition(" ")
        assert haproxy(f"add server b/{name}-{number} {rest}") == "New server registered.", rest


def server_lines(case: LoadBalancer) -> list[str]:
    return [line.strip() for line in render(case).text.splitlines() if line.startswith("    server ")]


def test_every_golden_file_has_a_case():
    assert {file.stem for file in HERE.glob("*.cfg")} == set(cases.CASES)
