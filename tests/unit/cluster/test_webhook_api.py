# SPDX-License-Identifier: Apache-2.0
"""The API with a real database: authentication, requests, waiting, errors, secrets."""

import hashlib
import hmac
import json
import logging
import threading
import time
import uuid
from urllib.parse import urlsplit

import msgspec
import pytest

from amphora_cluster.api.app import make_app
from amphora_cluster.api.signature import SignedRequest
from amphora_cluster.api.webhooks import Service
from amphora_cluster.database.claims import Claims, PassEnd
from amphora_cluster.database.requests import StoredRequest
from amphora_cluster.database.tables import group_row
from amphora_cluster.database.tokens import token_digest
from amphora_cluster.model import Node, NodeState, RequestKind
from amphora_driver.errors import StoreError
from amphora_driver.secret import Secret

GROUP, OTHER = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
UNKNOWN = "33333333-3333-3333-3333-333333333333"
SERVER = {"server": "s1"}


@pytest.fixture
def stores(sqlite_cluster, make_stores):
    stores = make_stores(sqlite_cluster)
    stores.add(GROUP)
    stores.add(OTHER)
    return stores


@pytest.fixture
def service(stores):
    return Service(groups=stores.groups, requests=stores.requests, tokens=stores.tokens)


@pytest.fixture
def client(service, sqlite_cluster):
    return make_app(service, sqlite_cluster.now).test_client()


@pytest.fixture
def token(stores):
    return stores.tokens.create(GROUP, "heat", "admin")[1].reveal().decode()


def bearer(token, **more):
    return {"Authorization": f"Bearer {token}", **more}


class Pass:
    """One pass of a controller: sets the states of servers and ends open requests."""

    def __init__(self, stores):
        self.stores, self.claims = stores, Claims(stores.database, "controller", 30)

    def run(self, group_id, outcome, states=(), refusal=""):
        [claim] = [one for one in self.claims.claim(10) if one.group_id == group_id]
        [group] = self.stores.passes.load([claim])
        now = self.stores.database.now()
        ended = [
            StoredRequest(
                request=msgspec.structs.replace(
                    one.request, outcome=outcome, servers=tuple(outcome), refusal=refusal, ended_at=now
                ),
                applied=True,
            )
            for one in group.requests
        ]
        nodes = [Node(server_id=one, state=state, since=now, reason=reason) for one, state, reason in states]
        self.stores.passes.finish(PassEnd(claim=claim, due_at=now + 60), group.nodes, nodes, ended)
        self.claims.release_all()


class TestAuthentication:
    def test_a_token_in_the_header_or_the_query(self, client, token):
        for more in ({"headers": bearer(token)}, {"query_string": {"token": token}}):
            answer = client.post(f"/v1/groups/{GROUP}/join", json=SERVER, **more)
            assert answer.status_code == 202, answer.json

    def test_all_failures_have_the_same_answer(self, client, token, stores):
        expired = stores.tokens.create(GROUP, "old", "admin", seconds=-1)[1].reveal().decode()
        deleted, text = stores.tokens.create(GROUP, "old", "admin")
        stores.tokens.delete(GROUP, deleted.id)
        other = stores.tokens.create(OTHER, "other", "admin")[1].reveal().decode()
        forged = token[:-1] + ("A" if token[-1] != "A" else "B")
        cases = [
            (GROUP, {}),
            (GROUP, bearer(forged)),
            (GROUP, bearer(expired)),
            (GROUP, bearer(text.reveal().decode())),
            (GROUP, bearer(other)),
            (GROUP, bearer("x" * 5000)),
            (GROUP, bearer(f"{uuid.uuid4()}.x")),
            (GROUP, {"Authorization": f"Basic {token}"}),
            (GROUP, {"X-Cluster-Signature": "00"}),
            (UNKNOWN, bearer(token)),
            (UNKNOWN, {}),
            ("x' or 1=1", bearer(token)),
        ]
        answers = set()
        for group, headers in cases:
            for method, path in (
                ("POST", "/join"),
                ("POST", "/sync"),
                ("GET", ""),
                ("GET", f"/requests/{uuid.uuid4()}"),
            ):
                answer = client.open(f"/v1/groups/{group}{path}", method=method, headers=headers)
                answers.add((answer.status_code, answer.data, answer.headers["WWW-Authenticate"]))
        [(status, body, challenge)] = answers
        assert (status, challenge, set(json.loads(body))) == (401, "Bearer", {"wanted", "happened", "remedy"})
        assert stores.requests.list_requests(GROUP, 10) == ()

    def test_two_tokens_are_none(self, client, token):
        answer = client.post(f"/v1/groups/{GROUP}/join?token={token}", json=SERVER, headers=bearer(token))
        assert answer.status_code == 401

    def test_the_token_of_a_deleted_group(self, client, token, stores):
        stores.groups.delete(GROUP)
        assert client.get(f"/v1/groups/{GROUP}", headers=bearer(token)).status_code == 401


class Signer:
    """A client that signs its requests, written from the documentation."""

    def __init__(self, client, token):
        self.client, self.id = client, token.partition(".")[0]
        self.key = hashlib.sha256(token.encode()).digest()

    def headers(self, method, url, body=b"", timestamp=None, nonce=None, idempotency_key=""):
        nonce, timestamp = nonce or uuid.uuid4().hex, str(int(timestamp or time.time()))
        place = urlsplit(url)
        lines = [method, place.path, place.query, timestamp, nonce, idempotency_key, hashlib.sha256(body).hexdigest()]
        signature = hmac.new(self.key, "\n".join(lines).encode(), hashlib.sha256).hexdigest()
        found = {"X-Cluster-Token-Id": self.id, "X-Cluster-Timestamp": timestamp, "X-Cluster-Nonce": nonce}
        found["X-Cluster-Signature"] = signature
        return {**found, **({"Idempotency-Key": idempotency_key} if idempotency_key else {})}

    def post(self, url, body=b"", headers=None, **more):
        return self.client.post(url, data=body, headers=headers or self.headers("POST", url, body, **more))


class TestSignatures:
    URL = f"/v1/groups/{GROUP}/leave?wait=0"
    BODY = b'{"server": "s1"}'

    @pytest.fixture
    def signer(self, client, token):
        return Signer(client, token)

    def test_signed_requests(self, client, signer):
        assert signer.post(self.URL, self.BODY).status_code == 202
        assert signer.post(self.URL, b'{"count": 1}', idempotency_key="k1").status_code == 202
        url = f"/v1/groups/{GROUP}"
        assert client.get(url, headers=signer.headers("GET", url)).status_code == 200

    def test_the_signature_of_the_product_is_the_documented_one(self, token, signer):
        signed = SignedRequest(
            method="POST", path="/v1/groups/a/join", query="x=1", timestamp=1, nonce="n" * 16, idempotency_key="k",
            body=b"b",
        )  # fmt: skip
        wanted = signer.headers("POST", "/v1/groups/a/join?x=1", b"b", 1, "n" * 16, "k")
        assert signed.headers(signer.id, token_digest(Secret(token.encode()))) == wanted

    def test_a_replayed_request_is_refused(self, signer, stores):
        headers = signer.headers("POST", self.URL, self.BODY)
        assert signer.post(self.URL, self.BODY, headers).status_code == 202
        again = signer.post(self.URL, self.BODY, headers)
        assert (again.status_code, again.json["happened"]) == (409, "its nonce was used before")
        assert len(stores.requests.list_requests(GROUP, 10)) == 1

    @pytest.mark.parametrize(
        ("url", "body", "changed"),
        [
            (URL.replace("leave", "join"), BODY, {}),
            (URL.replace(GROUP, OTHER), BODY, {}),
            (URL.replace("wait=0", "wait=1"), BODY, {}),
            (URL, b'{"server": "s2"}', {}),
            (URL, BODY, {"X-Cluster-Timestamp": str(int(time.time()) - 1000)}),
            (URL, BODY, {"X-Cluster-Nonce": "m" * 16}),
            (URL, BODY, {"Idempotency-Key": "k"}),
            (URL, BODY, {"X-Cluster-Token-Id": str(uuid.uuid4())}),
            (URL, BODY, {"X-Cluster-Signature": "0" * 64}),
            (URL, BODY, {"X-Cluster-Signature": ""}),
        ],
    )
    def test_a_changed_request_is_refused(self, signer, stores, url, body, changed):
        headers = {**signer.headers("POST", self.URL, self.BODY), **changed}
        assert signer.post(url, body, headers).status_code == 401
        assert stores.requests.list_requests(GROUP, 10) == ()
        # The refused request did not use up the nonce.
        assert signer.post(self.URL, self.BODY, signer.headers("POST", self.URL, self.BODY)).status_code == 202

    @pytest.mark.parametrize(("shift", "status"), [(-310, 401), (310, 401), (-290, 202), (290, 202)])
    def test_the_timestamp_limits_the_time_of_a_request(self, signer, shift, status):
        answer = signer.post(self.URL, self.BODY, timestamp=time.time() + shift)
        assert answer.status_code == status

    def test_a_signature_of_another_group(self, client, stores, signer):
        other = Signer(client, stores.tokens.create(OTHER, "other", "admin")[1].reveal().decode())
        assert other.post(self.URL, self.BODY).status_code == 401


class TestRequests:
    def test_a_request_is_recorded_and_its_group_is_due(self, client, token, stores):
        later = group_row.update().values(due_at=stores.database.now() + 1000.0)
        stores.database.write(lambda c: c.execute(later))
        answer = client.post(f"/v1/groups/{GROUP}/leave", json={"servers": ["s1", "s2"]}, headers=bearer(token))
        assert answer.status_code == 202
        [recorded] = stores.requests.list_requests(GROUP, 10)
        assert (recorded.kind, recorded.servers) == (RequestKind.LEAVE, ("s1", "s2"))
        place = answer.headers["Location"]
        assert place == answer.json["url"] == f"/v1/groups/{GROUP}/requests/{recorded.id}"
        shown = client.get(place, headers=bearer(token))
        assert (shown.status_code, shown.json["request"]["state"]) == (200, "open")
        assert shown.headers["Cache-Control"] == "no-store"
        assert stores.groups.get(GROUP).due_at <= stores.database.now()

    def test_wait_answers_at_the_end(self, client, token, stores):
        answers = []

        def ask():
            url = f"/v1/groups/{GROUP}/join?wait=30"
            answers.append(client.post(url, json=SERVER, headers=bearer(token)))

        asking = threading.Thread(target=ask)
        asking.start()
        while not stores.requests.list_requests(GROUP, 1):
            time.sleep(0.01)
        Pass(stores).run(GROUP, {"s1": ""})
        asking.join(20)
        [answer] = answers
        assert (answer.status_code, answer.json["request"]["succeeded"]) == (200, ["s1"])

    def test_a_failure_names_the_servers(self, client, token, stores):
        place = client.post(f"/v1/groups/{GROUP}/join", json={"servers": ["s1", "s2"]}, headers=bearer(token)).json[
            "url"
        ]
        Pass(stores).run(GROUP, {"s1": "", "s2": "The server is in status ERROR."})
        shown = client.get(place, headers=bearer(token)).json["request"]
        assert (shown["state"], shown["succeeded"], shown["failed"]) == (
            "failed", ["s1"], {"s2": "The server is in status ERROR."},
        )  # fmt: skip

    def test_a_failed_request_answers_409(self, client, token, stores):
        send = {"json": {"count": 2}, "headers": bearer(token, **{"Idempotency-Key": "k1"})}
        first = client.post(f"/v1/groups/{GROUP}/leave", **send)
        assert first.status_code == 202
        Pass(stores).run(GROUP, {"s1": "no", "s2": "no"}, refusal="The minimum of the group is 3.")
        again = client.post(f"/v1/groups/{GROUP}/leave?wait=5", **send)
        assert (again.status_code, again.json["happened"]) == (409, "The minimum of the group is 3.")
        assert (again.json["failed"], again.json["request"]["id"]) == (
            {"s1": "no", "s2": "no"}, first.json["request"]["id"],
        )  # fmt: skip

    def test_a_repeated_count_returns_the_first_request(self, client, token, stores):
        def send(count, key):
            headers = bearer(token, **{"Idempotency-Key": key})
            return client.post(f"/v1/groups/{GROUP}/leave", json={"count": count}, headers=headers)

        first, again, other = send(1, "k1"), send(1, "k1"), send(1, "k2")
        assert first.json["request"]["id"] == again.json["request"]["id"] != other.json["request"]["id"]
        assert len(stores.requests.list_requests(GROUP, 10)) == 2
        assert send(2, "k1").status_code == 409

    def test_a_repeated_leave_of_a_server_needs_no_key(self, client, token):
        for _ in range(3):
            assert client.post(f"/v1/groups/{GROUP}/leave", json=SERVER, headers=bearer(token)).status_code == 202

    def test_requests_of_another_group_are_not_shown(self, client, token, stores):
        other = stores.tokens.create(OTHER, "other", "admin")[1].reveal().decode()
        made = client.post(f"/v1/groups/{OTHER}/join", json=SERVER, headers=bearer(other)).json["request"]["id"]
        assert client.get(f"/v1/groups/{GROUP}/requests/{made}", headers=bearer(token)).status_code == 404

    def test_waiting_requests_leave_threads_for_others(self, client, token, service):
        while service.waiting.acquire(blocking=False):
            pass
        begin = time.monotonic()
        answer = client.post(f"/v1/groups/{GROUP}/join?wait=30", json=SERVER, headers=bearer(token))
        assert (answer.status_code, time.monotonic() - begin < 10) == (202, True)

    @pytest.mark.parametrize("wait", ["x", "-1", "nan"])
    def test_an_invalid_wait(self, client, token, wait):
        answer = client.post(f"/v1/groups/{GROUP}/join?wait={wait}", json=SERVER, headers=bearer(token))
        assert (answer.status_code, answer.json["happened"]) == (400, "wait is not a number of seconds")

    def test_the_wait_is_limited(self, client, token, service):
        service.longest_wait = 0.2
        answer = client.post(f"/v1/groups/{GROUP}/join?wait=1e9", json=SERVER, headers=bearer(token))
        assert answer.status_code == 202


class TestStatus:
    def test_nodes_and_unhealthy_servers(self, client, token, stores):
        reason = "Member m (192.0.2.1 port 80) is in operating status ERROR."
        states = [("s1", NodeState.SERVING, ""), ("s2", NodeState.UNHEALTHY, reason)]
        Pass(stores).run(GROUP, {}, states)
        found = client.get(f"/v1/groups/{GROUP}", headers=bearer(token)).json["group"]
        assert (found["serving"], [one["state"] for one in found["nodes"]]) == (1, ["serving", "unhealthy"])
        [unhealthy] = found["unhealthy"]
        assert (unhealthy["server_id"], unhealthy["reason"], unhealthy["since"][-1]) == ("s2", reason, "Z")

    def test_no_credential(self, client, token, credential):
        answer = client.get(f"/v1/groups/{GROUP}", headers=bearer(token))
        assert credential.secret.reveal() not in answer.data


class TestErrors:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/", 404),
            ("GET", "/v1/groups", 404),
            ("PUT", "/v1/groups/a/join", 405),
            ("POST", "/v1/groups/a/x", 404),
        ],
    )
    def test_other_paths(self, client, method, path, status):
        answer = client.open(path, method=method)
        assert (answer.status_code, set(answer.json)) == (status, {"wanted", "happened", "remedy"})

    def test_a_large_body(self, client, token):
        answer = client.post(f"/v1/groups/{GROUP}/join", data=b" " * 200_000, headers=bearer(token))
        assert (answer.status_code, set(answer.json)) == (413, {"wanted", "happened", "remedy"})

    def test_a_database_that_does_not_answer(self, client, token, service, caplog):
        class Broken:
            def find(self, _):
                raise StoreError("read", "the database does not answer: secret-host")

        service.tokens = Broken()
        answer = client.get(f"/v1/groups/{GROUP}?token={token}")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert b"secret-host" not in answer.data
        assert token not in caplog.text

    def test_an_unexpected_error_is_logged_without_token(self, client, token, service, caplog):
        class Broken:
            def find(self, _):
                raise KeyError("detail")

        service.tokens = Broken()
        answer = client.get(f"/v1/groups/{GROUP}?token={token}")
        assert (answer.status_code, b"detail" in answer.data, "detail" in caplog.text) == (500, False, True)
        assert token not in caplog.text

    def test_refused_tokens_are_not_logged(self, client, token, caplog):
        caplog.set_level(logging.DEBUG)
        secret = token[:-2]
        client.post(f"/v1/groups/{GROUP}/join?token={secret}", json=SERVER)
        client.post(f"/v1/groups/{GROUP}/join", json=SERVER, headers=bearer(secret))
        assert caplog.text.count("the token is not valid") == 2
        assert secret not in caplog.text

    def test_the_health_check(self, client):
        assert client.get("/healthcheck").json == {"status": "ok"}
