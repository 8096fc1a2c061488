# SPDX-License-Identifier: Apache-2.0
"""The API with a real database: failed authentications, metrics, the health check, slow clients, final answers."""

import multiprocessing
import socket
import time
import uuid
from types import SimpleNamespace

import pytest
from cryptography.fernet import Fernet

from amphora_cluster import config
from amphora_cluster.api import connections, worker
from amphora_cluster.api.app import create_app, make_app
from amphora_cluster.api.attempts import FailedAttempts
from amphora_cluster.api.counters import INVALID, SharedCounters
from amphora_cluster.api.server import gunicorn_options
from amphora_cluster.api.signature import SignedRequest
from amphora_cluster.api.webhooks import Service
from amphora_cluster.database.tokens import token_digest, token_id
from amphora_driver.secret import Secret

GROUP = "11111111-1111-1111-1111-111111111111"
URL = f"/v1/groups/{GROUP}"
MOST = 3
WRONG = {"Authorization": "Bearer wrong"}


@pytest.fixture
def stores(sqlite_cluster, make_stores):
    stores = make_stores(sqlite_cluster)
    stores.add(GROUP)
    return stores


@pytest.fixture
def service(stores):
    attempts = FailedAttempts(MOST)
    return Service(groups=stores.groups, requests=stores.requests, tokens=stores.tokens, attempts=attempts)


@pytest.fixture
def client(service):
    return make_app(service).test_client()


@pytest.fixture
def token(stores):
    return stores.tokens.create(GROUP, "heat", "admin")[1].reveal().decode()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def signed(token, timestamp):
    made = SignedRequest(
        method="GET", path=URL, query="", timestamp=int(timestamp), nonce=uuid.uuid4().hex, idempotency_key="", body=b""
    )
    return made.headers(token_id(token), token_digest(Secret(token.encode())))


def statuses(client, headers, number, **more):
    return [client.get(URL, headers=headers, **more).status_code for _ in range(number)]


class TestFailedAuthentications:
    def test_too_many_are_refused_without_a_look_at_the_database(self, client, service, stores):
        assert statuses(client, WRONG, MOST + 1) == [401] * (MOST + 1)

        def fail(_):
            raise AssertionError("the database is read")

        service.tokens = SimpleNamespace(find=fail, now=stores.database.now)
        answer = client.get(URL, headers=bearer(f"{uuid.uuid4()}.x"))
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert set(answer.json) == {"wanted", "happened", "remedy"}

    def test_a_caller_that_was_valid_before_is_served(self, client, stores, token):
        new = stores.tokens.create(GROUP, "new", "admin")[1].reveal().decode()
        assert statuses(client, bearer(token), 1) == [200]
        assert statuses(client, signed(token, time.time()), 1) == [200]
        statuses(client, WRONG, MOST + 1)
        assert statuses(client, bearer(token), 2) == [200, 200]
        assert statuses(client, signed(token, time.time()), 1) == [200]
        assert statuses(client, bearer(new), 1) == [429], "not known yet"

    def test_another_address_is_served(self, client, token):
        statuses(client, WRONG, MOST + 1)
        assert statuses(client, bearer(token), 1, environ_base={"REMOTE_ADDR": "192.0.2.9"}) == [200]

    @pytest.mark.parametrize(
        ("behind_proxy", "peer", "status"),
        [(True, "203.0.113.9", 200), (False, "127.0.0.1", 200), (False, "203.0.113.9", 429)],
    )
    def test_the_address_behind_a_proxy(self, client, service, token, behind_proxy, peer, status):
        service.behind_proxy = behind_proxy
        sender = {"environ_base": {"REMOTE_ADDR": peer}}
        # The proxy adds the last address. The others come from the client.
        statuses(client, {**WRONG, "X-Forwarded-For": "192.0.2.1, 192.0.2.2"}, MOST + 1, **sender)
        assert statuses(client, {**bearer(token), "X-Forwarded-For": "192.0.2.2, 192.0.2.1"}, 1, **sender) == [status]
        assert statuses(client, {**WRONG, "X-Forwarded-For": "192.0.2.2"}, 1, **sender) == [429]

    def test_the_timestamp_is_compared_with_the_clock_of_the_nonces(self, client, service, token, monkeypatch):
        now = service.tokens.now()
        headers = signed(token, now)
        monkeypatch.setattr(service.tokens, "now", lambda: now + 400)
        assert statuses(client, headers, 1) == [401]
        monkeypatch.setattr(service.tokens, "now", lambda: now)
        assert statuses(client, headers, 2) == [200, 409]


class TestMetrics:
    def test_refused_authentications_are_counted(self, client):
        statuses(client, WRONG, MOST + 3)
        text = client.get("/metrics").get_data(as_text=True)
        assert 'amphora_cluster_refused_authentications_total{reason="invalid"} 4.0' in text
        assert 'amphora_cluster_refused_authentications_total{reason="limited"} 2.0' in text
        assert 'amphora_cluster_refused_authentications_total{reason="replayed"} 0.0' in text

    def test_processes_share_the_counters(self):
        found = SharedCounters()

        def count():
            for _ in range(100):
                found.count(INVALID)

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=count) for _ in range(3)]
        for one in processes:
            one.start()
        for one in processes:
            one.join(20)
        [family] = found.collect()
        assert [one.value for one in family.samples] == [300, 0, 0]

    @pytest.mark.parametrize(
        ("headers", "address", "status"),
        [
            ({}, "192.0.2.1", 403),
            ({"X-Forwarded-For": "127.0.0.1"}, "127.0.0.1", 403),
            ({"Host": "evil.example"}, "127.0.0.1", 403),
            ({}, "127.0.0.1", 200),
        ],
    )
    def test_the_page_is_not_public(self, client, headers, address, status):
        answer = client.get("/metrics", headers=headers, environ_base={"REMOTE_ADDR": address})
        assert answer.status_code == status


@pytest.fixture
def options(sqlite_cluster, tmp_path):
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "token").write_text("page-token\n")
    (tmp_path / "token").chmod(0o600)
    path = tmp_path / "cluster.conf"
    path.write_text(
        f"[amp_cluster]\nconnection = {sqlite_cluster.url}\nencryption_key_file = {tmp_path}/keys\n"
        f"[amp_status_page]\ntoken_file = {tmp_path}/token\n"
    )
    return config.load([str(path)])


def test_the_health_check_reads_the_database(options, sqlite_cluster):
    client = create_app(options).test_client()
    assert client.get("/healthcheck").status_code == 200
    sqlite_cluster.write(lambda c: c.exec_driver_sql("ALTER TABLE cluster_group RENAME TO gone"))
    assert client.get("/healthcheck").status_code == 503


def test_the_metrics_need_the_token_of_the_status_pages(options):
    client = create_app(options).test_client()
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers=bearer("page-token")).status_code == 200


class TestFinalAnswers:
    def test_a_request_that_has_not_ended_is_an_error(self, client, token):
        answer = client.post(f"{URL}/leave?wait=0&final=true", json={"server": "s1"}, headers=bearer(token))
        assert (answer.status_code, answer.json["request"]["state"]) == (504, "open")
        assert answer.headers["Location"] == answer.json["url"]
        assert answer.headers["Retry-After"] == "5"

    def test_another_value_is_refused_before_the_record(self, client, token, stores):
        answer = client.post(f"{URL}/leave?final=yes", json={"server": "s1"}, headers=bearer(token))
        assert answer.status_code == 400
        assert stores.requests.list_requests(GROUP, 9) == ()

    def test_too_many_open_requests(self, client, token, monkeypatch):
        monkeypatch.setattr("amphora_cluster.database.requests.MOST_OPEN", 1)
        found = [client.post(f"{URL}/leave", json={"server": "s1"}, headers=bearer(token)) for _ in range(2)]
        assert [one.status_code for one in found] == [202, 429]
        assert found[1].headers["Retry-After"] == "5"


def read_slowly(connection):
    for _ in range(200):
        connection.recv(1)
        time.sleep(0.01)


class TestSlowClients:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 0.05)

    def test_a_connection_has_a_time_out(self):
        ours, theirs = socket.socketpair()
        connection = SimpleNamespace(sock=ours)
        connections.limit_connection(connection)
        again = connection.sock
        connections.limit_connection(connection)
        assert connection.sock is again
        with connection.sock, theirs:
            connection.sock.setblocking(True)
            with pytest.raises(ConnectionResetError, match="in time"):
                connection.sock.recv(10)
            theirs.send(b"x")
            assert connection.sock.recv(10) == b"x"

    def test_all_reads_of_a_request_have_a_limit(self, monkeypatch):
        monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 5.0)
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
        ours, theirs = socket.socketpair()
        connection = SimpleNamespace(sock=ours)
        connections.limit_connection(connection)
        with connection.sock as limited, theirs:
            theirs.send(b"x" * 1000)
            for _ in range(2):
                limited.setblocking(True)
                assert limited.recv(1) == b"x", "each request has its own limit"
                assert limited.gettimeout() == 5.0, "the limit of reads does not apply to the answer"
                with pytest.raises(ConnectionResetError, match="in time"):
                    read_slowly(limited)

    def test_gunicorns_shorter_limit_for_the_end_of_a_connection_applies(self, monkeypatch):
        monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 60.0)
        ours, theirs = socket.socketpair()
        connection = SimpleNamespace(sock=ours)
        connections.limit_connection(connection)
        with connection.sock as limited, theirs:
            limited.setblocking(True)
            limited.settimeout(0.05)
            with pytest.raises(ConnectionResetError, match="in time"):
                limited.recv(1)
            assert limited.gettimeout() == 0.05

    def test_nothing_waits_for_the_client_after_the_answer(self, monkeypatch):
        """gunicorn closes connections in its main thread, which serves all clients."""
        monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 3600.0)
        ours, theirs = socket.socketpair()
        connection = SimpleNamespace(sock=ours)
        connections.limit_connection(connection)
        with connection.sock as limited, theirs:
            limited.setblocking(True)
            limited.shutdown(socket.SHUT_WR)
            assert limited.recv(10) == b""
            theirs.send(b"x")
            assert limited.recv(10) == b"x"

    def test_the_api_uses_both(self, options):
        options.set_override("certificate", "/c.pem", "amp_cluster_api")
        found = gunicorn_options(options)
        assert (found["worker_class"], found["ssl_context"]) == (worker.Worker, connections.make_context)
