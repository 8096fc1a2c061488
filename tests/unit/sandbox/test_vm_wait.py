# SPDX-License-Identifier: Apache-2.0
"""The sandbox waits for the first heartbeat of a booting machine before detection starts."""

import socket
import ssl
import threading

import pytest

from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.host import namespaces
from sandbox import vm_wait
from sandbox.settings import Settings

NAME = "0b9d8a5e-0000-4000-8000-000000000001"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A sandbox whose control plane is in this namespace."""
    monkeypatch.setattr(namespaces, "run_inside", lambda _, work: work())
    for name in ("_POLL_INTERVAL", "_NOTE_INTERVAL"):
        monkeypatch.setattr(vm_wait, name, -1.0)
    monkeypatch.setattr(vm_wait.time, "sleep", lambda _: None)
    found = Settings(
        state=str(tmp_path), prefix="x", octavia_port=1, network_port=2, agent_python="/usr/bin/python3", compute="qemu"
    )
    found.etc.mkdir()
    amphorae, controllers = create_authority("amphorae"), create_authority("controllers")
    (found.etc / "amphora_ca.pem").write_bytes(amphorae[0])
    client = Authority(*controllers).issue_client("controller", 1).bundle().reveal()
    (found.etc / "controller.pem").write_bytes(client)
    return found, amphorae


@pytest.fixture
def served(tmp_path):
    """Start the TLS server of an agent with a certificate of a CA; it answers this number of handshakes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads = []

        def serve(authority, closed_first):
            (tmp_path / "server.pem").write_bytes(Authority(*authority).issue_server(NAME, 1).bundle().reveal())
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tmp_path / "server.pem")

            def answer():
                for _ in range(closed_first):
                    server.accept()[0].close()
                connection = server.accept()[0]
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    connection.close()

            threads.append(threading.Thread(target=answer))
            threads[-1].start()
            return server.getsockname()[1]

        yield serve
        for thread in threads:
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_the_wait_ends_with_the_first_answer(settings, served):
    found, authority = settings
    said = []
    vm_wait.wait_for_agents(found, {NAME: "127.0.0.1"}, served(authority, 2), said.append)
    assert len(said) == 2
    assert "1 of 1 amphorae boot" in said[0]


def test_a_certificate_of_another_ca_counts_as_an_answer(settings, served):
    found, _ = settings
    said = []
    vm_wait.wait_for_agents(found, {NAME: "127.0.0.1"}, served(create_authority("others"), 0), said.append)
    assert said == []


def test_the_wait_ends_without_an_answer(settings, monkeypatch):
    found, _ = settings
    monkeypatch.setattr(Settings, "wait_timeout", -1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    vm_wait.wait_for_agents(found, {NAME: "127.0.0.1"}, port, pytest.fail)
