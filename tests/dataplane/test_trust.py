# SPDX-License-Identifier: Apache-2.0
"""The clients that the agent accepts, and the agent's identity for controllers."""

from __future__ import annotations

import hashlib
import http.client
import ssl
from types import SimpleNamespace

import pytest
from agent_heartbeats import decode
from amphora_lab import AMPHORA, HEARTBEATS, eventually
from configuration_text import LISTENER, MEMBER_IDS, POOL, listener, text
from throwaway_authority import CLIENT, SERVER, Authority

from amphora_driver.agent.client import AgentClient
from amphora_driver.agent.tls import TlsOverride
from amphora_driver.errors import AgentRefused, AgentUnreachable, AgentUntrusted
from amphora_driver.secret import Secret

pytestmark = pytest.mark.root


def ask(amphora, context):
    def run():
        connection = amphora.connection(context)
        try:
            connection.request("GET", "/v2/info")
            with connection.getresponse() as answer:
                return answer.status
        finally:
            connection.close()

    return amphora.network.thread("ctl").run(run)


def test_only_controllers_get_an_answer(amphora):
    stranger = Authority("controllers")
    refused = {
        "nothing": None,
        "another authority": stranger.issue("controller", CLIENT),
        "expired": amphora.authority.issue("controller", CLIENT, hours=-1),
        "an amphora": amphora.authority.issue("7f1a9ad2-0000-4000-8000-000000000001", SERVER),
        "one of Octavia's": amphora.authority.issue("7f1a9ad2-0000-4000-8000-000000000001", SERVER, CLIENT),
    }
    for caller, certificate in refused.items():
        file = amphora.write("other.pem", certificate) if certificate else None
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            pytest.fail(f"{caller} received status {ask(amphora, amphora.tls(file))}")
    assert ask(amphora, amphora.tls(amphora.client_certificate)) == 200
    old = amphora.tls(amphora.client_certificate)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        ask(amphora, old)
    with pytest.raises(ssl.SSLCertVerificationError):  # the controller accepts no other agent
        ask(amphora, amphora.tls(amphora.client_certificate, trust=stranger.pem))


def test_heartbeats_report_a_stopped_member(amphora, receiver, network):
    amphora.push(1, text(listener(["m1", "m2"])))
    pool = f"{POOL}:{LISTENER}"

    def report():
        heartbeat = receiver.next()
        seen.append((heartbeat.epoch, heartbeat.sequence))
        assert str(heartbeat.amphora_id) == amphora.id
        return heartbeat.document

    def statuses():
        document = report()
        return document["generation"] == 1 and document["pools"].get(pool, {}).get("members")

    seen: list[tuple[int, int]] = []
    up, down = MEMBER_IDS["m2"], MEMBER_IDS["m1"]
    eventually(lambda: statuses() == {up: "UP", down: "UP"}, "both members are up")
    network.stop_member("m1")
    try:
        eventually(lambda: statuses() == {up: "UP", down: "DOWN"}, "the stopped member is down")
        document = report()
        assert document["pools"][pool]["status"] == "UP"
        assert document["listeners"][LISTENER]["status"] == "OPEN"
    finally:
        network.start_member("m1", "198.51.100.101")
    eventually(lambda: statuses() == {up: "UP", down: "UP"}, "the member is up again")
    assert len(seen) > 3
    assert seen == sorted(set(seen))
    with pytest.raises(ValueError, match="another key"):
        decode(receiver._socket.recv(65536), bytes(32))
    # The second target has no receiver: diagnostics show the error, and the first target gets heartbeats.
    errors = amphora.call("GET", "/v2/diagnostics")[1]["heartbeat errors"]
    assert all(str(HEARTBEATS + 1) in target for target in errors)


class MemoryCertificates:
    """The certificates that a controller uses instead of its files."""

    def __init__(self) -> None:
        self.now = TlsOverride()

    def tls_override(self) -> TlsOverride:
        return self.now


@pytest.fixture
def told():
    return MemoryCertificates()


@pytest.fixture
def client(amphora, told):
    """A controller's client, whose certificates may be in memory only."""
    trust = amphora.write("trust.pem", amphora.authority.pem)
    made = AgentClient(
        SimpleNamespace(
            amp_agent=SimpleNamespace(port=9443, connect_timeout=10, request_timeout=60),
            amp_certificates=SimpleNamespace(
                client_certificate=str(amphora.client_certificate), ca_certificate=str(trust)
            ),
        ),
        told,
    )
    yield made
    made.close()


def fingerprint(pem):
    first = pem[: pem.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


def test_rotation_of_both_cas_interrupts_no_connection(amphora, network, client, told):
    """A controller rotates both CAs in steps, and the test kills the agent after each step."""
    ctl = network.thread("ctl").run
    old, signs, calls = amphora.authority, Authority("newer amphorae"), Authority("newer controllers")

    def give(issuer, client_ca, server_ca):
        new = issuer.issue(amphora.id, SERVER)
        authorities = {"client_ca": client_ca.encode(), "server_ca": server_ca.encode()}
        said = ctl(lambda: client.renew(amphora.id, AMPHORA, Secret(new.encode()), **authorities))
        assert said.fingerprint == fingerprint(new)
        ctl(lambda: client.verify_certificate(amphora.id, AMPHORA, fingerprint(new)))
        amphora.disconnect()
        starts = amphora.status("amphora-agent")["starts"]
        amphora.supervisor(op="signal", name="amphora-agent", signal=9)
        eventually(lambda: amphora.status("amphora-agent")["starts"] > starts, "the agent starts again")
        eventually(answers, "the agent answers with the confirmed certificate")
        ctl(lambda: client.verify_certificate(amphora.id, AMPHORA, fingerprint(new)))
        return new

    def answers():
        try:
            return ctl(lambda: client.info(amphora.id, AMPHORA)).amphora_id == amphora.id
        except AgentUnreachable:
            return False

    def mark(number, **more):
        told.now = TlsOverride(version=number, **more)

    mine = Secret(calls.issue("controller", CLIENT).encode())
    # Agents and controllers trust both CAs.
    mark(1, authorities=(old.pem + signs.pem).encode())
    before = give(old, old.pem + calls.pem, old.pem + signs.pem)
    # The new CAs sign. The certificate of the controller is in memory only.
    mark(2, authorities=(old.pem + signs.pem).encode(), certificate=mine)
    assert answers(), "the agent with its former certificate accepts the controller's new one"
    with pytest.raises(AgentUntrusted, match="still uses another certificate"):
        ctl(lambda: client.verify_certificate(amphora.id, AMPHORA, fingerprint(old.issue(amphora.id, SERVER))))
    now = give(signs, old.pem + calls.pem, signs.pem)
    assert fingerprint(now) != fingerprint(before)
    # Agents and controllers no longer trust the old CAs.
    mark(3, authorities=signs.pem.encode(), certificate=mine)
    give(signs, calls.pem, signs.pem)
    mark(4, authorities=signs.pem.encode())
    with pytest.raises(AgentUnreachable):
        ctl(lambda: client.info(amphora.id, AMPHORA))
    mark(5, authorities=old.pem.encode(), certificate=mine)
    with pytest.raises(AgentUntrusted):
        ctl(lambda: client.info(amphora.id, AMPHORA))
    mark(6, authorities=signs.pem.encode(), certificate=mine)
    assert answers()


def test_a_controller_cannot_revoke_its_own_access(amphora, network, client, told):
    ctl = network.thread("ctl").run
    old, calls = amphora.authority, Authority("newer controllers")
    new = Secret(old.issue(amphora.id, SERVER).encode())
    with pytest.raises(AgentRefused, match="none of the CAs"):
        ctl(lambda: client.renew(amphora.id, AMPHORA, new, client_ca=calls.pem.encode()))
    assert ctl(lambda: client.info(amphora.id, AMPHORA)).amphora_id == amphora.id
