# SPDX-License-Identifier: Apache-2.0
"""Secrets of users: from the driver call to the encrypted table and back."""

import logging

import pytest
import sqlalchemy as sa
from dataplane.pki import Authority
from octavia_lib.api.drivers import data_models, exceptions
from octavia_objects import LB, LISTENER, POOL, listener, load_balancer, pool

from amphora_driver import driver
from amphora_driver.database import tables
from amphora_driver.database.vault import Vault
from amphora_driver.model.enums import Kind
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.store import resyncs, sealed_secrets

ROOT = Authority("root")
OTHER = Authority("other")
ONE, TWO, THREE = (ROOT.issue(f"{name}.example.com") for name in ("one", "two", "three"))


def container(certificate):
    """The object that Octavia's certificate manager returns."""
    return {
        "id": "0" * 40,
        "primary_cn": "x",
        "certificate": certificate.certificate_pem.encode(),
        "private_key": certificate.key_pem.encode(),
        "passphrase": None,
        "intermediates": [],
    }


def tls(**more):
    values = {
        "protocol": "TERMINATED_HTTPS",
        "protocol_port": 443,
        "default_tls_container_ref": "one",
        "default_tls_container_data": container(ONE),
    }
    return listener(**{**values, **more})


def change(**more):
    return data_models.Listener(listener_id=LISTENER, **more)


@pytest.fixture
def opened(conf, database):
    """The decrypted rows of one object: (purpose, ref) -> content."""

    def read(object_id=LISTENER):
        vault = Vault.load(conf.amp_database.encryption_key_file)
        kept = database.read(lambda connection: sealed_secrets.load_secrets(connection, LB))
        return {
            (name.purpose.value, name.ref): vault.open(one.content, sealed_secrets.secret_location(name))
            .reveal()
            .decode()
            for name, one in kept.items()
            if name.object_id == object_id
        }

    return read


def to_read(database):
    """The recorded read-back from Octavia, or None."""
    row = database.read(lambda connection: connection.execute(sa.select(tables.job)).one())
    return resyncs.decode_objects(row.reread) if row.read_back else None


@pytest.fixture
def secured(provider):
    """A load balancer with a TLS listener."""
    provider.loadbalancer_create(load_balancer())
    provider.listener_create(tls())
    return provider


def test_certificate_and_key_are_stored_encrypted(secured, opened, database):
    assert opened() == {("certificate", "one"): ONE.pem}
    assert to_read(database) is None
    rows = database.read(lambda connection: connection.execute(sa.select(tables.secret)).all())
    assert not [row for row in rows if b"PRIVATE" in row.sealed or b"CERTIFICATE" in row.sealed]


def test_a_listener_with_sni_is_read_back(provider, opened, database):
    """Octavia returns the references in the user's order. The contents are in database order or missing."""
    provider.loadbalancer_create(load_balancer())
    more = {"sni_container_refs": ["two", "three"], "sni_container_data": [container(THREE), container(TWO)]}
    provider.listener_create(tls(**more))
    assert opened() == {("certificate", "one"): ONE.pem}
    assert to_read(database) == [(Kind.LISTENER, LISTENER)]


@pytest.mark.parametrize("field", ["default_tls_container_ref", "client_ca_tls_container_ref"])
def test_a_reference_without_content_is_read_back(provider, opened, database, field):
    provider.loadbalancer_create(load_balancer())
    provider.listener_create(tls(**{field: "new", field.replace("_ref", "_data"): data_models.Unset}))
    assert to_read(database) == [(Kind.LISTENER, LISTENER)]


def test_another_certificate_replaces_the_first(secured, opened, database):
    secured.listener_update(None, change(default_tls_container_ref="two", default_tls_container_data=container(TWO)))
    assert opened() == {("certificate", "two"): TWO.pem}
    assert to_read(database) is None


def test_the_same_reference_with_new_content_replaces_the_content(secured, opened):
    """Octavia renews a certificate with an update of the listener after a change in the secret store."""
    secured.listener_update(None, change(default_tls_container_ref="one", default_tls_container_data=container(TWO)))
    assert opened() == {("certificate", "one"): TWO.pem}


def test_a_new_default_certificate_keeps_the_others(secured, opened, database):
    secured.listener_update(
        None,
        change(
            sni_container_refs=["two", "one"],
            sni_container_data=[container(TWO), container(ONE)],
            client_ca_tls_container_ref="ca",
            client_ca_tls_container_data=ROOT.pem,
        ),
    )
    assert set(opened()) == {("certificate", "one"), ("certificate", "two"), ("ca", "ca")}
    assert to_read(database) is None
    secured.listener_update(None, change(default_tls_container_ref="new", default_tls_container_data=container(THREE)))
    assert opened() == {
        ("certificate", "new"): THREE.pem,
        ("certificate", "two"): TWO.pem,
        ("certificate", "one"): ONE.pem,
        ("ca", "ca"): ROOT.pem,
    }
    assert to_read(database) == [(Kind.LISTENER, LISTENER)], "Octavia does not report an emptied SNI list"


def test_removed_ca_and_crl_are_deleted(secured, opened, database):
    secured.listener_update(
        None,
        change(
            client_ca_tls_container_ref="ca",
            client_ca_tls_container_data=OTHER.pem + ROOT.pem,
            client_crl_container_ref="crl",
            client_crl_container_data=ROOT.revoke(ONE),
        ),
    )
    assert set(opened()) == {("certificate", "one"), ("ca", "ca"), ("crl", "crl")}
    secured.listener_update(None, change(client_crl_container_ref=None))
    assert set(opened()) == {("certificate", "one"), ("ca", "ca")}
    secured.listener_update(None, change(client_ca_tls_container_ref=None))
    assert set(opened()) == {("certificate", "one")}
    assert to_read(database) is None


def test_changes_without_tls_touch_no_secret(secured, database):
    seen = []
    engine = driver._shared().database.engine
    listen = lambda *args: seen.append(args[2])  # noqa: E731
    sa.event.listen(engine, "before_cursor_execute", listen)
    try:
        secured.listener_update(None, change(name="x"))
    finally:
        sa.event.remove(engine, "before_cursor_execute", listen)
    assert not [one for one in seen if "secret" in one and not one.startswith("SELECT")]
    assert not [one for one in seen if "sealed," in one], "no content is read"
    assert to_read(database) is None


def test_the_secrets_of_a_pool_are_stored(secured, opened, database):
    secured.pool_create(
        pool(
            tls_enabled=True,
            tls_container_ref="one",
            tls_container_data=container(TWO),
            ca_tls_container_ref="ca",
            ca_tls_container_data=ROOT.pem.encode(),
        )
    )
    assert opened(POOL) == {("certificate", "one"): TWO.pem, ("ca", "ca"): ROOT.pem}
    assert opened() == {("certificate", "one"): ONE.pem}, "the same reference is a different secret for another object"
    secured.pool_update(None, data_models.Pool(pool_id=POOL, tls_container_ref=None))
    assert opened(POOL) == {("ca", "ca"): ROOT.pem}
    secured.pool_update(None, data_models.Pool(pool_id=POOL, ca_tls_container_ref="ca"))
    assert to_read(database) == [(Kind.POOL, POOL)], "the update repeats the reference without content"
    secured.pool_delete(pool())
    assert opened(POOL) == {}
    assert opened() != {}


@pytest.mark.parametrize(
    "delete",
    [lambda one: one.listener_delete(listener()), lambda one: one.loadbalancer_delete(load_balancer(), cascade=True)],
)
def test_secrets_of_deleted_objects_are_deleted_at_once(secured, opened, database, delete):
    delete(secured)
    assert opened() == {}
    assert to_read(database) is None


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (
            lambda one: one.listener_update(
                None,
                change(
                    default_tls_container_ref="new",
                    default_tls_container_data={**container(ONE), "private_key": ROOT.issue("x", number=5).key_pem},
                ),
            ),
            "default_tls_container_ref",
        ),
        (
            lambda one: one.listener_update(
                None, change(sni_container_refs=["x"], sni_container_data=[{**container(ONE), "certificate": b"no"}])
            ),
            "sni_container_refs",
        ),
        (
            lambda one: one.listener_update(
                None, change(client_ca_tls_container_ref="x", client_ca_tls_container_data=ONE.key_pem)
            ),
            "client_ca_tls_container_ref",
        ),
        (
            lambda one: one.listener_update(
                None,
                change(
                    client_ca_tls_container_ref="x",
                    client_ca_tls_container_data=ROOT.pem,
                    client_crl_container_ref="y",
                    client_crl_container_data=OTHER.revoke(),
                ),
            ),
            "client_crl_container_ref",
        ),
        (
            lambda one: one.pool_create(
                pool(tls_enabled=True, ca_tls_container_ref="x", ca_tls_container_data="garbage")
            ),
            "ca_tls_container_ref",
        ),
    ],
)
def test_an_unusable_certificate_is_refused_by_name_and_not_recorded(secured, opened, database, call, option, caplog):
    caplog.set_level(logging.DEBUG)
    before = opened()
    generation = database.read(lambda connection: connection.execute(sa.select(tables.job.c.generation)).scalar())
    with pytest.raises(exceptions.UnsupportedOptionError) as refusal:
        call(secured)
    said = refusal.value.user_fault_string + refusal.value.operator_fault_string + caplog.text
    assert option in said
    assert "BEGIN" not in said
    assert opened() == before
    assert generation == database.read(
        lambda connection: connection.execute(sa.select(tables.job.c.generation)).scalar()
    )


def test_no_secret_is_stored_or_logged_in_clear(secured, database, tmp_path, caplog):
    """Each call with a key runs at log level DEBUG. Tables, files and log lines contain no part of the key."""
    caplog.set_level(logging.DEBUG)
    secured.listener_update(
        None, change(sni_container_refs=["two"], sni_container_data=[container(TWO)], default_pool_id=None)
    )
    secured.pool_create(pool(tls_enabled=True, tls_container_ref="three", tls_container_data=container(THREE)))
    keys = {line for one in (ONE, TWO, THREE) for line in one.key_pem.splitlines() if len(line) > 20}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [line for line in keys if line.encode() in content], path
            assert b"PRIVATE KEY" not in content, path
    assert "PRIVATE KEY" not in caplog.text
    kept = database.read(lambda connection: sealed_secrets.load_secrets(connection, LB))
    assert SecretName(LISTENER, Purpose.CERTIFICATE, "two") in kept
