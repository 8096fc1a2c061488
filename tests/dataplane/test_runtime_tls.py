# SPDX-License-Identifier: Apache-2.0
"""Certificates, CAs, CRLs and ticket keys change without a reload, on every HAProxy version."""

from __future__ import annotations

import base64
import re
import ssl

import pytest
from every_haproxy import on_every_haproxy, worker
from http_clients import ask, serving, trusting
from pki import Authority
from wanted import id_of, listener, load_balancer, member, pool

pytestmark = [pytest.mark.root, on_every_haproxy]
TLS12, TLS13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.fixture
def web(served):
    return served.web()


@pytest.fixture
def push(served, web):
    """Push TLS listeners, all with the same pool; certificates by reference."""

    def pushed(secrets, *listeners, how="runtime", **more):
        texts = {ref: getattr(secret, "pem", secret) for ref, secret in secrets.items()}
        before = worker(served) if how == "runtime" else None
        found = served.push(load_balancer(*listeners, pool("pool", member(web))), texts, **more)
        if found.status == 200 and how is not None:
            assert found.how == how, found.answer
            assert found.reason
        if how == "runtime":
            assert worker(served) == before
        return found

    return pushed


def terminated(port: int = 443, **more):
    return listener(port, protocol="TERMINATED_HTTPS", **more)


def shown(served, name="www.example.com", port: int = 443) -> bytes:
    return served.client.presented(port, name=name)[0]


def test_certificates_are_replaced_added_and_removed(served, push, tenant):
    first, second = (tenant.issue("www.example.com", number=n) for n in (0, 1))
    one, two = tenant.issue("one.example.com"), tenant.issue("two.example.com", "deux.example.com")
    trust = trusting(tenant)

    def wanted(*names, default="default", **more):
        return terminated(default_tls_container_ref=default, sni_container_refs=names, **more)

    push({"default": first}, wanted(), how=None)
    kept = served.client.tls(443, tls=trust)
    with served.client.load(port=443, tls=trust) as load:
        push({"default": second}, wanted())
        assert shown(served) == second.der
        push({"default": second, "one": one, "two": two}, wanted("one", "two"))
        assert [shown(served, f"{n}.example.com") for n in ("one", "two", "deux")] == [one.der, two.der, two.der]
        # A new reference of the default, a removed certificate, and one with new content.
        again = tenant.issue("two.example.com", number=1)
        push({"other": first, "two": again}, wanted("two", default="other"))
        names = ("www", "one", "two", "deux")
        assert [shown(served, f"{n}.example.com") for n in names] == [first.der, first.der, again.der, first.der]
        load.goes_on()
        # A new worker has the same certificates, and they change at run time again.
        push({"other": first, "two": again}, wanted("two", default="other", timeout_client_data=41_000), how="reload")
        assert [shown(served, f"{n}.example.com") for n in names] == [first.der, first.der, again.der, first.der]
        more = {"timeout_client_data": 41_000}
        push({"default": second, "one": one, "two": two}, wanted("one", "two", **more))
        assert [shown(served, f"{n}.example.com") for n in names] == [second.der, one.der, two.der, two.der]
        load.goes_on()
    assert load.failures == []
    assert ask(kept).status == 200
    # Without a default, the first certificate for names is the default.
    push({"one": one, "two": two}, wanted("two", "one", default=None, **more))
    assert [shown(served, f"{n}.example.com") for n in names] == [two.der, one.der, two.der, two.der]
    assert "sni-" not in served.amphora.ask_haproxy("show ssl cert").replace(sni(served), "")


def sni(served) -> str:
    """Return the file name of the only certificate beside the default one."""
    (found,) = set(re.findall(r"tls/\S+/sni-\S+", served.amphora.ask_haproxy("show ssl cert")))
    return found


def test_a_refused_certificate_changes_nothing(served, push, tenant):
    """After a good certificate for one listener and a bad one for another, HAProxy uses neither."""
    old, new = (tenant.issue("www.example.com", number=n) for n in (0, 1))
    trees = [terminated(port, default_tls_container_ref=str(port)) for port in (443, 444)]
    push({"443": old, "444": old}, *trees, how=None)
    for _ in range(2):
        found = push({"443": new, "444": old.certificate_pem + new.key_pem}, *trees, status=422, how=None)
        assert found.answer["object_id"] == id_of("listener", 444)
        assert "PRIVATE" not in str(found.answer)
        assert [shown(served, port=port) for port in (443, 444)] == [old.der] * 2
        assert "*" not in served.amphora.ask_haproxy("show ssl cert")
    push({"443": new, "444": new}, *trees)
    assert [shown(served, port=port) for port in (443, 444)] == [new.der] * 2


def test_certificates_that_haproxy_lost_are_detected(served, push, tenant):
    """A push of the same content restores a certificate that was changed manually in HAProxy."""
    old, new = (tenant.issue("www.example.com", number=n) for n in (0, 1))
    tree = terminated(default_tls_container_ref="default")
    pushed = push({"default": old}, tree, how=None)
    name = next(file.name for file in pushed.rendered.files if file.secret)
    served.amphora.ask_haproxy(f"set ssl cert {name} <<\n{new.pem}")
    served.amphora.ask_haproxy(f"commit ssl cert {name}")
    assert shown(served) == new.der
    push({"default": old}, terminated(default_tls_container_ref="default"), how=None)
    # The bundles have the same content: only HAProxy's answer shows the difference.
    assert shown(served) == old.der


def admitted(served, tenant, certificate, version) -> bool:
    tls = trusting(tenant, certificate=certificate, versions=(version, version))
    try:
        return served.client.fetch(port=443, tls=tls).status == 200
    except (ssl.SSLError, ConnectionError):
        return False


def test_permission_changes_apply_at_once(served, push, tenant):
    """The new CAs and CRLs also apply to clients that resume a session."""
    clients, others = Authority("clients"), Authority("others")
    ada, bob, eve = clients.issue("ada"), clients.issue("bob", number=1), others.issue("eve")
    certificate = tenant.issue("www.example.com")

    def wanted(ca, crl):
        secrets = {"cert": certificate, "ca": ca, "crl": crl}
        tree = terminated(
            default_tls_container_ref="cert",
            client_authentication="MANDATORY",
            client_ca_tls_container_ref="ca",
            client_crl_container_ref="crl",
        )
        return secrets, tree

    def accepted() -> list[list[bool]]:
        return [[admitted(served, tenant, each, version) for each in (ada, bob, eve)] for version in (TLS12, TLS13)]

    push(*wanted(clients.pem, clients.revoke()), how=None)
    assert accepted() == [[True, True, False]] * 2
    tls = {version: trusting(tenant, certificate=bob, versions=(version, version)) for version in (TLS12, TLS13)}
    sessions = {}
    for version, context in tls.items():
        connection = served.client.tls(443, tls=context)
        assert ask(connection).status == 200
        sessions[version] = connection.session
    push(*wanted(clients.pem, clients.revoke(bob)))
    assert accepted() == [[True, False, False]] * 2
    for version, session in sessions.items():
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(served.client.tls(443, tls=tls[version], session=session))
    push(*wanted(clients.pem + others.pem, clients.revoke(ada) + others.revoke()))
    assert accepted() == [[False, True, True]] * 2
    push(*wanted(others.pem, others.revoke()))
    assert accepted() == [[False, False, True]] * 2


def keys(*numbers: int) -> str:
    return "".join(base64.b64encode(bytes([n]) * 80).decode() + "\n" for n in numbers)


@pytest.mark.parametrize("version", [TLS12, TLS13])
def test_tickets_survive_one_key_rotation_and_a_reload(served, push, tenant, version):
    certificate = {"cert": tenant.issue("www.example.com")}
    context = trusting(tenant, versions=(version, version))

    def wanted(**more):
        return terminated(default_tls_container_ref="cert", **more)

    def resumes() -> bool:
        connection = served.client.tls(443, tls=context, session=session)
        assert ask(connection).status == 200
        return connection.session_reused

    push(certificate, wanted(), tickets=keys(1, 2, 3), how=None)
    connection = served.client.tls(443, tls=context)
    assert ask(connection).status == 200
    session = connection.session
    found = push(certificate, wanted(), tickets=keys(2, 3, 4))
    assert "load balancer" in found.reason
    assert resumes()
    push(certificate, wanted(timeout_client_data=42_000), tickets=keys(2, 3, 4), how="reload")
    assert resumes()
    push(certificate, wanted(timeout_client_data=42_000), tickets=keys(3, 4, 5))
    assert not resumes()
    assert keys(3, 4, 5).split()[0] in served.amphora.ask_haproxy("show tls-keys *")


def test_members_with_new_files_are_added_and_replaced_files_need_a_reload(served, tenant):
    """HAProxy would reuse connections to members that the former files verified: a new worker has none."""
    theirs, others = Authority("theirs"), Authority("others")
    web = served.web(tls=serving(theirs.issue("member.internal"), clients=theirs))

    def push(**more):
        found = served.push(
            load_balancer(listener(80), pool("pool", *([member(web)] if more else ()), **more)),
            {"ca": theirs.pem, "crl": theirs.revoke(), "own": theirs.issue("us").pem},
        )
        return found.how

    refs = {"ca_tls_container_ref": "ca", "crl_container_ref": "crl", "tls_container_ref": "own"}
    push()
    before = worker(served)
    assert push(tls_enabled=True, **refs) == "runtime"
    assert served.client.fetch().status == 200
    assert worker(served) == before
    tree = load_balancer(listener(80), pool("pool", member(web), tls_enabled=True, **refs))
    secrets = {"ca": others.pem, "crl": others.revoke(), "own": theirs.issue("us").pem}
    found = served.push(tree, secrets)
    assert (found.how, found.reason.count("connections to members")) == ("reload", 3)
    assert served.client.fetch().status == 503
