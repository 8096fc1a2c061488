# SPDX-License-Identifier: Apache-2.0
"""The status server: answers, access, and slow clients."""

import gzip
import http.client
import json
import os
import socket
import ssl
import threading
import time
from contextlib import contextmanager

import pytest
from fleet_rows import rows, write
from oslo_config import types

from amphora_cluster import config as cluster_config
from amphora_driver import config, metrics
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.secret import Secret
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry import http_server
from amphora_driver.telemetry.handlers import TokenFile
from amphora_driver.telemetry.http_request import RequestRefused
from amphora_driver.telemetry.http_server import StatusServer, Telemetry

# Seconds; the machine may be busy.
TIME_LIMIT = 60


def options(url, **status):
    conf = config.load([])
    conf.set_override("connection", url, "amp_database")
    for name, value in {"bind_port": 1, **status}.items():
        conf.set_override(name, value, "amp_status_page")
    return conf


@contextmanager
def running(url, duty=lambda: True, **status):
    telemetry = Telemetry(options(url, **status), ProcessKind.CONTROLLER, "ctl:1", duty)
    telemetry.server.port = 0
    with telemetry:
        assert telemetry.server.wait_until_listening(TIME_LIMIT)
        yield telemetry.server.port


def asked(port, path="/", method="GET", context=None, **headers):
    kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
    more = {} if context is None else {"context": context}
    connection = kind("127.0.0.1", port, timeout=TIME_LIMIT, **more)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_server_answers_its_routes(url, database):
    write(database, rows(3))
    with running(url) as port:
        status, body, headers = asked(port)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"shop-2" in body
        for name, value in (("X-Frame-Options", "DENY"), ("Cache-Control", "no-store"), ("Connection", "close")):
            assert headers[name] == value
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        parts = json.loads(asked(port, "/page.json?q=shop-3")[1])["parts"]
        assert "shop-3" in parts["balancers"]
        assert "shop-2" not in parts["balancers"]
        facts = json.loads(asked(port, "/status.json")[1])
        assert (len(facts["fleet"]["balancers"]), facts["answered_by"]["kind"]) == (3, "controller")
        assert asked(port, "/nothing")[0] == 404
        packed = asked(port, accept_encoding="gzip")
        assert packed[2]["Content-Encoding"] == "gzip"
        assert b"shop-2" in gzip.decompress(packed[1])
        head = asked(port, method="HEAD")
        assert head[1] == b""
        assert int(head[2]["Content-Length"]) > 1000
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, _, headers = asked(port, method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_metrics_of_fleet_and_process_in_one_or_two_requests(url, database):
    write(database, rows(2))
    with running(url) as port:
        whole, own, fleet = (
            asked(port, path)[1].decode() for path in ("/metrics", "/metrics/process", "/metrics/fleet")
        )
        assert 'amphora_fleet_load_balancers{status="ACTIVE"} 2.0' in fleet
        assert "amphora_jobs_total" not in fleet
        assert 'amphora_jobs_total{outcome="finished"}' in own
        assert "amphora_fleet_" not in own
        assert "amphora_fleet_up 1.0" in whole
        assert "amphora_jobs_total" in whole
        assert "_created" not in whole
        told = asked(port, "/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert told[2]["Content-Type"].startswith("application/openmetrics-text")
        assert told[1].endswith(b"# EOF\n")


def test_the_token_may_change_and_must_exist(url, tmp_path):
    token = tmp_path / "token"
    token.write_text("first\nnot this\n")
    token.chmod(0o600)
    with running(url, token_file=str(token)) as port:
        status, body, headers = asked(port)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="amphorae", charset="UTF-8"')
        assert b"first" not in body
        assert asked(port, authorization="Bearer first")[0] == 200
        # With any user name, because the token authorizes.
        assert asked(port, authorization="Bearer first", host="status.example")[0] == 200
        assert asked(port, "/metrics")[0] == 401
        assert asked(port, "/healthz")[0] == 200
        token.write_text("second\n")

        os.utime(token, (1, 1))
        assert asked(port, authorization="Bearer first")[0] == 401
        assert asked(port, authorization="Bearer second")[0] == 200
        token.write_text("\n")
        os.utime(token, (2, 2))
        # Neither a missing nor an empty token gives access.
        assert [asked(port)[0], asked(port, authorization="Bearer ")[0]] == [503, 503]
        token.unlink()
        assert asked(port, authorization="Bearer second")[0] == 503


def test_a_world_readable_token_file_grants_no_access(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("first\n")
    path.chmod(0o644)
    tokens = TokenFile(str(path))
    for _ in range(3):
        with pytest.raises(RequestRefused) as refusal:
            tokens.read_token()
        assert refusal.value.status == 503
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "other users can read it" in caplog.text
    assert "first" not in caplog.text
    path.chmod(0o640)
    assert tokens.read_token() == Secret(b"first")
    path.chmod(0o604)
    with pytest.raises(RequestRefused):
        tokens.read_token()


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_new_token_is_used_even_if_its_file_has_the_same_time(tmp_path, how):
    path = tmp_path / "token"
    path.write_text("first\n")
    path.chmod(0o600)
    tokens = TokenFile(str(path))
    assert tokens.read_token() == Secret(b"first")
    before = path.stat()
    if how == "in place":
        path.write_text("third\n")
    else:
        other = tmp_path / "other"
        other.write_text("third\n")
        other.chmod(0o600)
        other.replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert tokens.read_token() == Secret(b"third")


def test_other_host_names_are_not_answered_without_a_token(url):
    with running(url) as port:
        assert asked(port, host="evil.example")[0] == 403
        assert asked(port, host=f"localhost:{port}")[0] == 200


def test_the_health_endpoint_needs_no_authorization(url):
    well = [True]
    with running(url, duty=lambda: well[0]) as port:
        assert asked(port, "/healthz", host="any.example")[:2] == (200, b"ok\n")
        well[0] = False
        assert asked(port, "/healthz")[:2] == (503, b"not working\n")


def test_tls_is_served_and_a_new_certificate_is_used_at_once(url, tmp_path):
    certificate, key = create_authority("of a test")
    authority = Authority(certificate, key)
    path = tmp_path / "status.pem"

    def fingerprint(port):
        with socket.create_connection(("127.0.0.1", port), TIME_LIMIT) as plain:
            context = ssl._create_unverified_context()
            with context.wrap_socket(plain) as secure:
                return secure.getpeercert(binary_form=True)

    path.write_bytes(authority.issue_client("status", 1).bundle().reveal())
    with running(url, certificate=str(path)) as port:
        assert asked(port, context=ssl._create_unverified_context())[0] == 200
        first = fingerprint(port)
        path.write_bytes(authority.issue_client("status", 1).bundle().reveal())
        os.utime(path, (1, 1))
        assert fingerprint(port) != first
        # A client without TLS gets no answer and does no harm.
        with pytest.raises((http.client.HTTPException, OSError)):
            asked(port)
        assert asked(port, context=ssl._create_unverified_context())[0] == 200


def test_a_slow_client_delays_no_other(url, monkeypatch):
    monkeypatch.setattr(http_server, "_CONNECTION_TIMEOUT", 1.0)
    with running(url) as port:
        slow = [
            socket.create_connection(("127.0.0.1", port), TIME_LIMIT) for _ in range(3 * http_server._MAX_CONNECTIONS)
        ]
        try:
            for one in slow[-http_server._MAX_CONNECTIONS :]:
                one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            assert asked(port, "/healthz")[0] == 200
            assert (
                sum(one.name == "status" for one in threading.enumerate()) <= 2 * http_server._MAX_CONNECTIONS
            )  # including connections that are just being closed
            # The server closes all slow connections, although some send data now and then.
            for one in slow:
                one.settimeout(TIME_LIMIT)
                while True:
                    try:
                        if not one.recv(4096):
                            break
                    except OSError:
                        break
        finally:
            for one in slow:
                one.close()
        assert asked(port)[0] == 200


def test_endless_request_heads_are_refused(url):
    with running(url) as port, socket.create_connection(("127.0.0.1", port), TIME_LIMIT) as one:
        one.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 9000)
        assert one.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_the_server_retries_a_port_in_use(url, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "_RESTART_DELAY", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Telemetry(options(url, bind_port=port), ProcessKind.CONTROLLER, "ctl:1", lambda: True) as telemetry:
            assert not telemetry.server.wait_until_listening(0.5)
            assert [one.message for one in caplog.records if "cannot serve the status page" in one.message][1:] == [], (
                "one message"
            )
            taken.close()
            assert telemetry.server.wait_until_listening(TIME_LIMIT)
            assert asked(port, "/healthz")[0] == 200


def test_without_a_port_there_is_no_server(url):
    with Telemetry(options(url, bind_port=0), ProcessKind.CONTROLLER, "ctl:1", lambda: True) as telemetry:
        assert telemetry.server is None
    conf = options(url, bind_port=0, health_bind_port=1)
    assert isinstance(Telemetry(conf, ProcessKind.HEALTH_MANAGER, "h", lambda: True).server, StatusServer)


def test_the_ports_of_several_receivers_are_no_defaults_of_other_options(url):
    defaults = {
        (group, opt.name): opt.default
        for groups in (config.GROUPS, cluster_config.GROUPS)
        for group, options in groups.items()
        for opt in options
        if isinstance(opt.type, types.Port)
    }
    own = defaults.pop(("amp_status_page", "health_bind_port"))
    assert {9878, 9879, 9880} <= set(defaults.values())
    most = next(opt for opt in config.GROUPS["amp_health"] if opt.name == "receivers").type.max
    conf = options(url)
    ports = [Telemetry(conf, ProcessKind.HEALTH_MANAGER, "h", lambda: True, index).server.port for index in range(most)]
    assert (most, ports[0], len(set(ports))) == (64, own, most)
    assert not set(ports) & set(defaults.values())


def test_an_unavailable_database_is_reported(tmp_path):
    with running(f"sqlite:///{tmp_path}/none/at/all.sqlite") as port:
        status, body, _ = asked(port)
        assert status == 200
        assert b"The database does not answer" in body
        assert json.loads(asked(port, "/status.json")[1])["level"] == "critical"
        told = asked(port, "/metrics")[1].decode()
        assert "amphora_fleet_up 0.0" in told
        assert "amphora_fleet_load_balancers" not in told
        assert "amphora_jobs_total" in told
        assert 'amphora_database_failures_total{kind="read"} 0.0' not in told


def test_ended_failovers_are_counted_once(url, database):
    now = time.time()
    ended = {"load_balancer_id": "x", "cause": "silent", "begun_at": now - 5, "silent_since": now - 12}
    before = {**ended, "served_at": now, "ended_at": now - 1, "outcome": "done"}

    def counted(name, *labels):
        return metrics.OURS.registry.get_sample_value(name, dict(labels)) or 0.0

    labels = ("cause", "silent"), ("outcome", "done")
    first = counted("amphora_failovers_total", *labels)
    seconds = counted("amphora_failover_seconds_sum", labels[0])
    write(database, {"failover": [before]})
    with running(url) as port:
        asked(port, "/metrics")
        assert counted("amphora_failovers_total", *labels) == first, (
            "fail-overs that ended before the start are not counted"
        )
        write(database, {"failover": [{**before, "ended_at": time.time()}]})
        deadline = time.monotonic() + TIME_LIMIT
        while counted("amphora_failovers_total", *labels) == first and time.monotonic() < deadline:
            asked(port, "/metrics")
        for _ in range(3):
            time.sleep(1.1)
            asked(port, "/metrics")
    assert counted("amphora_failovers_total", *labels) == first + 1
    assert counted("amphora_failover_seconds_sum", labels[0]) - seconds == pytest.approx(12, abs=0.1)
