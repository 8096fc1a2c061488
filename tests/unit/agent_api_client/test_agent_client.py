# SPDX-License-Identifier: Apache-2.0
"""The agent client over real TLS connections: trust, refusals and retries."""

from __future__ import annotations

import datetime as dt
import json
import logging
import socket
import threading
import time

import pytest

from amphora_driver.agent import client as client_module
from amphora_driver.agent.client import AgentClient, Applied, Loaded, Vrrp
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentRefused, AgentUnreachable, AgentUntrusted, CertificateError

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
HOST = "127.0.0.1"
APPLIED = {
    "generation": 8,
    "how": "reload",
    "reason": "frontend added",
    "loaded": {"listeners": ["one"], "members": 3},
}


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def test_put_bundle(lab):
    agent = lab.agent()
    agent.answer = (200, APPLIED)
    body = json.dumps({"generation": 8}).encode()
    applied = lab.client(agent.port).put_bundle(AMPHORA, HOST, body)
    assert applied == Applied(
        generation=8, how="reload", reason="frontend added", loaded=Loaded(listeners=("one",), members=3)
    )
    [(method, path, sent, headers)] = agent.requests
    assert (method, path, sent) == ("PUT", "/v2/bundle", body)
    assert headers["Content-Type"] == "application/json"


def test_the_client_reads_state_and_statistics(lab):
    agent = lab.agent()
    client = lab.client(agent.port)
    assert client.info(AMPHORA, HOST).agent_version == "1"
    agent.answer = (200, {"generation": 8, "applied_at": "2026-01-01T00:00:00Z", "digest": "abc"})
    state = client.bundle_state(AMPHORA, HOST)
    assert state.applied_at == dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    agent.answer = (200, {"generation": None})
    assert client.bundle_state(AMPHORA, HOST).generation is None
    agent.answer = (200, {"files": {"haproxy.cfg": "…"}})
    assert client.diagnostics(AMPHORA, HOST) == {"files": {"haproxy.cfg": "…"}}
    assert [request[1] for request in agent.requests] == [
        "/v2/info",
        "/v2/bundle",
        "/v2/bundle",
        "/v2/diagnostics",
    ]


def test_the_client_hands_over_the_vips(lab):
    agent = lab.agent()
    client = lab.client(agent.port)
    client.expect_vips(AMPHORA, HOST, 65.0)
    client.release_vips(AMPHORA, HOST, 60.0)
    assert [(method, path, json.loads(sent)) for method, path, sent, _ in agent.requests] == [
        ("POST", "/v2/vrrp/expect", {"seconds": 65.0}),
        ("POST", "/v2/vrrp/release", {"drain": 60.0, "direct_answers": True}),
    ]
    agent.answer = (200, {"holds_vip": False, "connections": 3, "draining": 12.5, "expecting": None})
    assert client.vrrp(AMPHORA, HOST) == Vrrp(holds_vip=False, connections=3, draining=12.5)
    agent.answer = (409, {"error": {"happened": "this amphora does not have them"}})
    with pytest.raises(AgentRefused, match="this amphora does not have them"):
        client.release_vips(AMPHORA, HOST, 60.0)


def test_many_calls_use_one_connection(lab):
    agent = lab.agent()
    client = lab.client(agent.port)
    for _ in range(5):
        client.info(AMPHORA, HOST)
    assert agent.connections == 1
    client.forget(AMPHORA)
    client.info(AMPHORA, HOST)
    assert agent.connections == 2


def test_connection_pools_are_bounded(lab, monkeypatch):
    monkeypatch.setattr("amphora_driver.agent.client._MOST_POOLS", 3)
    client = lab.client(1)
    for number in range(10):
        client._pool(f"amphora-{number}", HOST)
    client._pool("amphora-7", HOST)
    client._pool("new", HOST)
    assert [key[0] for key in client._pools] == ["amphora-9", "amphora-7", "new"]


def test_many_threads_share_a_client(lab):
    agent = lab.agent()
    client = lab.client(agent.port)
    done = []
    threads = [threading.Thread(target=lambda: done.append(client.info(AMPHORA, HOST).amphora_id)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [AMPHORA] * 16


# --- trusted peers -----------------------------------------------------------------------------------------


def test_a_certificate_of_another_ca_is_refused(lab):
    other = Authority(*create_authority("amphorae"))
    agent = lab.agent(issued=other.issue_server(AMPHORA, 1))
    with pytest.raises(AgentUntrusted, match="not accepted"):
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"a secret key")
    assert agent.requests == []


def test_the_certificate_of_another_amphora_is_refused(lab):
    agent = lab.agent(issued=lab.server_authority.issue_server("11111111-7f0e-4a55-9f0c-2f6f3a1f9c11", 1))
    with pytest.raises(AgentUntrusted, match="Hostname mismatch"):
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"a secret key")
    assert agent.requests == []


def test_a_controller_certificate_is_refused_for_an_amphora(lab):
    agent = lab.agent(issued=lab.server_authority.issue_client(AMPHORA, 1))
    with pytest.raises(AgentUntrusted, match="purpose"):
        lab.client(agent.port).info(AMPHORA, HOST)


def test_an_expired_certificate_is_refused(tmp_path, lab):
    ca, key = create_authority("amphorae")
    lab.trust.write_bytes(ca)
    past = Authority(ca, key, clock=lambda: time.time() - 200)
    agent = lab.agent(issued=past.issue_server(AMPHORA, 100 / 86400))
    with pytest.raises(AgentUntrusted, match="expired"):
        lab.client(agent.port).info(AMPHORA, HOST)


def test_old_tls_versions_are_refused(lab):
    agent = lab.agent()
    agent.context.minimum_version = agent.context.maximum_version = agent.context.maximum_version.TLSv1_2
    with pytest.raises(AgentUnreachable, match="TLS"):
        lab.client(agent.port).info(AMPHORA, HOST)
    assert agent.requests == []


def test_an_agent_that_refuses_the_client_certificate_is_reported(lab):
    agent = lab.agent()
    stranger = Authority(*create_authority("strangers"))
    lab.identity.write_bytes(stranger.issue_client("controller", 1).bundle().reveal())
    with pytest.raises(AgentUnreachable):
        lab.client(agent.port).info(AMPHORA, HOST)
    assert agent.requests == []


def test_environment_variables_have_no_effect(lab, monkeypatch, tmp_path):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent")
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent")
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    agent = lab.agent()
    assert lab.client(agent.port).info(AMPHORA, HOST).amphora_id == AMPHORA
    assert not (tmp_path / "keys").exists()


# -- client certificate ------------------------------------------------------------------------------------------------


def test_missing_certificates_are_reported(lab):
    lab.identity.unlink()
    with pytest.raises(CertificateError, match=r"controller\.pem.*No such file"):
        lab.client(1).info(AMPHORA, HOST)
    lab.trust.write_text("rubbish")
    with pytest.raises(CertificateError, match=r"ca\.pem"):
        lab.client(1).info(AMPHORA, HOST)


def test_changed_files_are_reloaded_and_broken_files_are_not_used(lab, caplog):
    agent = lab.agent()
    client = lab.client(agent.port)
    client.info(AMPHORA, HOST)
    lab.identity.write_bytes(b"half wr")
    with caplog.at_level(logging.WARNING):
        client.info(AMPHORA, HOST)
        client.info(AMPHORA, HOST)
    assert agent.connections == 1
    assert len([record for record in caplog.records if "keeps the previous ones" in record.message]) == 1
    lab.identity.write_bytes(lab.client_authority.issue_client("new", 1).bundle().reveal())
    client.info(AMPHORA, HOST)
    assert agent.connections == 2
    lab.trust.write_bytes(create_authority("others")[0])
    with pytest.raises(AgentUntrusted):
        client.info(AMPHORA, HOST)


# --- answers -----------------------------------------------------------------------------------------------


def test_a_refusal_contains_the_message_of_the_agent(lab):
    agent = lab.agent()
    words = {"wanted": "load generation 8", "happened": "unknown keyword 'x'", "remedy": "Fix the pool."}
    agent.answer = (422, {"error": words, "object_id": "pool-1"})
    with pytest.raises(AgentRefused, match="unknown keyword 'x'") as caught:
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"{}")
    assert caught.value.status == 422
    assert caught.value.object_id == "pool-1"
    assert caught.value.remedy == "Fix the pool."
    assert AMPHORA in caught.value.wanted
    agent.answer = (409, {"error": words, "generation": 9})
    with pytest.raises(AgentRefused) as caught:
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"{}")
    assert (caught.value.status, caught.value.object_id) == (409, None)


def test_a_refusal_without_a_document(lab):
    agent = lab.agent()
    agent.answer = (500, b"<html>secret</html>")
    with pytest.raises(AgentRefused, match="answered 500") as caught:
        lab.client(agent.port).info(AMPHORA, HOST)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"amphora_id": 3}', b"\xff", b'["' * 9999, b'{"x":' * 9999])
def test_a_malformed_answer_is_an_error(lab, answer):
    agent = lab.agent()
    agent.answer = (200, answer)
    with pytest.raises(AgentRefused, match="cannot be decoded"):
        lab.client(agent.port).info(AMPHORA, HOST)


def test_redirects_are_not_followed(lab):
    agent = lab.agent()
    agent.answer = (302, {})
    with pytest.raises(AgentRefused, match="302"):
        lab.client(agent.port).info(AMPHORA, HOST)
    assert len(agent.requests) == 1


def test_an_endless_answer_is_truncated(lab, monkeypatch):
    monkeypatch.setattr("amphora_driver.agent.client._MOST_ANSWER", 1 << 20)
    agent = lab.agent()
    sent = []

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(10000):
            handler.wfile.write(b"x" * 65536)
            sent.append(1)

    agent.behave = endless
    with pytest.raises(AgentRefused, match="longer than"):
        lab.client(agent.port).info(AMPHORA, HOST)
    assert len(sent) < 1000


@pytest.mark.quiet
def test_a_slow_body_ends_with_the_deadline(lab):
    agent = lab.agent()

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.02)

    agent.behave = drip
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="in time"):
        lab.client(agent.port).info(AMPHORA, HOST, deadline=Deadline(0.3))
    assert time.monotonic() - begin < 1.5


@pytest.mark.quiet
def test_slow_headers_end_with_the_deadline(lab):
    agent = lab.agent()

    def drip(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
        for _ in range(200):
            handler.wfile.write(b"x")
            time.sleep(0.02)

    agent.behave = drip
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="in time"):
        lab.client(agent.port, request_timeout=0.3).info(AMPHORA, HOST)
    assert time.monotonic() - begin < 1.5


@pytest.mark.quiet
def test_an_agent_that_does_not_read_ends_with_the_deadline(lab):
    plain = socket.create_server((HOST, 0))
    context = lab.agent().context
    release = threading.Event()

    def silent_server():
        accepted, _address = plain.accept()
        with context.wrap_socket(accepted, server_side=True):
            release.wait(10)

    thread = threading.Thread(target=silent_server)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable):  # the time-out for a body of this size is five times as long
        lab.client(plain.getsockname()[1], request_timeout=0.1).put_bundle(AMPHORA, HOST, b"x" * (32 << 20))
    assert time.monotonic() - begin < 2
    release.set()
    thread.join()
    plain.close()


@pytest.mark.quiet
def test_a_short_deadline_does_not_change_later_requests_of_the_connection(lab):
    agent = lab.agent()
    client = lab.client(agent.port)
    client.info(AMPHORA, HOST, deadline=Deadline(0.5))
    time.sleep(0.5)
    agent.behave = lambda handler: (time.sleep(0.6), setattr(agent, "behave", None), agent.serve(handler, b""))
    client.info(AMPHORA, HOST)
    assert agent.connections == 1


def test_bodies_and_keys_are_not_logged(lab, caplog):
    agent = lab.agent()
    agent.answer = (422, {"error": {"happened": "no"}})
    with caplog.at_level(logging.DEBUG), pytest.raises(AgentRefused):
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"PRIVATE KEY")
    assert "PRIVATE" not in caplog.text


# -- connection errors -------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_an_error(lab):
    with pytest.raises(AgentUnreachable, match="connection refused"):
        lab.client(free_port()).info(AMPHORA, HOST)


@pytest.mark.quiet
def test_a_missing_answer_times_out(lab):
    agent = lab.agent()
    agent.behave = lambda _handler: time.sleep(0.5)
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="in time"):
        lab.client(agent.port, request_timeout=0.2).info(AMPHORA, HOST)
    assert time.monotonic() - begin < 0.45
    with pytest.raises(AgentUnreachable, match="deadline of the operation has passed"):
        lab.client(agent.port).info(AMPHORA, HOST, deadline=Deadline(-1))


def test_a_missing_handshake_times_out(lab):
    with socket.create_server((HOST, 0)) as silent, pytest.raises(AgentUnreachable, match="in time"):
        lab.client(silent.getsockname()[1], connect_timeout=0.2).info(AMPHORA, HOST)


def test_a_broken_connection_is_retried_once(lab):
    agent = lab.agent()
    breaks = [True]

    def break_off(handler):
        if breaks:
            breaks.pop()
            handler.close_connection = True
            return
        agent.behave = None
        agent.serve(handler, b"")

    client = lab.client(agent.port)
    client.info(AMPHORA, HOST)
    agent.behave = break_off
    client.info(AMPHORA, HOST)
    breaks.extend([True, True])
    agent.behave = break_off
    with pytest.raises(AgentUnreachable, match=r"closed|without response"):
        client.info(AMPHORA, HOST)


def test_the_client_reconnects_to_a_restarted_agent(lab):
    first = lab.agent()
    client = lab.client(first.port)
    client.info(AMPHORA, HOST)
    # Only the listening socket: block_on_close waits for the connection, which the client keeps.
    first.server.block_on_close = False
    client.close()
    first.close()
    lab.agents.remove(first)
    second = lab.agent(port=first.port)
    client.info(AMPHORA, HOST)
    assert second.connections == 1


def test_wait_until_ready(lab):
    agent = lab.agent()
    assert lab.client(agent.port).wait_until_ready(AMPHORA, HOST, Deadline(5)).amphora_id == AMPHORA
    assert len(agent.requests) == 1


def test_the_client_waits_for_a_busy_agent(lab, monkeypatch):
    monkeypatch.setattr(client_module, "_SILENCE", 0.3)
    agent = lab.agent()
    agent.behave = lambda handler: (time.sleep(1.5), setattr(agent, "behave", None), agent.serve(handler, b""))
    assert lab.client(agent.port).info(AMPHORA, HOST).amphora_id == AMPHORA
    assert agent.connections > 1, "the client probed the agent"


def test_the_client_does_not_wait_for_a_frozen_agent(lab, monkeypatch):
    monkeypatch.setattr(client_module, "_SILENCE", 0.3)
    monkeypatch.setattr(client_module, "_HANDSHAKE_TIMEOUT", 0.3)
    agent = lab.agent()
    frozen = threading.Event()

    def freeze(_handler):
        # New connections stay in the kernel's backlog, as with a stopped process.
        agent.server.shutdown()
        frozen.wait(20)

    agent.behave = freeze
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="in time"):
        lab.client(agent.port).info(AMPHORA, HOST)
    took = time.monotonic() - begin
    frozen.set()
    assert took < 15, "the call without a probe waits 60 seconds"


def test_the_client_does_not_wait_for_a_closed_port(lab):
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="refused"):
        lab.client(free_port()).wait_until_ready(AMPHORA, HOST, Deadline(30))
    assert time.monotonic() - begin < 5


def test_an_earlier_deadline_ends_a_running_request(lab):
    agent = lab.agent()
    begun = threading.Event()
    agent.behave = lambda _handler: (begun.set(), time.sleep(2.5))
    deadline = Deadline(60)
    cutter = threading.Thread(target=lambda: (begun.wait(10), deadline.bring_forward("something else goes first")))
    cutter.start()
    begin = time.monotonic()
    with pytest.raises(AgentUnreachable, match="in time"):
        lab.client(agent.port).info(AMPHORA, HOST, deadline=deadline.within(30))
    assert time.monotonic() - begin < 2, "the client ends the request before the agent answers"
    assert len(agent.requests) == 1, "the client does not retry"
    cutter.join()


def test_wait_until_ready_retries_503_and_no_other_refusal(lab):
    agent = lab.agent()
    answers = [(503, {}), (503, b"")]

    def recover(handler):
        agent.behave, kept = None, agent.answer
        agent.answer = answers.pop() if answers else kept
        agent.serve(handler, b"")
        agent.behave, agent.answer = recover, kept

    agent.behave = recover
    client = lab.client(agent.port)
    assert client.wait_until_ready(AMPHORA, HOST, Deadline(5)).amphora_id == AMPHORA
    answers.append((404, {}))
    with pytest.raises(AgentRefused):
        client.wait_until_ready(AMPHORA, HOST, Deadline(5))


def test_wait_until_ready_does_not_wait_for_a_foreign_certificate(lab):
    agent = lab.agent(issued=lab.server_authority.issue_server("other", 1))
    begin = time.monotonic()
    with pytest.raises(AgentUntrusted):
        lab.client(agent.port).wait_until_ready(AMPHORA, HOST, Deadline(10))
    assert time.monotonic() - begin < 2


def test_the_client_is_created_without_certificates(lab):
    # A controller can start before its certificates exist. The first call reports the missing file.
    assert isinstance(lab.client(1), AgentClient)
