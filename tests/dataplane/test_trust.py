# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the agent, and how a controller knows it."""

from __future__ import annotations

import http.client
import ssl

import pytest
from amphora_lab import HEARTBEATS, eventually
from configuration_text import LISTENER, MEMBER_IDS, POOL, listener, text
from throwaway_authority import CLIENT, SERVER, Authority

from amphora_agent.stats.codec import decode

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
    }
    for who, certificate in refused.items():
        file = amphora.write("other.pem", certificate) if certificate else None
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            pytest.fail(f"{who} was answered {ask(amphora, amphora.tls(file))}")
    assert ask(amphora, amphora.tls(amphora.client_certificate)) == 200
    old = amphora.tls(amphora.client_certificate)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        ask(amphora, old)
    with pytest.raises(ssl.SSLCertVerificationError):  # and the controller answers to nobody else either
        ask(amphora, amphora.tls(amphora.client_certificate, trust=stranger.pem))


def test_heartbeats_tell_of_a_member_that_stopped(amphora, mailbox, network):
    amphora.push(1, text(listener(["m1", "m2"])))
    pool = f"{POOL}:{LISTENER}"

    def report():
        heartbeat = mailbox.next()
        seen.append((heartbeat.epoch, heartbeat.sequence))
        assert str(heartbeat.amphora_id) == amphora.id
        return heartbeat.document

    def statuses():
        document = report()
        return document["generation"] == 1 and document["pools"].get(pool, {}).get("members")

    seen: list[tuple[int, int]] = []
    up, down = MEMBER_IDS["m2"], MEMBER_IDS["m1"]
    eventually(lambda: statuses() == {up: "UP", down: "UP"}, "both are up")
    network.stop_member("m1")
    try:
        eventually(lambda: statuses() == {up: "UP", down: "DOWN"}, "one is down")
        document = report()
        assert document["pools"][pool]["status"] == "UP"
        assert document["listeners"][LISTENER]["status"] == "OPEN"
    finally:
        network.start_member("m1", "198.51.100.101")
    eventually(lambda: statuses() == {up: "UP", down: "UP"}, "it is up again")
    assert len(seen) > 3
    assert seen == sorted(set(seen))
    with pytest.raises(ValueError, match="another key"):
        decode(mailbox._socket.recv(65536), bytes(32))
    # Nobody listens at the second target: the error is seen, and the first one has its reports all the same.
    errors = amphora.call("GET", "/v2/diagnostics")[1]["heartbeat errors"]
    assert all(str(HEARTBEATS + 1) in target for target in errors)
