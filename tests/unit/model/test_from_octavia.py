# SPDX-License-Identifier: Apache-2.0
"""Conversion of Octavia's objects into the model: unset, None, values and secrets."""

import pytest
from octavia_lib.api.drivers import data_models

from amphora_driver.errors import ModelError
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import (
    ClientAuthentication,
    Kind,
    L7Action,
    ListenerProtocol,
    PersistenceType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import L7Policy, Listener, Pool, SessionPersistence
from amphora_driver.model.secret_refs import Purpose, SecretName

CERTIFICATE, CA, CRL = Purpose.CERTIFICATE, Purpose.CA, Purpose.CRL


def container(text, **more):
    name = text if isinstance(text, str) else text.decode()
    return {"id": "1", "primary_cn": "x", "certificate": text, "private_key": f"key of {name}", **more}


def texts(found):
    return {(name.object_id, name.purpose, name.ref): one.text.reveal().decode() for name, one in found.items()}


def test_secrets_of_a_listener():
    source = data_models.Listener(
        listener_id="li",
        default_tls_container_ref="one",
        default_tls_container_data=container(b"1", intermediates=[b"i1", "i2"], passphrase=None),
        sni_container_refs=["two", "one", "three"],
        sni_container_data=[container("2"), container("1"), container("3")],
        client_ca_tls_container_ref="authority",
        client_ca_tls_container_data="ca",
        client_crl_container_ref="list",
        client_crl_container_data=b"crl",
    )
    found = from_octavia.read_secrets(Kind.LISTENER, source)
    assert texts(found) == {
        ("li", CERTIFICATE, "one"): "1",
        ("li", CERTIFICATE, "two"): "2",
        ("li", CERTIFICATE, "three"): "3",
        ("li", CA, "authority"): "ca",
        ("li", CRL, "list"): "crl",
    }
    one = found[SecretName("li", CERTIFICATE, "one")]
    assert one.private_key.reveal() == b"key of 1"
    assert [part.reveal() for part in one.intermediates] == [b"i1", b"i2"]
    assert one.passphrase is None
    assert one.option == "listener option default_tls_container_ref"
    assert "key of" not in repr(found)


def test_contents_in_another_order_than_their_references_are_not_used():
    source = {
        "listener_id": "li",
        "sni_container_refs": ["b", "a"],
        "sni_container_data": [container("a"), container("b")],
    }
    assert from_octavia.read_secrets(Kind.LISTENER, source, paired=False) == {}
    assert set(texts(from_octavia.read_secrets(Kind.LISTENER, source)).values()) == {"a", "b"}
    del source["sni_container_data"][1]
    assert from_octavia.read_secrets(Kind.LISTENER, source) == {}, (
        "one content is missing, and its reference is unknown"
    )


def test_secrets_of_a_load_balancer_are_read_back():
    tree = {
        "loadbalancer_id": "lb",
        "listeners": [
            {
                "listener_id": "li",
                "default_tls_container_ref": "one",
                "default_tls_container_data": container("1"),
                "sni_container_refs": None,
                "sni_container_data": None,
                "client_ca_tls_container_ref": "gone",
                "client_ca_tls_container_data": None,
            }
        ],
        "pools": [
            {
                "pool_id": "po",
                "tls_container_ref": "one",
                "tls_container_data": container("1"),
                "ca_tls_container_ref": "authority",
                "ca_tls_container_data": "ca",
                "crl_container_ref": "list",
                "crl_container_data": "crl",
            }
        ],
    }
    assert set(texts(from_octavia.read_secrets(Kind.LOAD_BALANCER, tree))) == {
        ("li", CERTIFICATE, "one"),
        ("po", CERTIFICATE, "one"),
        ("po", CA, "authority"),
        ("po", CRL, "list"),
    }


LISTENER = Listener(
    id="li",
    loadbalancer_id="lb",
    protocol=ListenerProtocol.TERMINATED_HTTPS,
    protocol_port=443,
    name="name",
    connection_limit=5,
    default_pool_id="po",
    timeout_client_data=1,
    insert_headers=("X-Forwarded-For",),
    allowed_cidrs=("192.0.2.0/24",),
    default_tls_container_ref="one",
    client_ca_tls_container_ref="ca",
    client_crl_container_ref="crl",
    client_authentication=ClientAuthentication.OPTIONAL,
    alpn_protocols=("h2",),
    tls_versions=("TLSv1.3",),
    tls_ciphers="X",
    hsts_max_age=5,
    hsts_preload=True,
    sni_container_refs=("two",),
)
POOL = Pool(
    id="po",
    loadbalancer_id="lb",
    protocol=PoolProtocol.HTTP,
    session_persistence=SessionPersistence(type=PersistenceType.APP_COOKIE, cookie_name="c"),
    tls_enabled=True,
    tls_container_ref="one",
    ca_tls_container_ref="ca",
    crl_container_ref="crl",
    alpn_protocols=("h2",),
)
POLICY = L7Policy(
    id="y",
    listener_id="li",
    action=L7Action.REDIRECT_TO_URL,
    position=3,
    redirect_url="http://a/",
    redirect_http_code=301,
)
SHAPES = {
    Kind.LISTENER: (LISTENER, data_models.Listener, "listener_id"),
    Kind.POOL: (POOL, data_models.Pool, "pool_id"),
    Kind.L7POLICY: (POLICY, data_models.L7Policy, "l7policy_id"),
}


def after(kind, **named):
    before, source, identity = SHAPES[kind]
    return from_octavia.apply_changes(
        before, from_octavia.changed_fields(kind, source(**{identity: before.id, **named}))
    )


@pytest.mark.parametrize(
    ("kind", "named", "expected"),
    [
        (Kind.LISTENER, {}, {"name": "name", "sni_container_refs": ("two",), "allowed_cidrs": ("192.0.2.0/24",)}),
        (Kind.LISTENER, {"name": None}, {"name": None}),
        (Kind.LISTENER, {"connection_limit": None}, {"connection_limit": -1}),
        (Kind.LISTENER, {"default_pool_id": None}, {"default_pool_id": None}),
        (Kind.LISTENER, {"timeout_client_data": None}, {"timeout_client_data": None}),
        (Kind.LISTENER, {"insert_headers": None}, {"insert_headers": None}),
        (Kind.LISTENER, {"insert_headers": {"X-Forwarded-For": "false"}}, {"insert_headers": ()}),
        (Kind.LISTENER, {"allowed_cidrs": None}, {"allowed_cidrs": None}),
        (Kind.LISTENER, {"allowed_cidrs": []}, {"allowed_cidrs": ()}),
        (Kind.LISTENER, {"default_tls_container_ref": "new"}, {"default_tls_container_ref": "new"}),
        (Kind.LISTENER, {"default_tls_container_ref": None}, {"default_tls_container_ref": None}),
        (Kind.LISTENER, {"client_ca_tls_container_ref": None}, {"client_ca_tls_container_ref": None}),
        (Kind.LISTENER, {"client_crl_container_ref": None}, {"client_crl_container_ref": None}),
        (Kind.LISTENER, {"client_authentication": "NONE"}, {"client_authentication": "NONE"}),
        (Kind.LISTENER, {"alpn_protocols": None}, {"alpn_protocols": None}),
        (Kind.LISTENER, {"alpn_protocols": []}, {"alpn_protocols": ()}),
        (Kind.LISTENER, {"hsts_max_age": None}, {"hsts_max_age": None, "hsts_preload": True}),
        (Kind.LISTENER, {"hsts_preload": None}, {"hsts_preload": False}),
        (Kind.LISTENER, {"sni_container_refs": ["b", "a"]}, {"sni_container_refs": ("b", "a")}),
        (Kind.POOL, {}, {"session_persistence": POOL.session_persistence, "tls_enabled": True}),
        (Kind.POOL, {"session_persistence": None}, {"session_persistence": None}),
        (Kind.POOL, {"session_persistence": {}}, {"session_persistence": None}),
        (
            Kind.POOL,
            {"session_persistence": {"type": "SOURCE_IP", "cookie_name": None, "persistence_timeout": None}},
            {"session_persistence": SessionPersistence(type=PersistenceType.SOURCE_IP)},
        ),
        (Kind.POOL, {"tls_container_ref": None, "crl_container_ref": None}, {"ca_tls_container_ref": "ca"}),
        (Kind.POOL, {"ca_tls_container_ref": None}, {"ca_tls_container_ref": None, "tls_container_ref": "one"}),
        (Kind.POOL, {"alpn_protocols": None}, {"alpn_protocols": None}),
        (Kind.POOL, {"tls_enabled": False}, {"tls_enabled": False}),
        (Kind.L7POLICY, {"position": None}, {"position": 3}),
        (Kind.L7POLICY, {"name": None}, {"name": None, "redirect_url": "http://a/"}),
        (Kind.L7POLICY, {"action": "REJECT"}, {"redirect_url": None, "redirect_http_code": None}),
        (
            Kind.L7POLICY,
            {"action": "REDIRECT_TO_POOL", "redirect_pool_id": "po"},
            {"redirect_pool_id": "po", "redirect_url": None, "redirect_http_code": None},
        ),
        (
            Kind.L7POLICY,
            {"action": "REDIRECT_PREFIX", "redirect_prefix": "http://b"},
            {"redirect_prefix": "http://b", "redirect_url": None, "redirect_http_code": 301},
        ),
        (Kind.L7POLICY, {"redirect_http_code": "308"}, {"redirect_http_code": 308}),
    ],
)
def test_unset_none_and_a_value_are_different(kind, named, expected):
    found = after(kind, **named)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Kind.LISTENER, {"listener_id": "li", "protocol": "HTTP", "protocol_port": 80, "insert_headers": ["a"]}),
        (Kind.LISTENER, {"listener_id": "li", "protocol": 7, "protocol_port": object()}),
        (Kind.LISTENER, {"listener_id": "li", "protocol": "HTTP", "protocol_port": 80, "l7policies": 5}),
        (Kind.POOL, {"pool_id": "po", "protocol": "HTTP", "loadbalancer_id": "lb", "members": [None]}),
        (Kind.POOL, {"pool_id": "po", "protocol": "HTTP", "loadbalancer_id": "lb", "session_persistence": 3}),
        (Kind.LOAD_BALANCER, {"loadbalancer_id": "lb", "project_id": "x", "additional_vips": ["192.0.2.1"]}),
    ],
)
def test_a_wrong_type_is_a_request_error(kind, source):
    with pytest.raises(ModelError):
        from_octavia.node(kind, source)


@pytest.mark.parametrize(
    "source",
    [
        {"listener_id": "li", "default_tls_container_ref": "a", "default_tls_container_data": "BEGIN secret"},
        {"listener_id": "li", "default_tls_container_ref": "a", "default_tls_container_data": {"certificate": 5}},
        {"listener_id": "li", "client_ca_tls_container_ref": "a", "client_ca_tls_container_data": {"secret": "BEGIN"}},
    ],
)
def test_the_error_about_a_wrong_secret_type_does_not_quote_it(source):
    with pytest.raises(ModelError) as caught:
        from_octavia.read_secrets(Kind.LISTENER, source)
    assert "BEGIN" not in str(caught.value)
