# SPDX-License-Identifier: Apache-2.0
"""Clients that the agent's TLS gate accepts, with one CA for controllers and amphorae."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import uuid

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from throwaway_authority import CLIENT, SERVER, Authority

from amphora_agent.paths import Paths
from amphora_agent.tls_gate import TlsGate
from amphora_agent.tls_identity import Identity
from amphora_agent.x509 import AMPHORA_NAME, AMPHORA_PURPOSE, client_refusal

EMAIL = ExtendedKeyUsageOID.EMAIL_PROTECTION
OWN, OTHER = (str(uuid.UUID(int=number, version=4)) for number in (1, 2))


class Agent:
    """The agent's TLS gate; an accepted connection gets one byte."""

    def __init__(self, directory):
        self.directory, self.authority = directory, Authority("both")
        paths = Paths(directory)
        paths.etc.mkdir(parents=True)
        (paths.etc / "server.pem").write_text(self.authority.issue(OWN, SERVER, CLIENT))
        (paths.etc / "client_ca.pem").write_text(self.authority.pem)
        self.identity = Identity(paths, uuid.UUID(OWN))
        self.address = ("127.0.0.1", 0)
        listener = socket.create_server(self.address)
        self.address = listener.getsockname()
        self.gate = TlsGate(listener, self.identity)
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self):
        while self._ended not in select.select([self.gate, self._ended], [], [])[0]:
            connection, _ = self.gate.accept()
            with connection:
                connection.sendall(connection.recv(1))

    def answers(self, name, *purposes):
        """Return whether a client with this certificate gets an answer."""
        file = self.directory / "caller.pem"
        file.write_text(self.authority.issue(name, *purposes))
        context = ssl.create_default_context(cadata=self.authority.pem)
        context.load_cert_chain(file)
        with (
            socket.create_connection(self.address, 10) as plain,
            context.wrap_socket(plain, server_hostname=OWN) as connection,
        ):
            try:
                connection.sendall(b"x")
                return connection.recv(1) == b"x"
            except (ssl.SSLError, ConnectionError):
                return False

    def close(self):
        self._end.send(b".")
        self._thread.join()
        gate = self.gate
        gate.close()
        gate._thread.join()
        for each in (self._end, self._ended, gate._wakeup, gate._waker, gate._selector):
            each.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    made = Agent(tmp_path_factory.mktemp("agent"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "purposes"),
    [
        ("controller", [CLIENT]),
        # Certificates by Octavia's guide for operators, and by procedures without a purpose.
        ("www.example.com", [CLIENT, EMAIL]),
        ("controller", []),
    ],
)
def test_a_controller_is_answered(agent, name, purposes):
    before = agent.identity.refused.copy()
    assert agent.answers(name, *purposes)
    assert agent.identity.refused == before


@pytest.mark.parametrize(
    ("name", "purposes", "why"),
    [
        # Octavia's generator issues such certificates to amphorae.
        (OTHER, [SERVER, CLIENT], AMPHORA_PURPOSE),
        ("controller", [CLIENT, SERVER], AMPHORA_PURPOSE),
        (OTHER, [CLIENT], AMPHORA_NAME),
        (OTHER.upper(), [], AMPHORA_NAME),
        (OTHER, [SERVER], "CERTIFICATE_VERIFY_FAILED"),
        ("controller", [EMAIL], "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_an_amphora_is_not_answered(agent, name, purposes, why):
    before = agent.identity.refused.copy()
    assert not agent.answers(name, *purposes)
    # The gate is one thread, so it has counted the refusal before this answer.
    assert agent.answers("controller", CLIENT)
    assert agent.identity.refused - before == {why: 1}


def test_an_unreadable_certificate_is_refused():
    pem = Authority("a").issue("controller", CLIENT)
    der = ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----BEGIN PRIVATE")].strip())
    assert client_refusal(der, {}) is None
    for end in range(0, len(der), 7):
        assert client_refusal(der[:end], {}) == "client certificate cannot be read"
