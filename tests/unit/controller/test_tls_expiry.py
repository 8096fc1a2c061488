# SPDX-License-Identifier: Apache-2.0
"""The expiry of users' certificates: read once by housekeeping, listed by listener and pool."""

import datetime as dt
import time

import migrated
import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import desired_object, secret
from amphora_driver.database.vault import Vault
from amphora_driver.maintenance import tls_expiry
from amphora_driver.maintenance.tls_expiry import record_tls_expiries
from amphora_driver.model.secret_refs import Purpose, SecretName, ticket_secret_name
from amphora_driver.secret import Secret
from amphora_driver.store import sealed_secrets
from amphora_driver.store.sealed_secrets import ExpiringSecret, SealedSecret, secret_location

VAULT = Vault([Fernet.generate_key()])
KEY = ec.generate_private_key(ec.SECP256R1())
NOW = float(int(time.time()))
DAY = 86_400.0


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


def pem(*days):
    """Return certificates that expire after these days, and the key, as stored for HAProxy."""
    text = b""
    for number, one in enumerate(days):
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"c{number}")])
        end = dt.datetime.fromtimestamp(NOW + one * DAY, dt.timezone.utc)
        dates = (end - dt.timedelta(days=900), end)
        made = x509.CertificateBuilder(name, name, KEY.public_key(), x509.random_serial_number(), *dates)
        text += made.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    key = KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Secret(text + key)


def name(owner, ref="ref", purpose=Purpose.CERTIFICATE):
    return SecretName(owner, purpose, ref)


def store(database, given, vault=VAULT):
    sealed = {one: SealedSecret(content=vault.seal(text, secret_location(one))) for one, text in given.items()}
    database.write(lambda c: sealed_secrets.replace_secrets(c, "lb", sealed))


def record_objects(database):
    rows = [
        {"id": one, "kind": kind, "load_balancer_id": "lb", "created": 1, "generation": 1, "body": "{}"}
        for one, kind in (("li", "listeners"), ("li2", "listeners"), ("po", "pools"))
    ]
    database.write(lambda c: c.execute(desired_object.insert(), rows))


def expiries(database):
    rows = database.read(lambda c: c.execute(sa.select(secret)).all())
    return {(row.object_id, row.purpose, row.ref): row.expires_at for row in rows}


def test_the_expiry_of_the_servers_own_certificate_is_recorded_once(database):
    store(database, {name("li"): pem(20, 5), name("li", purpose=Purpose.CA): pem(3), ticket_secret_name("lb"): pem(1)})
    assert record_tls_expiries(database, VAULT) == 1
    assert expiries(database) == {
        ("li", "certificate", "ref"): NOW + 20 * DAY,
        ("li", "ca", "ref"): None,
        ("lb", "tickets", ""): None,
    }
    assert record_tls_expiries(database, VAULT) == 0


def test_a_replaced_certificate_is_read_again(database):
    store(database, {name("li"): pem(20)})
    record_tls_expiries(database, VAULT)
    store(database, {name("li"): pem(90)})
    assert expiries(database) == {("li", "certificate", "ref"): None}
    assert record_tls_expiries(database, VAULT) == 1
    assert expiries(database) == {("li", "certificate", "ref"): NOW + 90 * DAY}


def test_a_certificate_that_is_replaced_during_the_round_keeps_no_old_expiry(database):
    store(database, {name("li"): pem(20)})
    (read,) = database.read(lambda c: sealed_secrets.list_unread_certificates(c, None, 10))
    store(database, {name("li"): pem(90)})
    assert database.write(lambda c: sealed_secrets.record_expiries(c, [(read, 1.0)])) == 0
    assert expiries(database) == {("li", "certificate", "ref"): None}


def test_unusable_certificates_stop_no_other_one(database, monkeypatch):
    monkeypatch.setattr(tls_expiry, "_BATCH", 2)
    store(database, {name("a"): pem(20), name("b"): pem(20), name("c"): pem(20)}, Vault([Fernet.generate_key()]))
    store(database, {name("d"): Secret(b"no certificate"), name("e"): pem(7), name("e", "second"): pem(8)})
    missing = {name("f"): SealedSecret(reason="not delivered")}
    database.write(lambda c: sealed_secrets.replace_secrets(c, "lb", missing))
    assert record_tls_expiries(database, VAULT) == 2
    assert {key for key, at in expiries(database).items() if at} == {
        ("e", "certificate", "ref"),
        ("e", "certificate", "second"),
    }


def test_the_first_certificate_of_each_object_is_listed(database):
    record_objects(database)
    store(database, {name("li"): pem(20), name("li", "sni"): pem(10), name("po"): pem(-1), name("li2"): pem(31)})
    record_tls_expiries(database, VAULT)
    found = database.read(lambda c: sealed_secrets.list_expiring(c, NOW, NOW + 30 * DAY, 10))
    assert found == [
        ExpiringSecret(load_balancer_id="lb", object_id="po", kind="pool", expires_at=NOW - DAY),
        ExpiringSecret(load_balancer_id="lb", object_id="li", kind="listener", expires_at=NOW + 10 * DAY),
    ]
    assert database.read(lambda c: sealed_secrets.list_expiring(c, NOW, NOW, 1)) == found[:1]


def test_many_expired_certificates_of_an_object_hide_no_other_object(database):
    record_objects(database)
    expired = {name("li", f"sni {number}"): pem(-1 - number) for number in range(3)}
    store(database, {**expired, name("li2"): pem(-1), name("po"): pem(10)})
    record_tls_expiries(database, VAULT)
    found = database.read(lambda c: sealed_secrets.list_expiring(c, NOW, NOW + 30 * DAY, 2))
    assert [one.object_id for one in found] == ["li", "li2", "po"]
    assert found[0].expires_at == NOW - 3 * DAY
    assert [
        one.object_id for one in database.read(lambda c: sealed_secrets.list_expiring(c, NOW, NOW + 30 * DAY, 1))
    ] == [
        "li",
        "po",
    ]
