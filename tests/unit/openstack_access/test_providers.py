# SPDX-License-Identifier: Apache-2.0
"""The list of Octavia's providers, from a server with the routes of octavia-api, and the check of its answers."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from amphora_driver import config
from amphora_driver.cli import host_checks
from amphora_driver.cli.status_checks import Result
from amphora_driver.openstack import octavia, session


def providers(*names):
    return json.dumps({"providers": [{"name": one, "description": "x"} for one in names]})


@contextmanager
def serving(status, body):
    """Run an octavia-api without Keystone; yield its address and the paths of the requests."""
    paths = []

    class Octavia(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            versions = [
                {"id": one, "status": state, "links": [{"rel": "self", "href": f"http://{self.headers['Host']}/v2"}]}
                for one, state in (("v2.0", "SUPPORTED"), ("v2.27", "CURRENT"))
            ]
            answers = {"/v2/lbaas/providers": (status, body), "/": (200, json.dumps({"versions": versions}))}
            number, answer = answers.get(self.path, (404, ""))
            text = answer.encode()
            self.send_response(number)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            """Not used."""

    with HTTPServer(("127.0.0.1", 0), Octavia) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


def options(tmp_path, **values):
    file = tmp_path / "test.conf"
    file.write_text("[amp_openstack]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    return config.load([str(file)])


def at(tmp_path, address):
    return options(tmp_path, auth_type="none", load_balancer_endpoint_override=address)


@pytest.mark.parametrize("path", ["", "/", "/v2", "/v2.0/"])
def test_the_address_may_have_a_version(tmp_path, path):
    with serving(200, providers("amphora", "haproxy")) as (address, paths):
        assert octavia.list_providers(at(tmp_path, address + path), 30.0) == ("amphora", "haproxy")
        assert paths[-1] == "/v2/lbaas/providers"


@pytest.mark.parametrize(
    ("status", "body", "result", "details"),
    [
        (200, providers("amphora", "haproxy"), Result.SUCCESS, "octavia-api offers haproxy"),
        (200, providers("amphora"), Result.FAILURE, "'Unable to load provider driver'"),
        (200, '{"faults": 1}', Result.WARNING, "the answer has no list of providers"),
        (200, "<html>", Result.WARNING, "the answer is not JSON"),
        (403, '{"faultstring": "Policy does not allow"}', Result.WARNING, "the role load-balancer_observer"),
        (503, "busy", Result.WARNING, "status 503"),
    ],
)
def test_the_check_of_the_list(tmp_path, status, body, result, details):
    with serving(status, body) as (address, _paths):
        found = host_checks.check_provider(at(tmp_path, address))
    assert (found.result, details in found.details) == (result, True), found.details


def test_another_name_of_the_provider(tmp_path):
    with serving(200, providers("amphora")) as (address, _paths):
        conf = at(tmp_path, address)
        conf.set_override("provider", "amphora", "amp_octavia")
        assert host_checks.check_provider(conf).result is Result.SUCCESS


def test_an_api_that_does_not_answer(tmp_path):
    found = host_checks.check_provider(at(tmp_path, "http://127.0.0.1:1"))
    assert (found.result, "127.0.0.1" in found.details) == (Result.WARNING, True)


@pytest.mark.parametrize(
    ("values", "configured"),
    [
        ({}, False),
        ({"auth_type": "password"}, True),
        ({"auth_plugin": "password"}, True),
        ({"octavia_config": "/etc/octavia/octavia.conf"}, True),
    ],
)
def test_without_an_account_nothing_is_asked(tmp_path, values, configured):
    conf = options(tmp_path, **values)
    assert session.has_account(conf) is configured
    if not configured:
        found = host_checks.check_provider(conf)
        assert (found.result, found.details.startswith("not checked: no account")) == (Result.SUCCESS, True)
