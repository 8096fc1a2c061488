# SPDX-License-Identifier: Apache-2.0
"""Requests of a web page do not reach the sandbox's APIs."""

import pytest

from sandbox.local_requests import reject_remote_requests, rejection_reason


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9876", "localhost:9876", "LOCALHOST", "[::1]:9876"])
@pytest.mark.parametrize("origin", [None, "http://127.0.0.1:8000", "http://localhost"])
def test_programs_of_this_machine_are_answered(host, origin):
    assert rejection_reason(host, origin) is None


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:9876", "127.0.0.1.evil.example", "127.0.0.1:9876@evil.example", "0.0.0.0",
     "localhost.evil.example", "127.0.0.1\n", "10.0.0.1", "[::2]:9876"],
)  # fmt: skip
def test_other_names_are_refused(host):
    assert "Host" in rejection_reason(host, None)


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "https://127.0.0.1.evil.example", "", "file://"])
def test_web_pages_of_other_hosts_are_refused(origin):
    assert "web page" in rejection_reason("127.0.0.1:9876", origin)


def test_a_refused_request_does_not_reach_the_application():
    answered = []
    application = reject_remote_requests(lambda environ, start: answered.append(environ) or [b"yes"])
    statuses = []
    said = application({"HTTP_HOST": "evil.example"}, lambda status, headers: statuses.append(status))
    assert (statuses, answered) == (["403 Forbidden"], [])
    assert b"127.0.0.1" in b"".join(said)
    assert application({"HTTP_HOST": "127.0.0.1:1"}, print) == [b"yes"]
