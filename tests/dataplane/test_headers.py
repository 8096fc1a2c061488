# SPDX-License-Identifier: Apache-2.0
"""Headers that a listener adds to requests and responses."""

from __future__ import annotations

import pytest
from http_clients import CLIENT, CLIENT6, VIPS, trusting
from peers import Answer
from pki import Authority, named
from wanted import VIP, VIP6, listener, load_balancer, member, policy, pool, rule

pytestmark = pytest.mark.root

ADDRESSES = {VIP: CLIENT, VIP6: CLIENT6}
FORWARDED = ("X-Forwarded-For", "X-Forwarded-Port", "X-Forwarded-Proto")
# Octavia's API accepts these headers; each contains the client's address.
ALSO = ("X-Forwarded-IP", "X-Client-IP", "X-Real-IP")
OF_CLIENTS = (
    "X-SSL-Client-Verify",
    "X-SSL-Client-Has-Cert",
    "X-SSL-Client-DN",
    "X-SSL-Client-CN",
    "X-SSL-Issuer",
    "X-SSL-Client-SHA1",
    "X-SSL-Client-Not-Before",
    "X-SSL-Client-Not-After",
)
EVERY = FORWARDED + ALSO + OF_CLIENTS
SPOOFED = [(name, "spoofed") for name in EVERY]


def terminated(port: int = 443, **more):
    return listener(port, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", **more)


@pytest.fixture(scope="module")
def clients():
    """The clients' authority, which differs from the servers' authority."""
    return Authority("clients")


def of(seen) -> dict[str, str]:
    """Return the inserted headers that the member received; assert that each occurs once."""
    found = {name: seen.values(name) for name in EVERY if seen.values(name)}
    assert all(len(values) == 1 for values in found.values()), found
    return {name: values[0] for name, values in found.items()}


@pytest.mark.feature(
    "listener.insert_headers.X-Forwarded-For",
    "listener.insert_headers.X-Forwarded-Port",
    "listener.insert_headers.X-Forwarded-Proto",
)
@pytest.mark.parametrize("vip", VIPS)
@pytest.mark.parametrize("protocol", ["HTTP", "PROXY", "PROXYV2"])
def test_forwarded_headers_describe_the_client(served, vip, protocol):
    web = served.web(proxied=protocol != "HTTP")
    served.push(
        load_balancer(listener(8080, insert_headers=FORWARDED + ALSO), pool("pool", member(web), protocol=protocol))
    )
    seen = served.client.fetch(port=8080, address=vip).seen
    client = ADDRESSES[vip]
    assert of(seen) == {
        "X-Forwarded-For": client,
        "X-Forwarded-Port": "8080",
        "X-Forwarded-Proto": "http",
        **dict.fromkeys(ALSO, client),
    }
    assert seen.proxied is None if protocol == "HTTP" else seen.proxied.source[0] == client


@pytest.mark.feature(
    "listener.insert_headers.X-Forwarded-For",
    "listener.insert_headers.X-Forwarded-Port",
    "listener.insert_headers.X-Forwarded-Proto",
)
@pytest.mark.parametrize("vip", VIPS)
def test_forwarded_headers_describe_the_tls_client(served, tenant, vip):
    tree = load_balancer(terminated(8443, insert_headers=FORWARDED), pool("pool", member(served.web())))
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    seen = served.client.fetch(port=8443, address=vip, tls=trusting(tenant)).seen
    assert of(seen) == {
        "X-Forwarded-For": ADDRESSES[vip],
        "X-Forwarded-Port": "8443",
        "X-Forwarded-Proto": "https",
    }


@pytest.mark.parametrize("name", EVERY)
def test_only_the_configured_header_is_inserted(served, tenant, clients, name):
    tree = load_balancer(
        terminated(
            443,
            insert_headers=(name,),
            client_authentication="OPTIONAL",
            client_ca_tls_container_ref="clients",
        ),
        pool("pool", member(served.web())),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem, "clients": clients.pem})
    seen = served.client.fetch(port=443, tls=trusting(tenant, certificate=clients.issue("Ada"))).seen
    assert set(of(seen)) == {name}


def test_no_header_is_inserted_by_default(served):
    served.push(load_balancer(listener(80), pool("pool", member(served.web()))))
    assert of(served.client.fetch().seen) == {}


@pytest.mark.feature(
    "listener.insert_headers.X-SSL-Client-Verify",
    "listener.insert_headers.X-SSL-Client-Has-Cert",
    "listener.insert_headers.X-SSL-Client-DN",
    "listener.insert_headers.X-SSL-Client-CN",
    "listener.insert_headers.X-SSL-Issuer",
    "listener.insert_headers.X-SSL-Client-SHA1",
    "listener.insert_headers.X-SSL-Client-Not-Before",
    "listener.insert_headers.X-SSL-Client-Not-After",
)
def test_certificate_headers_identify_the_client(served, tenant, clients):
    subject = named("Ada O'Hara", country_name="GB", organization_name="Engines & Söhne")
    ada = clients.issue("ada.example.com", subject=subject)
    tree = load_balancer(
        terminated(
            insert_headers=OF_CLIENTS,
            client_authentication="OPTIONAL",
            client_ca_tls_container_ref="clients",
        ),
        pool("pool", member(served.web())),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem, "clients": clients.pem})
    seen = served.client.fetch(port=443, tls=trusting(tenant, certificate=ada), headers=SPOOFED).seen
    found = {name: seen.values(name)[-1] for name in OF_CLIENTS}
    assert all("spoofed" not in seen.values(name) for name in OF_CLIENTS)
    assert found["X-SSL-Client-Verify"] == "0"
    assert found["X-SSL-Client-Has-Cert"] in ("1", "true")
    for part in ("C=GB", "O=Engines & S", "CN=Ada O'Hara"):
        assert part in found["X-SSL-Client-DN"]
    assert found["X-SSL-Client-CN"].strip('"') == "Ada O'Hara"
    assert found["X-SSL-Issuer"].strip('"').endswith("CN=clients")
    assert found["X-SSL-Client-SHA1"].strip('"').lower() == ada.sha1
    certificate = ada.certificate
    for name, when in (
        ("X-SSL-Client-Not-Before", certificate.not_valid_before_utc),
        ("X-SSL-Client-Not-After", certificate.not_valid_after_utc),
    ):
        assert found[name].strip('"') == f"{when:%y%m%d%H%M%S}Z"


@pytest.mark.feature("listener.insert_headers.X-SSL-Client-Verify", "listener.insert_headers.X-SSL-Client-Has-Cert")
def test_client_without_a_certificate_is_anonymous(served, tenant, clients):
    """The listener removes certificate headers of the client."""
    tree = load_balancer(
        terminated(
            insert_headers=OF_CLIENTS,
            client_authentication="OPTIONAL",
            client_ca_tls_container_ref="clients",
        ),
        pool("pool", member(served.web())),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem, "clients": clients.pem})
    seen = served.client.fetch(port=443, tls=trusting(tenant), headers=SPOOFED).seen
    found = {name: [value.strip('"') for value in seen.values(name)] for name in OF_CLIENTS}
    assert found.pop("X-SSL-Client-Has-Cert") in (["0"], ["false"])
    assert found.pop("X-SSL-Client-Verify") in (["0"], [""], [])
    assert all(values in ([], [""]) for values in found.values()), found


@pytest.mark.parametrize("vip", VIPS)
def test_forged_client_headers_are_removed(served, vip):
    served.push(load_balancer(listener(80, insert_headers=FORWARDED + ALSO), pool("pool", member(served.web()))))
    spoofed = [*SPOOFED, *((name.lower(), "again") for name in EVERY)]
    seen = served.client.fetch(address=vip, headers=spoofed).seen
    client = ADDRESSES[vip]
    assert seen.values("X-Forwarded-Port") == ["80"]
    assert seen.values("X-Forwarded-Proto") == ["http"]
    for name in ALSO:
        assert seen.values(name) == [client]
    # This header is a list: each proxy adds the address of its client.
    hops = [hop.strip() for value in seen.values("X-Forwarded-For") for hop in value.split(",")]
    assert hops == ["spoofed", "again", client]


# -- answers -------------------------------------------------------------------------------------------------------

HSTS = "Strict-Transport-Security"


@pytest.mark.parametrize(
    ("wanted", "header"),
    [
        ({"hsts_max_age": 31536000}, "max-age=31536000;"),
        ({"hsts_max_age": 0}, "max-age=0;"),
        ({"hsts_max_age": 60, "hsts_include_subdomains": True}, "max-age=60; includeSubDomains;"),
        ({"hsts_max_age": 60, "hsts_preload": True}, "max-age=60; preload;"),
        (
            {"hsts_max_age": 60, "hsts_include_subdomains": True, "hsts_preload": True},
            "max-age=60; includeSubDomains; preload;",
        ),
        ({}, None),
    ],
)
def test_strict_transport_security(served, tenant, wanted, header):
    """Answers of members and of HAProxy contain the configured header once."""
    secrets = {"cert": tenant.issue("www.example.com").pem}
    web = served.web()
    moved = policy("REDIRECT_TO_URL", 1, rule("PATH", "EQUAL_TO", "/old"), redirect_url="https://example.com/")
    for members, path, status in (
        (pool("pool", member(web)), "/", 200),
        (pool("pool", member(web)), "/old", 302),
        (pool("pool"), "/", 503),
    ):
        tls_listener = listener(443, moved, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", **wanted)
        served.push(load_balancer(tls_listener, listener(80), members), secrets)
        reply = served.client.fetch(path, port=443, tls=trusting(tenant))
        assert reply.status == status
        assert reply.header(HSTS) == header
        # Browsers ignore the header on plain HTTP (RFC 6797), so HAProxy does not send it.
        assert served.client.fetch(port=80).values(HSTS) == []


def test_a_members_own_strict_transport_security_is_replaced(served, tenant):
    web = served.web()
    web.answer = lambda seen: Answer(headers=((HSTS, "max-age=1"),))
    served.push(
        load_balancer(terminated(hsts_max_age=60), terminated(444), pool("pool", member(web))),
        {"cert": tenant.issue("www.example.com").pem},
    )
    assert served.client.fetch(port=443, tls=trusting(tenant)).values(HSTS) == ["max-age=60;"]
    assert served.client.fetch(port=444, tls=trusting(tenant)).values(HSTS) == ["max-age=1"]
