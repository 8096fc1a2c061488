# SPDX-License-Identifier: Apache-2.0
"""Pools with TLS: the identity of members and of the load balancer, and the negotiated parameters."""

from __future__ import annotations

import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest
from haproxy_versions import HAProxy
from http_clients import VIPS, ask, ask_h2, serving, trusting
from peers import MEMBER, MEMBER6, Answer
from pki import Authority
from wanted import listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

NAME, OTHER_NAME = "member.internal", "other.internal"
# Server names of clients of a TLS listener: the member's, another one, none.
ASKED = (NAME, "www.example.com", None)
TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.fixture(scope="module")
def member_ca():
    """The CA of the members."""
    return Authority("insiders")


@pytest.fixture(scope="module")
def other_ca():
    return Authority("outsiders")


@pytest.fixture(scope="module")
def certificates(member_ca, other_ca):
    """The certificates of members, by their description."""
    return {
        "good": member_ca.issue(NAME),
        "renamed": member_ca.issue(OTHER_NAME),
        "wild": member_ca.issue("*.internal"),
        "revoked": member_ca.issue(NAME),
        "expired": member_ca.issue(NAME, hours=-1),
        "foreign": other_ca.issue(NAME),
    }


@pytest.fixture(scope="module")
def secrets(tenant, member_ca, other_ca, certificates):
    return {
        "cert": tenant.issue("www.example.com").pem,
        "ca": member_ca.pem,
        "other ca": other_ca.pem,
        "crl": member_ca.revoke(certificates["revoked"]),
        "none revoked": member_ca.revoke(),
    }


def terminated(port: int, pool_name: str, **more):
    return listener(port, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", pool=pool_name, **more)


def both(n: int, pool_name: str, **more):
    """Return a listener without TLS and one with TLS."""
    return listener(8000 + n, pool=pool_name), terminated(8400 + n, pool_name, **more)


def answers(served, names) -> dict[str, set[int]]:
    """Return the statuses for each pool, over both listeners, all VIPs and server names.

    All requests run at once, because refusals take time.
    """
    requests = []
    for n, name in enumerate(names):
        requests += [(name, {"port": 8000 + n, "address": vip}) for vip in VIPS]
        requests += [(name, {"port": 8400 + n, "tls": trusting(), "name": asked}) for asked in ASKED]
    found: dict[str, set[int]] = {}
    with ThreadPoolExecutor(len(requests)) as threads:
        told = threads.map(lambda request: served.client.fetch(**request[1]).status, requests)
        for (name, _), status in zip(requests, told, strict=True):
            found.setdefault(name, set()).add(status)
    return found


def checks(domain_name: str | None, kind: str = "HTTP", **more):
    return monitor(kind, domain_name=domain_name, http_version=1.1, url_path="/check", **more)


ALL = {"good", "renamed", "wild", "revoked", "expired", "foreign"}
CASES = {
    # Without a CA, HAProxy accepts any certificate of a member.
    "no verification": ({}, ALL),
    "no verification, named": ({"monitor": checks(NAME)}, ALL),
    # With a CA only, HAProxy accepts each name that the CA has signed.
    "authority": ({"ca_tls_container_ref": "ca"}, {"good", "renamed", "wild", "revoked"}),
    "other authority": ({"ca_tls_container_ref": "other ca"}, {"foreign"}),
    "authority and list": (
        {"ca_tls_container_ref": "ca", "crl_container_ref": "crl"},
        {"good", "renamed", "wild"},
    ),
    "empty list": (
        {"ca_tls_container_ref": "ca", "crl_container_ref": "none revoked"},
        {"good", "renamed", "wild", "revoked"},
    ),
    # The name of the monitor must be in the certificate.
    "name": ({"ca_tls_container_ref": "ca", "monitor": checks(NAME)}, {"good", "wild", "revoked"}),
    "name with a dot": ({"ca_tls_container_ref": "ca", "monitor": checks(f"{NAME}.")}, {"good", "wild", "revoked"}),
    "other name": ({"ca_tls_container_ref": "ca", "monitor": checks(OTHER_NAME)}, {"renamed", "wild"}),
    "name and list": (
        {"ca_tls_container_ref": "ca", "crl_container_ref": "crl", "monitor": checks(NAME)},
        {"good", "wild"},
    ),
    "name of a monitor that is off": (
        {"ca_tls_container_ref": "ca", "monitor": checks(NAME, admin_state_up=False)},
        {"good", "wild", "revoked"},
    ),
}


@pytest.mark.feature(
    "pool.tls_enabled", "pool.ca_tls_container_ref", "pool.crl_container_ref", "healthmonitor.domain_name"
)
@pytest.mark.parametrize(("wanted", "trusted"), CASES.values(), ids=CASES)
def test_identity_of_a_member(served, certificates, secrets, wanted, trusted):
    """The client's server name does not change the result. Checks verify the same as requests."""
    peers = {
        name: served.web(name, (MEMBER, MEMBER6)[n % 2], tls=serving(certificate))
        for n, (name, certificate) in enumerate(certificates.items())
    }
    parts = []
    for n, (name, peer) in enumerate(peers.items()):
        parts += [*both(n, name), pool(name, member(peer), tls_enabled=True, **wanted)]
    served.push(load_balancer(*parts), secrets)
    checked = "monitor" in wanted and wanted["monitor"].admin_state_up
    if checked:
        for n, name in enumerate(peers):
            for port in (8000 + n, 8400 + n):
                served.until_states(name, {name: "UP" if name in trusted else "DOWN"}, port=port)
    assert answers(served, peers) == {name: {200 if name in trusted else 503} for name in peers}
    for name, peer in peers.items():
        requests = [seen for seen in peer.requests if seen.target != "/check"]
        assert len(requests) == (5 if name in trusted else 0)
        assert all(seen.tls.version in ("TLSv1.2", "TLSv1.3") for seen in requests)
        assert bool([seen for seen in peer.requests if seen.target == "/check"]) == (checked and name in trusted)


@pytest.mark.feature("pool.tls_enabled", "pool.ca_tls_container_ref", "pool.crl_container_ref")
@pytest.mark.parametrize(("kind", "verifies"), [("HTTP", True), ("HTTPS", True), ("TLS-HELLO", True), ("TCP", False)])
def test_checks_of_members_with_tls(served, certificates, secrets, kind, verifies):
    """Checks over TLS verify the certificate; a TCP check only connects."""
    shown = ("good", "revoked", "renamed", "foreign")
    peers = [served.web(name, MEMBER6, tls=serving(certificates[name])) for name in shown]
    plain = served.web("plain")
    served.push(
        load_balancer(
            listener(80),
            terminated(443, "pool"),
            pool(
                "pool",
                *map(member, [*peers, plain]),
                tls_enabled=True,
                ca_tls_container_ref="ca",
                crl_container_ref="crl",
                monitor=checks(NAME, kind),
            ),
        ),
        secrets,
    )
    wrong = "DOWN" if verifies else "UP"
    for port in (80, 443):
        served.until_states("pool", {"good": "UP", **dict.fromkeys([*shown[1:], "plain"], wrong)}, port=port)


@pytest.mark.feature("pool.tls_enabled")
def test_the_server_name_that_haproxy_sends_to_members(served, certificates, secrets):
    """With a CA, HAProxy sends the verified name; without a CA, the client's server name."""
    tls = serving(certificates["wild"])
    wanted = {
        "nothing": {},
        "monitor": {"monitor": checks(NAME)},
        "authority": {"ca_tls_container_ref": "ca"},
        "both": {"ca_tls_container_ref": "ca", "monitor": checks(NAME)},
    }
    peers = {name: served.web(name, tls=tls) for name in wanted}
    parts = []
    for n, (name, peer) in enumerate(peers.items()):
        parts += [*both(n, name), pool(name, member(peer), tls_enabled=True, **wanted[name])]
    served.push(load_balancer(*parts), secrets)
    found = {}
    for n, name in enumerate(wanted):
        names = [served.client.fetch("/x", port=8000 + n).seen.tls.sni]
        names += [served.client.fetch("/x", port=8400 + n, tls=trusting(), name=asked).seen.tls.sni for asked in ASKED]
        found[name] = names
    if HAProxy("system").version.startswith("3."):
        # For a client without a server name, HAProxy 3 sends an earlier name: it resumes TLS sessions with
        # members with their name (3.0.11; haproxy/haproxy#3195).
        for name in ("nothing", "monitor"):
            assert found[name].pop() in ASKED
            found[name].append(None)
    assert found == {
        "nothing": [None, *ASKED],
        "monitor": [NAME, *ASKED],
        "authority": [None] * 4,
        "both": [NAME] * 4,
    }


@pytest.mark.feature("pool.tls_container_ref")
@pytest.mark.parametrize("kind", [None, "HTTP", "HTTPS", "TLS-HELLO"])
def test_members_get_the_load_balancers_certificate(served, certificates, secrets, member_ca, other_ca, kind):
    """Checks and requests send the certificate of their pool, and of no other pool."""
    web = served.web(tls=serving(certificates["good"], clients=member_ca))
    watched = None if kind is None else checks(None, kind)
    served.push(
        load_balancer(
            listener(80),
            terminated(443, "pool"),
            listener(81, pool="anonymous"),
            listener(82, pool="stranger"),
            pool("pool", member(web), tls_enabled=True, tls_container_ref="us", monitor=watched),
            pool("anonymous", member(web), tls_enabled=True),
            pool("stranger", member(web), tls_enabled=True, tls_container_ref="them"),
        ),
        {**secrets, "us": member_ca.issue("balancer").pem, "them": other_ca.issue("balancer").pem},
    )
    if kind is not None:
        for port in (80, 443):
            served.until_states("pool", {"web": "UP"}, port=port)
    for vip in VIPS:
        assert served.client.fetch("/x", address=vip).seen.tls.client == "CN=balancer"
    assert served.client.fetch("/x", port=443, tls=trusting()).seen.tls.client == "CN=balancer"
    assert [served.client.fetch(port=port).status // 100 for port in (81, 82)] == [5, 5]


@pytest.mark.feature("pool.tls_container_ref", "pool.ca_tls_container_ref", "pool.crl_container_ref")
def test_cas_and_certificates_of_a_pool_are_replaced(served, certificates, secrets, member_ca, other_ca):
    """HAProxy uses new contents under the same references."""
    web = served.web(tls=serving(certificates["good"], clients=member_ca))
    tree = load_balancer(
        listener(80),
        pool(
            "pool",
            member(web),
            tls_enabled=True,
            tls_container_ref="us",
            ca_tls_container_ref="their ca",
            crl_container_ref="their list",
        ),
    )
    first = {"us": member_ca.issue("first").pem, "their ca": secrets["ca"], "their list": secrets["none revoked"]}
    for changed, status in (
        ({}, "first"),
        ({"us": member_ca.issue("second").pem}, "second"),
        ({"us": other_ca.issue("third").pem}, None),
        ({"their ca": other_ca.pem, "their list": other_ca.revoke()}, None),
        ({"their list": member_ca.revoke(certificates["good"])}, None),
        ({}, "first"),
    ):
        served.push(tree, {**first, **changed})
        reply = served.client.fetch()
        if status is None:
            assert reply.status // 100 == 5
        else:
            assert reply.seen.tls.client == f"CN={status}"


# -- negotiated parameters -----------------------------------------------------------------------------------------

STRONG, OTHER_CIPHER = "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-CHACHA20-POLY1305"
SUITE = "TLS_CHACHA20_POLY1305_SHA256"


@pytest.mark.feature("pool.tls_versions", "pool.tls_ciphers")
def test_versions_and_ciphers_of_members(served, certificates, secrets):
    """Checks and requests negotiate only the chosen versions and ciphers."""
    certificate = certificates["good"]
    peers = {
        "any": served.web("any", tls=serving(certificate)),
        "old": served.web("old", tls=serving(certificate, versions=(TLS_1_2, TLS_1_2))),
        "new": served.web("new", MEMBER6, tls=serving(certificate, versions=(TLS_1_3, TLS_1_3))),
        "weak": served.web("weak", tls=serving(certificate, versions=(TLS_1_2, TLS_1_2), ciphers=OTHER_CIPHER)),
    }
    choices = {
        "usual": ({}, {"any": "TLSv1.3", "old": "TLSv1.2", "new": "TLSv1.3", "weak": "TLSv1.2"}),
        "1.2": ({"tls_versions": ("TLSv1.2",)}, {"any": "TLSv1.2", "old": "TLSv1.2", "weak": "TLSv1.2"}),
        "1.3": ({"tls_versions": ("TLSv1.3",)}, {"any": "TLSv1.3", "new": "TLSv1.3"}),
        "one cipher": (
            {"tls_versions": ("TLSv1.2",), "tls_ciphers": STRONG},
            {"any": STRONG, "old": STRONG},
        ),
        "one suite": ({"tls_ciphers": f"{SUITE}:{OTHER_CIPHER}"}, {"any": SUITE, "new": SUITE, "weak": OTHER_CIPHER}),
        "operators": (
            {"tls_versions": ("TLSv1.2",), "tls_ciphers": "ECDHE+AESGCM:!AES256:+ECDHE"},
            {"any": "ECDHE-ECDSA-AES128-GCM-SHA256", "old": "ECDHE-ECDSA-AES128-GCM-SHA256"},
        ),
    }
    parts, places = [], {}
    for choice, (wanted, _) in choices.items():
        for name, peer in peers.items():
            port = places[choice, name] = 8000 + len(places)
            both_names = f"{choice} {name}"
            parts += [
                listener(port, pool=both_names),
                pool(both_names, member(peer), tls_enabled=True, monitor=monitor("TLS-HELLO"), **wanted),
            ]
    served.push(load_balancer(*parts), secrets)
    for (choice, name), port in places.items():
        expected = choices[choice][1].get(name)
        if (choice, name) == ("one suite", "old"):
            expected = OTHER_CIPHER  # the defaults of OpenSSL include this cipher
        served.until_states(f"{choice} {name}", {name: "UP" if expected else "DOWN"}, port=port)
        reply = served.client.fetch(port=port, address=VIPS[port % 2])
        if expected is None:
            assert reply.status == 503, (choice, name)
        else:
            assert expected in (reply.seen.tls.version, reply.seen.tls.cipher), (choice, name)


@pytest.mark.feature("pool.alpn_protocol")
@pytest.mark.parametrize("kind", [None, "HTTP", "HTTPS", "TLS-HELLO"])
def test_alpn_protocols_of_members(served, certificates, secrets, kind):
    """Requests and checks offer the chosen protocols in the user's order, and use the negotiated one."""
    certificate = certificates["good"]
    modern = served.web("modern", MEMBER6, tls=serving(certificate, alpn=("h2", "http/1.1")))
    plain = served.web("plain", tls=serving(certificate))
    choices = {
        "h2 first": (("h2", "http/1.1"), "HTTP/2"),
        "h2": (("h2",), "HTTP/2"),
        "1.1": (("http/1.1",), "HTTP/1.1"),
        "none": (None, "HTTP/1.1"),
    }
    parts = []
    for n, (name, (protocols, _)) in enumerate(choices.items()):
        watched = None if kind is None else checks(None, kind)
        members = [member(modern)] if protocols == ("h2",) else [member(modern), member(plain)]
        parts += [
            *both(n, name, alpn_protocols=("h2",)),
            pool(name, *members, tls_enabled=True, alpn_protocols=protocols, monitor=watched),
        ]
    served.push(load_balancer(*parts), secrets)
    for n, (name, (protocols, version)) in enumerate(choices.items()):
        expected = {"modern": version} | ({} if protocols == ("h2",) else {"plain": "HTTP/1.1"})
        if kind is not None:
            for port in (8000 + n, 8400 + n):
                served.until_states(name, dict.fromkeys(expected, "UP"), port=port)
        connection = served.client.connect(8000 + n)
        over_h1 = [ask(connection, "/x", method="POST", body=b"word").seen for _ in range(4)]
        over_h2 = [
            served.client.fetch("/x", port=8400 + n, tls=trusting(alpn=("h2",)), method="POST", body=b"word").seen
            for _ in range(4)
        ]
        for group in (over_h1, over_h2):
            assert {seen.member: seen.version for seen in group} == expected
            assert {seen.body for seen in group} == {"word"}
    expected = {"HTTP/2", "HTTP/1.1"} if kind in ("HTTP", "HTTPS") else set()
    modern.until(
        lambda: {seen.version for seen in modern.requests if seen.target == "/check"} == expected,
        "checks use the expected versions",
    )


@pytest.mark.feature("pool.alpn_protocol", "listener.alpn_protocol", "pool.tls_enabled")
@pytest.mark.parametrize("vip", VIPS)
def test_trailers_pass_in_both_directions(served, certificates, secrets, vip):
    """gRPC needs HTTP/2 on both sides, and a body and trailers in both directions."""
    said = Answer(headers=(("content-type", "application/grpc"),), body=b"\0" * 5, trailers=(("grpc-status", "0"),))
    web = served.web(address=MEMBER6, tls=serving(certificates["good"], alpn=("h2",)), answer=lambda seen: said)
    served.push(
        load_balancer(
            terminated(443, "pool", alpn_protocols=("h2",)),
            pool("pool", member(web), tls_enabled=True, alpn_protocols=("h2",)),
        ),
        secrets,
    )
    reply = ask_h2(
        served.client.tls(443, vip, tls=trusting(alpn=("h2",))),
        "/service/method",
        method="POST",
        headers=(("content-type", "application/grpc"), ("te", "trailers")),
        body=b"\0\0\0\0\1x",
        trailers=(("x-sent", "yes"),),
    )
    assert (reply.status, reply.body, reply.trailers) == (200, b"\0" * 5, [["grpc-status", "0"]])
    (seen,) = web.requests
    assert (seen.version, seen.body, seen.trailers) == ("HTTP/2", "\0\0\0\0\1x", [["x-sent", "yes"]])
    assert seen.values("te") == ["trailers"]
