# SPDX-License-Identifier: Apache-2.0
"""Connections to the cloud: errors, deadlines, tokens, secrets, options."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from free_ports import free_ports
from oslo_config import cfg

from amphora_cluster.cloud import options, session
from amphora_cluster.cloud.errors import Busy, CloudError, CredentialRefused, Missing
from amphora_cluster.cloud.octavia import OctaviaPools
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.credential import ApplicationCredential
from amphora_driver.deadline import Deadline, apply_deadline
from amphora_driver.errors import ConfigurationError, DeadlinePassed
from amphora_driver.secret import Secret

CREDENTIAL = ApplicationCredential(id="cred-1", secret=Secret(b"hush-hush"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, document, headers = self.server.answer(self.command, self.path, self.headers, body)
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server requires these names

    def log_message(self, *_):
        pass


@contextmanager
def serving(answer):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.answer = answer
    # A client that gave up has closed its connection.
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        session.close_http_sessions()
        server.shutdown()
        thread.join()
        server.server_close()


def connect(url, **more):
    settings = CloudSettings(without_keystone=True, endpoints={"octavia": url, "nova": url}, **more)
    return CloudConnection(settings, None, "p1")


def get(connection, kind=dict):
    return connection.request("nova", "GET", "/x", kind=kind, wanted="read x")


FAULT = {
    "faultcode": "Client",
    "faultstring": "Load Balancer lb1 is immutable and cannot be updated.",
    "debuginfo": None,
}
USED = {"faultcode": "Client", "faultstring": "VIP address in use", "debuginfo": None}


@pytest.mark.parametrize(
    ("status", "document", "kind", "final", "text"),
    [
        (401, {"error": {"message": "unauthorized"}}, CredentialRefused, True, "unauthorized"),
        (
            403,
            {"faultcode": "Client", "faultstring": "Policy does not allow"},
            CredentialRefused,
            True,
            "lacks a right",
        ),
        (403, {"faultcode": "Client", "faultstring": "Quota has been met"}, CloudError, True, "a quota is used up"),
        (404, {"itemNotFound": {"message": "no server", "code": 404}}, Missing, True, "no server"),
        (409, FAULT, Busy, False, "lb1 is immutable"),
        (409, USED, CloudError, True, "VIP address in use"),
        (400, {"badRequest": {"message": "bad", "code": 400}}, CloudError, True, "bad"),
        (501, {"faultcode": "Server", "faultstring": "unsupported"}, CloudError, True, "unsupported"),
        (429, {"overLimit": {"message": "slow down", "code": 429}}, CloudError, False, "limits the rate"),
        (503, b"<html><body>down</body></html>", CloudError, False, "status 503: down"),
        (500, {"faultcode": "Server", "faultstring": "x" * 5000}, CloudError, False, "status 500"),
    ],
)
def test_refusals(status, document, kind, final, text):
    with serving(lambda *_: (status, document, {})) as url, pytest.raises(kind) as caught:
        get(connect(url))
    assert (type(caught.value), caught.value.final) == (kind, final)
    assert text in caught.value.happened
    assert len(str(caught.value)) < 1000


def test_an_answer_in_another_form():
    with serving(lambda *_: (200, {"x": "text"}, {})) as url, pytest.raises(CloudError, match="is not valid"):
        get(connect(url), dict[str, int])


def test_a_read_is_repeated_once_after_a_closed_connection():
    seen = []

    def answer(method, *_):
        seen.append(method)
        if len(seen) % 2:
            raise ConnectionAbortedError
        return 200, {}, {}

    with serving(answer) as url:
        get(connect(url))
        with pytest.raises(CloudError) as caught:
            connect(url).request("nova", "POST", "/x", kind=dict, wanted="make x", body={})
    assert (seen, caught.value.final) == (["GET", "GET", "POST"], False)


def test_no_connection():
    with pytest.raises(CloudError) as caught:
        get(connect(f"http://127.0.0.1:{free_ports(1)[0]}"))
    assert not caught.value.final


def test_deadlines_and_time_outs():
    release = threading.Event()

    def slow(*_):
        release.wait(30)
        return 200, {}, {}

    with serving(slow) as url:
        with pytest.raises(CloudError, match=r"timed out|Timeout"):
            get(connect(url, request_timeout=0.2))
        with apply_deadline(Deadline(0.2)), pytest.raises(CloudError):
            get(connect(url, request_timeout=20.0))
        with apply_deadline(Deadline(0.0)), pytest.raises(DeadlinePassed):
            get(connect(url, request_timeout=20.0))
        release.set()


def test_no_cookie_reaches_another_owner():
    seen = []

    def answer(_method, _path, headers, _body):
        seen.append((headers.get("X-Project-Id"), headers.get("Cookie")))
        return 200, {}, {"Set-Cookie": "owner=p1; Path=/"}

    with serving(answer) as url:
        get(connect(url))
        get(CloudConnection(CloudSettings(without_keystone=True, endpoints={"nova": url}), None, "p2"))
    assert seen == [("p1", None), ("p2", None)]


class Keystone:
    """Answers for tokens and for Nova, and records them."""

    def __init__(self):
        self.bodies, self.tokens, self.valid, self.status = [], [], "t1", 201

    def answer(self, method, path, headers, body):
        if path == "/v3/auth/tokens":
            self.bodies.append(json.loads(body))
            if self.status != 201:
                return self.status, {"error": {"code": self.status, "message": "refused", "title": "x"}}, {}
            endpoint = {"interface": "public", "region": "r1", "url": self.url + "/compute", "id": "e"}
            service = {"type": "compute", "id": "s", "name": "nova", "endpoints": [endpoint]}
            token = {
                "catalog": [service], "methods": ["application_credential"], "roles": [],
                "issued_at": "2026-01-01T00:00:00.000000Z", "expires_at": "2099-01-01T00:00:00.000000Z",
                "user": {"id": "u", "name": "u", "domain": {"id": "d", "name": "d"}},
                "project": {"id": "p1", "name": "p", "domain": {"id": "d", "name": "d"}},
            }  # fmt: skip
            return 201, {"token": token}, {"X-Subject-Token": self.valid}
        if path in {"/v3", "/v3/"}:
            version = {"id": "v3.14", "status": "stable", "links": [{"rel": "self", "href": self.url + "/v3/"}]}
            return 200, {"version": version}, {}
        self.tokens.append(headers.get("X-Auth-Token"))
        return (200, {}, {}) if self.tokens[-1] == self.valid else (401, {"error": {"message": "expired"}}, {})


@pytest.fixture
def keystone():
    found = Keystone()
    with serving(found.answer) as url:
        found.url = url
        yield found


class TestApplicationCredentials:
    def test_the_owner_is_authenticated_by_the_credential_only(self, keystone):
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3", region_name="r1"), CREDENTIAL, "p1")
        for _ in range(3):
            get(connection)
        [body] = keystone.bodies
        credential = {"id": "cred-1", "secret": "hush-hush"}
        assert body["auth"]["identity"] == {"methods": ["application_credential"], "application_credential": credential}
        assert keystone.tokens == ["t1"] * 3
        assert connection.calls == {("GET", "nova"): 3}

    def test_an_expired_token_is_replaced(self, keystone):
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3"), CREDENTIAL, "p1")
        get(connection)
        keystone.valid = "t2"
        get(connection)
        assert keystone.tokens == ["t1", "t1", "t2"]

    @pytest.mark.parametrize("status", [401, 404])
    def test_a_revoked_credential(self, keystone, status):
        keystone.status = status
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3"), CREDENTIAL, "p1")
        with pytest.raises(CredentialRefused) as caught:
            get(connection)
        assert (caught.value.final, "hush" in repr(caught.value)) == (True, False)

    def test_a_keystone_that_fails_is_no_refusal(self, keystone):
        keystone.status = 503
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3"), CREDENTIAL, "p1")
        with pytest.raises(CloudError) as caught:
            get(connection)
        assert (type(caught.value), caught.value.final) == (CloudError, False)

    def test_a_service_that_the_catalogue_does_not_have(self, keystone):
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3"), CREDENTIAL, "p1")
        with pytest.raises(ConfigurationError):
            connection.root("octavia")
        with pytest.raises(ConfigurationError):
            connection.request("octavia", "GET", "/x", kind=dict, wanted="read x")

    def test_a_credential_of_another_project_is_refused(self, keystone):
        settings = CloudSettings(auth_url=keystone.url + "/v3")
        CloudConnection(settings, CREDENTIAL, "p1").require_project()
        with pytest.raises(ConfigurationError, match="it belongs to project p1, and the group to project p2"):
            CloudConnection(settings, CREDENTIAL, "p2").require_project()
        keystone.status = 401
        with pytest.raises(CredentialRefused):
            CloudConnection(settings, CREDENTIAL, "p1").require_project()
        connect(keystone.url).require_project()

    def test_a_group_without_a_credential(self, keystone):
        connection = CloudConnection(CloudSettings(auth_url=keystone.url + "/v3"), None, "p1")
        with pytest.raises(ConfigurationError, match="no application credential"):
            get(connection)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://c:9876", "http://c:9876"),
        ("http://c/load-balancer/", "http://c/load-balancer"),
        ("http://c/load-balancer/v2.0", "http://c/load-balancer"),
        ("http://c/load-balancer/v2/", "http://c/load-balancer"),
        ("http://c/volcano", "http://c/volcano"),
    ],
)
def test_the_root_of_octavia(url, root):
    assert connect(url).root("octavia") == root


@pytest.mark.parametrize(
    ("versions", "accepted"), [(["v2.0", "v2.10"], False), (["v2.0", "v2.11"], True), ([], False), (["v1", "x"], False)]
)
def test_an_octavia_without_additive_batches_gets_no_batch(versions, accepted):
    sent = []

    def answer(method, path, _headers, _body):
        sent.append(method)
        if path == "/":
            return 200, {"versions": [{"id": one} for one in versions]}, {}
        return 200, {"members": []}, {}

    with serving(answer) as url:
        pools = OctaviaPools(connect(url))
        if accepted:
            pools._require_additive_batches()
        else:
            with pytest.raises(CloudError, match=r"and needs 2\.11"):
                pools._require_additive_batches()
    assert sent == ["GET"]


def load(**values):
    conf = cfg.ConfigOpts()
    for group, found in options.OPTIONS.items():
        conf.register_opts(list(found), group=group)
    conf([], project="test", default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        conf.set_override(name, value, group=options.GROUP)
    return options.settings(conf)


class TestOptions:
    def test_values(self):
        found = load(auth_url="http://k", region_name="r", nova_endpoint_override="http://n", page_size=5)
        wanted = CloudSettings(auth_url="http://k", region_name="r", endpoints={"nova": "http://n"}, page_size=5)
        assert msgspec.structs.replace(found, request_timeout=wanted.request_timeout) == wanted

    @pytest.mark.parametrize(
        ("values", "missing"),
        [
            ({}, "auth_url"),
            ({"without_keystone": True}, "octavia_endpoint_override, nova_endpoint_override"),
            ({"without_keystone": True, "octavia_endpoint_override": "http://o"}, "nova_endpoint_override"),
        ],
    )
    def test_missing_options(self, values, missing):
        with pytest.raises(ConfigurationError, match=missing):
            load(**values)
