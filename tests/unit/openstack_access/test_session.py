# SPDX-License-Identifier: Apache-2.0
"""Requests to a service of OpenStack: how failures of the connection become errors of this provider."""

import json
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from dataplane.pki import Authority
from keystoneauth1 import exceptions

from amphora_driver import config
from amphora_driver.errors import ConfigurationError, DeadlinePassed, NetworkError
from amphora_driver.network.neutron_client import query
from amphora_driver.openstack import session
from amphora_driver.openstack.errors import ApiError, TimedOut
from amphora_driver.openstack.session import Service


class Adapter:
    def __init__(self, answer):
        self._answer = answer

    def request(self, *_, **__):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Answer:
    def __init__(self, status_code, text):
        self.status_code, self.text, self.content = status_code, text, text.encode()

    def json(self):
        raise ValueError(self.text)


def service(answer, tmp_path):
    file = tmp_path / "test.conf"
    file.write_text("")
    made = Service(config.load([str(file)]), "network", "neutron", 1.0)
    made._adapter = Adapter(answer)
    return made


@pytest.mark.parametrize(
    ("failure", "error", "final"),
    [
        (exceptions.ConnectTimeout("slow"), TimedOut, False),
        (exceptions.ConnectFailure("refused"), NetworkError, False),
        (exceptions.Unauthorized("no"), ConfigurationError, True),
        (exceptions.EndpointNotFound("no"), NetworkError, False),
        (DeadlinePassed("wait", "it is late"), DeadlinePassed, False),
        (ImportError("No module named 'openstack'"), ConfigurationError, True),
        (Answer(200, "<html>"), NetworkError, False),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_failures_of_the_connection(tmp_path, failure, error, final):
    with pytest.raises(error) as caught:
        service(failure, tmp_path).request("GET", "/ports")
    assert (type(caught.value), caught.value.final) == (error, final)


def test_a_refusal_and_an_empty_answer(tmp_path):
    with pytest.raises(ApiError) as caught:
        service(Answer(404, '{"NeutronError": {"type": "PortNotFound", "message": "gone"}}'), tmp_path).request(
            "GET", "/"
        )
    assert (caught.value.status, caught.value.kind, caught.value.message) == (404, "PortNotFound", "gone")
    assert service(Answer(204, ""), tmp_path).request("DELETE", "/") is None


@pytest.mark.parametrize(("secret", "logged"), [(False, {}), (True, {"log": False})])
def test_a_request_with_secrets_is_not_logged(tmp_path, secret, logged):
    class Recorded(Adapter):
        def request(self, *_, **options):
            self.log = {name: value for name, value in options.items() if name == "log"}
            return self._answer

    made = service(None, tmp_path)
    made._adapter = Recorded(Answer(204, ""))
    made.request("POST", "/servers", json={}, secret=secret)
    assert made._adapter.log == logged


def test_an_account_that_is_not_configured(tmp_path):
    found = service(None, tmp_path)
    found._adapter = None
    with pytest.raises(ConfigurationError, match="auth_type is not set"):
        found.request("GET", "/ports")
    assert session.GROUP == "amp_openstack"


def test_parameters_of_a_list():
    assert query(("id",), {"name": ("a", "b"), "device_id": "c"}) == (
        ("device_id", "c"), ("name", "a"), ("name", "b"), ("fields", "id"),
    )  # fmt: skip


class Services(BaseHTTPRequestHandler):
    """Keystone, and a Neutron that is unavailable."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        token = {"methods": ["password"], "expires_at": "2099-01-01T00:00:00Z", "issued_at": "2026-01-01T00:00:00Z"}
        self._answer(201, {"token": {**token, "catalog": []}})

    def do_GET(self):
        if self.path.startswith("/v3"):
            scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
            address = f"{scheme}://{self.headers['Host']}/v3/"
            self._answer(
                200, {"version": {"id": "v3.14", "status": "stable", "links": [{"rel": "self", "href": address}]}}
            )
        else:
            self.send_error(503)

    def _answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Subject-Token", "token")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Not used."""


@contextmanager
def serving(context=None):
    """Start both services, with TLS if a context is given; return their address."""
    with HTTPServer(("127.0.0.1", 0), Services) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def connected(folder, address, path="", **more):
    """Configure the account of these services; return the service Neutron."""
    options = {
        "auth_type": "password", "auth_url": f"{address}/v3", "username": "user", "password": "p", "project_name": "p",
        "user_domain_id": "default", "project_domain_id": "default", "network_endpoint_override": f"{address}{path}",
        **more,
    }  # fmt: skip
    file = folder / "test.conf"
    file.write_text("[amp_openstack]\n" + "".join(f"{name} = {value}\n" for name, value in options.items()))
    made = Service(config.load([str(file)]), "network", "neutron", 1.0)
    try:
        yield made
    finally:
        if made._adapter is not None:
            made._adapter.session.session.close()


@pytest.mark.parametrize("path", ["", "/", "/v2.0", "/v2.0/"])
def test_the_address_of_neutron_is_complete_if_neutron_does_not_answer_at_first(tmp_path, path):
    with serving() as address, connected(tmp_path, address, path) as made:
        assert made._connected().endpoint_override == f"{address}/v2.0"


@pytest.mark.parametrize(
    ("trusted", "error", "text"),
    [("the cloud's", ApiError, "Service Unavailable"), ("another", NetworkError, "certificate verify failed")],
)
def test_the_configured_authority_verifies_the_services(tmp_path, trusted, error, text):
    """With the right authority the request reaches Neutron, which answers 503."""
    authorities = {name: Authority(name) for name in ("the cloud's", "another")}
    (tmp_path / "server.pem").write_text(authorities["the cloud's"].issue("cloud", "127.0.0.1").pem)
    (tmp_path / "ca.pem").write_text(authorities[trusted].pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with (
        serving(context) as address,
        connected(tmp_path, address, cafile=tmp_path / "ca.pem") as made,
        pytest.raises(error, match=text),
    ):
        made.request("GET", "/ports")
