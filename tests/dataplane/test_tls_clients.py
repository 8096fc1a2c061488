# SPDX-License-Identifier: Apache-2.0
"""TLS listeners that request certificates of clients."""

from __future__ import annotations

import itertools
import ssl

import pytest
from http_clients import VIPS, ask, trusting
from pki import Authority
from wanted import listener, load_balancer, member, pool

pytestmark = pytest.mark.root

# In TLS 1.3, a client learns of a refusal only when it reads for the first time.
VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
SEEN = ("X-SSL-Client-Verify", "X-SSL-Client-Has-Cert", "X-SSL-Client-CN")
ANONYMOUS, MEMBER, REVOKED, EXPIRED, STRANGER = "anonymous", "member", "revoked", "expired", "stranger"


@pytest.fixture(scope="module")
def clients():
    return Authority("clients")


@pytest.fixture(scope="module")
def other_authority():
    return Authority("other")


@pytest.fixture(scope="module")
def certificates(clients, other_authority):
    """Return the certificates of clients by name."""
    return {
        ANONYMOUS: None,
        MEMBER: clients.issue("member"),
        REVOKED: clients.issue("revoked"),
        EXPIRED: clients.issue("expired", hours=-1),
        STRANGER: other_authority.issue("stranger"),
    }


@pytest.fixture(scope="module")
def secrets(tenant, clients, other_authority, certificates):
    return {
        "cert": tenant.issue("www.example.com").pem,
        "clients": clients.pem,
        "both": clients.pem + other_authority.pem,
        "other": other_authority.pem,
        "revoked": clients.revoke(certificates[REVOKED]),
        "none revoked": clients.revoke(),
    }


def terminated(port: int = 443, **more):
    more = {"default_tls_container_ref": "cert", "insert_headers": SEEN, **more}
    return listener(port, protocol="TERMINATED_HTTPS", **more)


def asking(mode: str | None, ca: str | None = "clients", crl: str | None = None) -> dict:
    found = {"client_authentication": mode, "client_ca_tls_container_ref": ca, "client_crl_container_ref": crl}
    return {name: value for name, value in found.items() if value is not None}


def named(wanted: dict | set) -> str:
    """Return a stable parameter id, because the order of a set differs between processes."""
    return "-".join(sorted(wanted)) if isinstance(wanted, set) else "-".join(wanted.values()) or "unsaid"


def admitted(served, tenant, certificates, version=VERSIONS[1], port: int = 443, **more) -> set[str]:
    """Return the clients that get an answer."""
    found = set()
    for name, certificate in certificates.items():
        tls = trusting(tenant, certificate=certificate, versions=(version, version))
        try:
            reply = served.client.fetch(port=port, tls=tls, **more)
        except (ssl.SSLError, ConnectionError):
            continue
        assert reply.status == 200
        found.add(name)
    return found


ALL = {ANONYMOUS, MEMBER, REVOKED, EXPIRED, STRANGER}


@pytest.mark.feature(
    "listener.client_authentication", "listener.client_ca_tls_container_ref", "listener.client_crl_container_ref"
)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (asking("MANDATORY"), {MEMBER, REVOKED}),
        (asking("MANDATORY", crl="revoked"), {MEMBER}),
        (asking("MANDATORY", crl="none revoked"), {MEMBER, REVOKED}),
        (asking("MANDATORY", "both"), {MEMBER, REVOKED, STRANGER}),
        (asking("OPTIONAL"), {ANONYMOUS, MEMBER, REVOKED}),
        (asking("OPTIONAL", crl="revoked"), {ANONYMOUS, MEMBER}),
        (asking("NONE"), ALL),
        (asking("NONE", crl="revoked"), ALL),
        (asking("NONE", None), ALL),
        (asking(None), ALL),
        (asking(None, None), ALL),
    ],
    ids=named,
)
def test_permitted_clients(served, tenant, certificates, secrets, version, wanted, expected):
    served.push(load_balancer(terminated(**wanted), pool("pool", member(served.web()))), secrets)
    assert admitted(served, tenant, certificates, version) == expected


@pytest.mark.feature("listener.client_authentication")
def test_a_refused_client_reaches_no_member(served, tenant, certificates, secrets):
    web = served.web()
    served.push(load_balancer(terminated(**asking("MANDATORY", crl="revoked")), pool("pool", member(web))), secrets)
    for vip in VIPS:
        assert admitted(served, tenant, certificates, address=vip) == {MEMBER}
    assert [seen.values("X-SSL-Client-CN")[0].strip('"') for seen in web.requests] == [MEMBER] * 2


@pytest.mark.feature("listener.client_authentication", "listener.client_ca_tls_container_ref")
def test_headers_about_a_client_certificate(served, tenant, certificates, secrets):
    served.push(load_balancer(terminated(**asking("OPTIONAL")), pool("pool", member(served.web()))), secrets)
    for name, (has, common) in {MEMBER: ({"1", "true"}, MEMBER), ANONYMOUS: ({"0", "false"}, "")}.items():
        tls = trusting(tenant, certificate=certificates[name])
        seen = served.client.fetch(port=443, tls=tls).seen
        assert {*seen.values("X-SSL-Client-Has-Cert")} <= has
        assert [value.strip('"') for value in seen.values("X-SSL-Client-CN")] in ([common], [] if not common else None)


@pytest.mark.feature("listener.client_ca_tls_container_ref", "listener.client_crl_container_ref")
def test_listeners_use_their_own_authorities_only(served, tenant, certificates, secrets):
    served.push(
        load_balancer(
            terminated(443, **asking("MANDATORY", crl="revoked")),
            terminated(444, **asking("MANDATORY", "other")),
            terminated(445, **asking("MANDATORY")),
            terminated(446),
            pool("pool", member(served.web())),
        ),
        secrets,
    )
    found = {port: admitted(served, tenant, certificates, port=port) for port in range(443, 447)}
    assert found == {443: {MEMBER}, 444: {STRANGER}, 445: {MEMBER, REVOKED}, 446: ALL}


@pytest.mark.feature("listener.client_authentication")
def test_client_authentication_applies_to_each_certificate(served, tenant, certificates, secrets):
    """A different server name does not bypass client authentication."""
    served.push(
        load_balancer(
            terminated(sni_container_refs=("sni",), **asking("MANDATORY", crl="revoked")),
            pool("pool", member(served.web())),
        ),
        {**secrets, "sni": tenant.issue("sni.example.com").pem},
    )
    for name in ("www.example.com", "sni.example.com"):
        assert admitted(served, tenant, certificates, name=name) == {MEMBER}


@pytest.mark.feature("listener.client_ca_tls_container_ref", "listener.client_crl_container_ref")
def test_authorities_and_lists_are_replaced(served, tenant, certificates, secrets):
    """HAProxy uses new contents under the same references."""
    tree = load_balancer(terminated(**asking("MANDATORY", "ca", "crl")), pool("pool", member(served.web())))
    for ca, crl, expected in (
        ("clients", "none revoked", {MEMBER, REVOKED}),
        ("clients", "revoked", {MEMBER}),
        ("clients", "none revoked", {MEMBER, REVOKED}),
    ):
        served.push(tree, {"cert": secrets["cert"], "ca": secrets[ca], "crl": secrets[crl]})
        assert admitted(served, tenant, certificates) == expected


@pytest.mark.feature("listener.client_crl_container_ref")
def test_a_revoked_client_cannot_resume_its_session(served, tenant, certificates, secrets):
    """A revocation also applies to earlier TLS sessions."""
    versions = (ssl.TLSVersion.TLSv1_2,) * 2
    tree = load_balancer(terminated(**asking("MANDATORY", "ca", "crl")), pool("pool", member(served.web())))
    before = {"cert": secrets["cert"], "ca": secrets["clients"], "crl": secrets["none revoked"]}
    served.push(tree, before)
    tls = trusting(tenant, certificate=certificates[REVOKED], versions=versions)
    first = served.client.tls(443, tls=tls)
    assert ask(first).status == 200
    served.push(tree, {**before, "crl": secrets["revoked"]})
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(served.client.tls(443, tls=tls, session=first.session))


def test_listeners_with_different_client_authentication_modes(served, tenant, certificates, secrets):
    """Listeners with different modes do not influence each other."""
    modes = ("NONE", "OPTIONAL", "MANDATORY")
    listeners = [terminated(443 + n, **asking(mode)) for n, mode in enumerate(modes)]
    served.push(load_balancer(*listeners, pool("pool", member(served.web()))), secrets)
    found = [admitted(served, tenant, certificates, port=443 + n) for n in range(3)]
    assert found == [ALL, {ANONYMOUS, MEMBER, REVOKED}, {MEMBER, REVOKED}]
    assert all(wider > narrower for wider, narrower in itertools.pairwise(found))
