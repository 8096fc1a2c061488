# SPDX-License-Identifier: Apache-2.0
"""TLS listeners: the certificate for a client, and secrecy of keys."""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509
from http_clients import VIPS, ask, trusting
from wanted import id_of, listener, load_balancer, member, pool

pytestmark = pytest.mark.root


def terminated(port: int = 443, **more):
    return listener(port, protocol="TERMINATED_HTTPS", **more)


def shown(served, name, port: int = 443, **more) -> bytes:
    """Return the leaf certificate for a server name."""
    return served.client.presented(port, name=name, **more)[0]


@pytest.fixture
def web(served):
    return served.web()


@pytest.fixture
def served_tls(served, web):
    """Push TLS listeners, all with the same pool."""

    def push(secrets, *listeners, **more):
        texts = {ref: getattr(secret, "pem", secret) for ref, secret in secrets.items()}
        return served.push(load_balancer(*listeners, pool("pool", member(web))), texts, **more)

    return push


@pytest.mark.feature("listener.default_tls_container_ref")
@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_the_default_certificate_is_for_every_name(served, served_tls, tenant, kind):
    certificate = tenant.issue("www.example.com", kind=kind)
    served_tls({"default": certificate}, terminated(default_tls_container_ref="default"))
    for vip in VIPS:
        for name in ("www.example.com", "other.example.org", None):
            assert shown(served, name, address=vip) == certificate.der
    assert served.client.fetch(port=443, tls=trusting(tenant)).status == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        served.client.fetch(port=443, tls=trusting(tenant), name="other.example.org")


@pytest.mark.feature("listener.sni_container_refs", "listener.default_tls_container_ref")
def test_the_server_name_selects_the_certificate(served, served_tls, tenant):
    default, first = tenant.issue("www.example.com"), tenant.issue("one.example.com", "uno.example.com")
    second = tenant.issue("two.example.com", kind="RSA")
    served_tls(
        {"default": default, "first": first, "second": second},
        terminated(default_tls_container_ref="default", sni_container_refs=("second", "first")),
    )
    for name, certificate in (
        ("one.example.com", first),
        ("UNO.example.com", first),
        ("two.example.com", second),
        ("www.example.com", default),
        ("three.example.com", default),
        (None, default),
    ):
        assert shown(served, name) == certificate.der, name


@pytest.mark.feature("listener.sni_container_refs")
def test_a_listener_without_a_default_certificate_requires_tls(served, served_tls, web, tenant):
    """Without a known server name, HAProxy uses the first certificate. It serves no plain text."""
    first, second = tenant.issue("one.example.com"), tenant.issue("two.example.com")
    served_tls({"first": first, "second": second}, terminated(sni_container_refs=("second", "first")))
    for vip in VIPS:
        for name, certificate in (
            ("one.example.com", first),
            ("two.example.com", second),
            ("three.example.com", second),
            (None, second),
        ):
            assert shown(served, name, address=vip) == certificate.der
        plain = served.client.connect(443, vip)
        plain.sendall(b"GET / HTTP/1.1\r\nHost: one.example.com\r\n\r\n")
        assert not plain.recv(4096).startswith(b"HTTP/1.1 200")
    assert web.requests == []


@pytest.mark.feature("listener.sni_container_refs")
def test_a_wildcard_covers_one_level(served, served_tls, tenant):
    default, wild = tenant.issue("example.com"), tenant.issue("*.example.com")
    served_tls(
        {"default": default, "wild": wild},
        terminated(default_tls_container_ref="default", sni_container_refs=("wild",)),
    )
    for name, certificate in (
        ("any.example.com", wild),
        ("ANY.EXAMPLE.COM", wild),
        ("two.levels.example.com", default),
        ("example.com", default),
    ):
        assert shown(served, name) == certificate.der, name


@pytest.mark.feature("listener.sni_container_refs")
def test_an_exact_name_comes_before_a_wildcard(served, served_tls, tenant):
    wild, exact = tenant.issue("*.example.com"), tenant.issue("www.example.com")
    served_tls({"wild": wild, "exact": exact}, terminated(sni_container_refs=("wild", "exact")))
    assert shown(served, "www.example.com") == exact.der
    assert shown(served, "any.example.com") == wild.der


@pytest.mark.feature("listener.default_tls_container_ref", "listener.sni_container_refs")
@pytest.mark.parametrize("field", ["default_tls_container_ref", "sni_container_refs"])
def test_the_chain_is_delivered_in_order(served, served_tls, tenant, field):
    upper = type(tenant)("upper", tenant)
    lower = type(tenant)("lower", upper)
    certificate = lower.issue("www.example.com")
    served_tls({"cert": certificate}, terminated(**{field: "cert" if field.startswith("default") else ("cert",)}))
    wanted = [each.serial_number for each in (certificate.certificate, lower.certificate, upper.certificate)]
    found = served.client.presented(443)
    assert [serial(each) for each in found] == wanted
    assert served.client.fetch(port=443, tls=trusting(tenant)).status == 200


def serial(der: bytes) -> int:
    return x509.load_der_x509_certificate(der).serial_number


@pytest.mark.feature("listener.default_tls_container_ref", "listener.sni_container_refs")
def test_listeners_use_their_own_certificates_only(served, served_tls, tenant):
    one, two, more = tenant.issue("one.example.com"), tenant.issue("two.example.com"), tenant.issue("more.example.com")
    served_tls(
        {"one": one, "two": two, "more": more},
        terminated(443, default_tls_container_ref="one", sni_container_refs=("more",)),
        terminated(444, default_tls_container_ref="two"),
    )
    names = ("one.example.com", "two.example.com", "more.example.com", None)
    assert [shown(served, name, 443) for name in names] == [one.der, one.der, more.der, one.der]
    assert [shown(served, name, 444) for name in names] == [two.der] * 4


@pytest.mark.feature("listener.default_tls_container_ref", "listener.sni_container_refs")
@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_a_replaced_certificate_is_shown_at_once(served, served_tls, tenant, kind):
    """A new content or a new reference applies at once, and no request fails under load."""
    old, new, third = (tenant.issue("www.example.com", kind=kind, number=n) for n in (0, 1, 0))
    sni_old, sni_new = (tenant.issue("sni.example.com", number=n) for n in (0, 1))
    tree = terminated(default_tls_container_ref="default", sni_container_refs=("sni",))
    served_tls({"default": old, "sni": sni_old}, tree)
    kept = served.client.tls(443, tls=trusting(tenant))
    with served.client.load(port=443, tls=trusting(tenant)) as load:
        served_tls({"default": new, "sni": sni_new}, tree)
        assert (shown(served, "www.example.com"), shown(served, "sni.example.com")) == (new.der, sni_new.der)
        load.goes_on()
        served_tls({"third": third, "sni": sni_new}, terminated(default_tls_container_ref="third"))
        assert (shown(served, "www.example.com"), shown(served, "sni.example.com")) == (third.der, third.der)
        load.goes_on()
    assert load.failures == []
    assert ask(kept).status == 200  # existing connections stay


@pytest.mark.feature("listener.default_tls_container_ref")
def test_an_unusable_certificate_does_not_change_the_configuration(served, served_tls, tenant, web):
    """The agent refuses the bundle, names the listener, and serves its former configuration."""
    good, other = tenant.issue("www.example.com"), tenant.issue("www.example.com", number=1)
    trees = (
        terminated(443, default_tls_container_ref="good"),
        terminated(444, default_tls_container_ref="bad"),
        listener(80),
    )
    served_tls({"good": good, "bad": good}, *trees)
    for bad in (
        good.certificate_pem + other.key_pem,  # the key of another certificate
        good.certificate_pem,  # no key
        "-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n",
        "",
    ):
        pushed = served_tls({"good": good, "bad": bad}, *trees, status=422)
        assert pushed.answer["object_id"] == id_of("listener", 444), pushed.answer
        assert "PRIVATE" not in str(pushed.answer)
        assert [shown(served, None, port) for port in (443, 444)] == [good.der] * 2
        assert served.client.fetch().member == "web"
    # The controller then pushes the other listeners.
    served_tls({"good": good}, *trees, failed={pushed.answer["object_id"]})
    assert served.client.fetch(port=443, tls=trusting(tenant)).status == 200
    assert served.client.fetch().member == "web"
    with pytest.raises(ConnectionRefusedError):
        served.client.connect(444)


@pytest.mark.feature("listener.default_tls_container_ref")
def test_an_expired_certificate_is_served(served, served_tls, tenant):
    """The client decides whether to trust an expired certificate."""
    expired = tenant.issue("www.example.com", hours=-1)
    served_tls({"cert": expired}, terminated(default_tls_container_ref="cert"))
    assert shown(served, "www.example.com") == expired.der
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        served.client.fetch(port=443, tls=trusting(tenant))


@pytest.mark.feature("listener.default_tls_container_ref")
def test_sessions_are_resumed(served, served_tls, tenant):
    """A second connection of a client resumes its TLS session."""
    certificate = tenant.issue("www.example.com")
    versions = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2)
    served_tls({"cert": certificate}, terminated(default_tls_container_ref="cert"))
    tls = trusting(tenant, versions=versions)
    first = served.client.tls(443, tls=tls)
    again = served.client.tls(443, tls=tls, session=first.session)
    assert again.session_reused
    assert ask(again).status == 200
