# SPDX-License-Identifier: Apache-2.0
"""TLS listeners: versions, ciphers in the user's order, and protocols over TLS (ALPN, HTTP/2, gRPC)."""

from __future__ import annotations

import http.client
import itertools
import ssl

import pytest
from http_clients import VIPS, ask, ask_h2, serving, trusting
from peers import Answer
from wanted import listener, load_balancer, member, pool

pytestmark = pytest.mark.root

VERSIONS = {
    "TLSv1": ssl.TLSVersion.TLSv1,
    "TLSv1.1": ssl.TLSVersion.TLSv1_1,
    "TLSv1.2": ssl.TLSVersion.TLSv1_2,
    "TLSv1.3": ssl.TLSVersion.TLSv1_3,
}
EVERY_SET = [each for size in range(1, 5) for each in itertools.combinations(VERSIONS, size)]
A128, A256, CHACHA = "ECDHE-{}-AES128-GCM-SHA256", "ECDHE-{}-AES256-GCM-SHA384", "ECDHE-{}-CHACHA20-POLY1305"
EC_A128, EC_A256, EC_CHACHA = (each.format("ECDSA") for each in (A128, A256, CHACHA))
RSA_A128, RSA_A256 = (each.format("RSA") for each in (A128, A256))
S_A128, S_A256, S_CHACHA = "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"


def terminated(**more):
    more = {"default_tls_container_ref": "cert", **more}
    return listener(443, protocol="TERMINATED_HTTPS", **more)


@pytest.fixture
def web(served):
    return served.web()


@pytest.fixture
def serve(served, web, tenant):
    """Push one TLS listener."""

    def push(kind: str = "EC", **more):
        secrets = {"cert": tenant.issue("www.example.com", kind=kind).pem}
        return served.push(load_balancer(terminated(**more), pool("pool", member(web))), secrets)

    return push


def spoken(served, tenant, **more) -> ssl.SSLSocket | None:
    """Return a TLS connection with these settings, None if the handshake fails."""
    try:
        return served.client.tls(443, tls=trusting(tenant, **more))
    except (ssl.SSLError, ConnectionError):
        return None


def answered(served, tenant, **more) -> str | None:
    """Return the TLS version of an answered request, None without an answer."""
    connection = spoken(served, tenant, **more)
    if connection is None:
        return None
    try:
        return connection.version() if ask(connection).status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


# -- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("listener.tls_versions")
@pytest.mark.parametrize("wanted", EVERY_SET, ids="+".join)
def test_exactly_the_wanted_versions_are_accepted(served, serve, web, tenant, wanted):
    """Sets can have a gap. A request with another version is not answered and reaches no member."""
    serve(tls_versions=wanted)
    for name, version in VERSIONS.items():
        before = len(web.requests)
        assert answered(served, tenant, versions=(version, version)) == (name if name in wanted else None)
        assert len(web.requests) - before == (name in wanted)


@pytest.mark.feature("listener.tls_versions")
def test_the_newest_of_several_versions_is_negotiated(served, serve, tenant):
    serve(tls_versions=("TLSv1.2", "TLSv1.3"))
    for vip in VIPS:
        assert served.client.tls(443, vip, tls=trusting(tenant)).version() == "TLSv1.3"
    serve(tls_versions=("TLSv1.3", "TLSv1.2"))
    assert spoken(served, tenant).version() == "TLSv1.3"


@pytest.mark.feature("listener.tls_versions")
def test_old_versions_are_refused_by_default(served, serve, tenant):
    serve()
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        assert spoken(served, tenant, versions=(version, version)) is None
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        assert spoken(served, tenant, versions=(version, version)) is not None


# -- ciphers -------------------------------------------------------------------------------------------------------

TLS12 = (ssl.TLSVersion.TLSv1_2,) * 2
EC_CIPHERS = (EC_A128, EC_A256, EC_CHACHA)


@pytest.mark.feature("listener.tls_ciphers")
@pytest.mark.parametrize(
    "wanted", itertools.permutations(EC_CIPHERS), ids=lambda each: "-".join(w[12:18] for w in each)
)
def test_the_users_order_of_ciphers_applies(served, serve, tenant, wanted):
    """The client's order does not apply.

    OpenSSL has one exception: a client that prefers ChaCha20 gets it if the list contains it.
    """
    serve(tls_ciphers=":".join(wanted))
    for clients in (EC_CIPHERS, (EC_A256, EC_A128, EC_CHACHA)):
        assert spoken(served, tenant, versions=TLS12, ciphers=":".join(clients)).cipher()[0] == wanted[0]
    # A client without the first cipher gets the second one.
    left = [each for each in EC_CIPHERS if each != wanted[0]]
    assert spoken(served, tenant, versions=TLS12, ciphers=":".join(left)).cipher()[0] == wanted[1]


@pytest.mark.feature("listener.tls_ciphers")
@pytest.mark.parametrize(
    ("text", "kind", "offered", "chosen"),
    [
        # "!" removes permanently.
        (f"{EC_A128}:{EC_A256}:!AES128", "EC", EC_CIPHERS, EC_A256),
        # "-" removes; a later word can add again.
        (f"ECDHE:-AES256:{EC_A256}", "EC", (EC_A256,), EC_A256),
        (f"{EC_A128}:{EC_A256}:-AES256", "EC", (EC_A256,), None),
        # "+" moves to the end.
        (f"{EC_A128}:{EC_A256}:+AES128", "EC", EC_CIPHERS, EC_A256),
        # "+" between two words requires both.
        ("ECDHE+AESGCM:!AES128", "EC", EC_CIPHERS, EC_A256),
        ("aRSA+AES256", "RSA", (RSA_A128, RSA_A256), RSA_A256),
        # "@STRENGTH" sorts by strength.
        (f"{EC_A128}:{EC_A256}:@STRENGTH", "EC", EC_CIPHERS[:2], EC_A256),
        ("HIGH:!aNULL:!AES256:!CHACHA20", "RSA", (RSA_A128, RSA_A256), RSA_A128),
        (f"{EC_A128}:@SECLEVEL=1", "EC", EC_CIPHERS, EC_A128),
    ],
)
def test_cipher_operators_are_those_of_openssl(served, serve, tenant, text, kind, offered, chosen):
    serve(kind, tls_ciphers=text)
    connection = spoken(served, tenant, versions=TLS12, ciphers=":".join(offered))
    assert (connection and connection.cipher()[0]) == chosen


@pytest.mark.feature("listener.tls_ciphers")
@pytest.mark.parametrize("wanted", [(S_CHACHA, S_A128), (S_A128, S_A256), (S_A256,)], ids=":".join)
def test_tls_13_suites_are_separate_from_older_ciphers(served, serve, tenant, wanted):
    """The user's list contains both kinds; each TLS version uses its own."""
    serve(tls_ciphers=":".join((wanted[0], EC_A256, *wanted[1:], EC_A128)))
    assert spoken(served, tenant, versions=(ssl.TLSVersion.TLSv1_3,) * 2).cipher()[0] == wanted[0]
    assert spoken(served, tenant, versions=TLS12).cipher()[0] == EC_A256


@pytest.mark.feature("listener.tls_ciphers", "listener.tls_versions")
@pytest.mark.parametrize(
    ("versions", "ciphers"),
    [
        (("TLSv1.2",), None),
        (("TLSv1.3",), None),
        (None, None),
        (None, f"{EC_A128}:{EC_A256}"),
        (("TLSv1.2",), EC_A128),
        (("TLSv1.3",), S_A256),
        (("TLSv1.2", "TLSv1.3"), f"{EC_A128}:{S_A256}"),
    ],
    ids=str,
)
def test_every_legal_combination_is_served(served, serve, tenant, versions, ciphers):
    serve(tls_versions=versions, tls_ciphers=ciphers)
    connection = spoken(served, tenant)
    assert connection.version() == (versions or ("TLSv1.3",))[-1]
    assert ask(connection).status == 200


# -- protocols over TLS -------------------------------------------------------------------------------------------


@pytest.mark.feature("listener.alpn_protocol")
@pytest.mark.parametrize(
    ("wanted", "offered", "agreed"),
    [
        (("h2", "http/1.1"), ("h2", "http/1.1"), "h2"),
        (("h2", "http/1.1"), ("http/1.1", "h2"), "h2"),
        (("http/1.1", "h2"), ("h2", "http/1.1"), "http/1.1"),
        (("h2", "http/1.1", "http/1.0"), ("http/1.0",), "http/1.0"),
        (("h2", "http/1.1"), ("http/1.1",), "http/1.1"),
        (("http/1.1",), ("h2", "http/1.1"), "http/1.1"),
        (("http/1.0", "http/1.1"), ("http/1.1",), "http/1.1"),
        (("h2",), ("h2",), "h2"),
        (("h2", "http/1.1"), (), None),
    ],
    ids=str,
)
def test_alpn_negotiates_the_protocol(served, serve, web, tenant, wanted, offered, agreed):
    serve(alpn_protocols=wanted)
    connection = spoken(served, tenant, alpn=offered)
    assert connection.selected_alpn_protocol() == agreed
    reply = (ask_h2 if agreed == "h2" else ask)(connection, "/x", method="POST", body=b"word")
    assert (reply.version, reply.seen.version) == ("HTTP/2" if agreed == "h2" else "HTTP/1.1", "HTTP/1.1")
    assert (reply.seen.target, reply.seen.body) == ("/x", "word")
    assert reply.seen.values("Host") == ["www.example.com"]


@pytest.mark.feature("listener.alpn_protocol")
def test_http2_is_served_on_every_address(served, serve, tenant):
    serve(alpn_protocols=("h2",))
    for vip in VIPS:
        tls = trusting(tenant, alpn=("h2",))
        assert served.client.fetch("/x", port=443, address=vip, tls=tls).version == "HTTP/2"


@pytest.mark.feature("listener.alpn_protocol", "pool.alpn_protocol")
@pytest.mark.parametrize("vip", VIPS)
def test_grpc_over_http2(served, tenant, vip):
    """gRPC has HTTP/2 on both sides; its trailers, with the result of a call, pass in both directions."""
    members = tenant.issue("member.example.com")
    web = served.web(tls=serving(members, alpn=("h2",)))
    message = b"\0\0\0\0\x05hello"
    web.answer = lambda seen: Answer(
        headers=(("content-type", "application/grpc"),),
        body=message,
        trailers=(("grpc-status", "5"), ("grpc-message", "not found")),
    )
    served.push(
        load_balancer(
            terminated(alpn_protocols=("h2", "http/1.1")),
            pool("pool", member(web), tls_enabled=True, alpn_protocols=("h2",)),
        ),
        {"cert": tenant.issue("www.example.com").pem},
    )
    reply = served.client.fetch(
        "/echo.Echo/Say",
        port=443,
        address=vip,
        tls=trusting(tenant, alpn=("h2",)),
        method="POST",
        headers=(("content-type", "application/grpc"), ("te", "trailers")),
        body=message,
        trailers=(("x-checksum", "17"),),
    )
    assert (reply.status, reply.body) == (200, message)
    assert dict(map(tuple, reply.trailers)) == {"grpc-status": "5", "grpc-message": "not found"}
    (seen,) = web.asked("/echo.Echo/Say")
    assert (seen.version, seen.method, seen.body.encode("latin-1")) == ("HTTP/2", "POST", message)
    assert seen.values("te") == ["trailers"]
    assert seen.trailers == [["x-checksum", "17"]]
