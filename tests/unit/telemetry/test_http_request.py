# SPDX-License-Identifier: Apache-2.0
"""HTTP requests of the status page, and their authorization."""

import base64

import pytest

from amphora_driver.secret import Secret
from amphora_driver.telemetry.http_request import MAX_HEAD_SIZE, RequestRefused, authorize, parse_request

TOKEN = Secret(b"correct horse")


def head(*lines, first="GET / HTTP/1.1"):
    return "\r\n".join((first, *lines)).encode()


def test_a_request_is_parsed():
    request = parse_request(head("Host: localhost:9878", "X-Thing:  a ", first="GET /page.json?q=a%20b&r=1 HTTP/1.1"))
    assert (request.method, request.path, request.query_value("q"), request.query_value("z")) == (
        "GET",
        "/page.json",
        "a b",
        "",
    )
    assert request.headers == {"host": "localhost:9878", "x-thing": "a"}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (head(first="POST / HTTP/1.1"), 405),
        (head(first="DELETE /x HTTP/1.1"), 405),
        (head(first="GET / HTTP/2"), 400),
        (head(first="GET  / HTTP/1.1"), 400),
        (head(first="GET http://elsewhere/ HTTP/1.1"), 400),
        (head(first="garbage"), 400),
        (b"\x16\x03\x01\x02\x00", 400),
        ("GET /ä HTTP/1.1".encode(), 400),
        (head("no header"), 400),
        (head(" folded: x"), 400),
        (head("a: b\nInjected: c"), 400),
        (head("Host: a", "host: b"), 400),
        (head("Authorization: a", "authorization: b"), 400),
        (head("Content-Length: 5"), 413),
        (head("Transfer-Encoding: chunked"), 413),
        (head(*(f"h{number}: x" for number in range(70))), 431),
    ],
)
def test_malformed_requests_are_refused(text, status):
    with pytest.raises(RequestRefused) as refusal:
        parse_request(text)
    assert refusal.value.status == status


@pytest.mark.parametrize(
    ("peer", "host", "status"),
    [
        ("127.0.0.1", "localhost:9878", None),
        ("127.8.9.1", "127.0.0.1", None),
        ("::1", "[::1]:9878", None),
        ("::ffff:127.0.0.1", "LOCALHOST", None),
        ("127.0.0.1", "evil.example:9878", 403),
        ("127.0.0.1", "localhost.evil.example", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "", 403),
        ("127.0.0.1", "[", 403),
        ("192.0.2.1", "localhost", 403),
        ("2001:db8::1", "localhost", 403),
    ],
)
def test_without_a_token_only_local_requests_are_answered(peer, host, status):
    request = parse_request(head(f"Host: {host}"))
    if status is None:
        authorize(request, peer, None)
        return
    with pytest.raises(RequestRefused) as refusal:
        authorize(request, peer, None)
    assert refusal.value.status == status


def test_a_request_forwarded_by_a_local_proxy_is_not_local():
    names = ("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server")
    for name in ("Forwarded", "Via", "X-Real-IP", *names):
        request = parse_request(head("Host: localhost", f"{name}: 192.0.2.1"))
        with pytest.raises(RequestRefused, match="proxy") as refusal:
            authorize(request, "127.0.0.1", None)
        assert refusal.value.status == 403
        with pytest.raises(RequestRefused, match="token"):
            authorize(request, "127.0.0.1", TOKEN)


def test_keep_alive_follows_from_the_http_version():
    request = parse_request(head("Host: localhost", "Authorization: Bearer correct horse", first="GET / HTTP/1.0"))
    with pytest.raises(RequestRefused, match="proxy"):
        authorize(request, "127.0.0.1", None)
    authorize(request, "192.0.2.1", TOKEN)


@pytest.mark.parametrize(
    ("said", "let_in"),
    [
        ("Bearer correct horse", True),
        ("bearer correct horse", True),
        ("Basic " + base64.b64encode(b"any user:correct horse").decode(), True),
        ("Basic " + base64.b64encode(b":correct horse").decode(), True),
        ("Basic " + base64.b64encode(b"correct horse").decode(), False),
        ("Basic " + base64.b64encode(b"any user:correct").decode(), False),
        ("Basic !!!", False),
        ("Bearer correct horses", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("correct horse", False),
        ("", False),
    ],
)
def test_the_token_grants_access(said, let_in):
    # From any address, with any user name.
    request = parse_request(head("Host: status.example", f"Authorization: {said}"))
    if let_in:
        authorize(request, "192.0.2.1", TOKEN)
        return
    with pytest.raises(RequestRefused) as refusal:
        authorize(request, "127.0.0.1", TOKEN)
    assert refusal.value.status == 401
    assert "correct horse" not in str(refusal.value)


def test_the_size_of_request_heads_is_limited():
    assert MAX_HEAD_SIZE <= 16384
