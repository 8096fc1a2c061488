# SPDX-License-Identifier: Apache-2.0
"""Re-encryption of all sealed columns during concurrent writes, on every database."""

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver.database.tables import amphora, secret
from amphora_driver.database.tables_fleet import certificate_authority, metadata
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.maintenance import reencryption
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, ca_records, sealed_secrets

OLD, NEW, LOST = (Fernet.generate_key() for _ in range(3))
BEFORE, BOTH = Vault([OLD]), Vault([NEW, OLD])
AUTHORITY = ca_records.key_location(ca_records.CaKind.AMPHORA, b"its certificate")


def name_of(number):
    # Several rows share parts of their key, so paging must compare the whole key.
    return SecretName(f"object-{number // 4}", Purpose.CERTIFICATE, f"ref-{number % 4}")


def place_of(number):
    return sealed_secrets.secret_location(name_of(number))


def fill(database, certificates=250, machines=3, vault=BEFORE):
    def work(connection):
        connection.execute(
            secret.insert(),
            [
                {
                    "object_id": name_of(number).object_id,
                    "purpose": "certificate",
                    "ref": name_of(number).ref,
                    "load_balancer_id": "lb",
                    "sealed": vault.seal(Secret(b"secret %d" % number), place_of(number)),
                }
                for number in range(certificates)
            ],
        )
        connection.execute(
            secret.insert().values(
                object_id="none", purpose="crl", ref="", load_balancer_id="lb", sealed=None, reason="never given"
            )
        )
        for number in range(machines):
            connection.execute(
                amphora.insert().values(
                    id=f"amphora-{number}",
                    load_balancer_id="lb",
                    role="single",
                    state="ready",
                    created_at=0.0,
                    heartbeat_key=vault.seal(
                        Secret(b"heartbeat %d" % number), amphorae.key_location(f"amphora-{number}")
                    ),
                )
            )

        row = {"kind": "amphora", "state": "former", "certificate": "its certificate", "expires_at": 0.0}
        times = {"created_at": 0.0, "changed_at": 0.0}
        connection.execute(
            certificate_authority.insert().values(
                **row, **times, sealed_key=vault.seal(Secret(b"authority"), AUTHORITY)
            )
        )
        # An imported CA has its key in a file.
        connection.execute(certificate_authority.insert().values(**row, **times, sealed_key=None))

    database.write(work)


def by_key(database, vault=BOTH):
    return {(one.column, one.key): one.rows for one in reencryption.count_key_usage(database, vault)}


def test_each_row_is_reencrypted_once(any_database):
    fill(any_database)
    assert by_key(any_database) == {
        ("secret.sealed", 0): 0,
        ("secret.sealed", 1): 250,
        ("amphora.heartbeat_key", 0): 0,
        ("amphora.heartbeat_key", 1): 3,
        ("certificate_authority.sealed_key", 0): 0,
        ("certificate_authority.sealed_key", 1): 1,
    }
    told = []
    assert reencryption.reencrypt(any_database, BOTH, told.append) == 254
    assert told == [100, 200, 250, 253, 254]
    assert by_key(any_database)["secret.sealed", 1] == by_key(any_database)["amphora.heartbeat_key", 1] == 0
    only = Vault([NEW])
    rows = any_database.read(
        lambda connection: connection.execute(
            sa.select(secret.c.object_id, secret.c.ref, secret.c.sealed).where(secret.c.sealed.is_not(None))
        ).all()
    )
    for row in rows:
        number = int(row.object_id.partition("-")[2]) * 4 + int(row.ref.partition("-")[2])
        assert only.open(row.sealed, place_of(number)) == Secret(b"secret %d" % number)
    assert reencryption.reencrypt(any_database, BOTH) == 0, "a second pass changes nothing"


def test_the_reencryption_continues_after_a_kill(database):
    fill(database)

    class Killed(Exception):
        pass

    def kill(_done):
        raise Killed

    with pytest.raises(Killed):
        reencryption.reencrypt(database, BOTH, kill)
    assert by_key(database)["secret.sealed", 0] == 100
    assert reencryption.reencrypt(database, BOTH) == 154


def test_a_concurrent_write_is_kept(database, monkeypatch):
    fill(database, certificates=2, machines=0)
    fresh = BEFORE.seal(Secret(b"replaced by its user"), place_of(0))
    write = reencryption._write

    def late(*words):
        database.write(
            lambda connection: connection.execute(secret.update().where(secret.c.ref == "ref-0").values(sealed=fresh))
        )
        monkeypatch.setattr(reencryption, "_write", write)
        return write(*words)

    monkeypatch.setattr(reencryption, "_write", late)
    assert reencryption.reencrypt(database, BOTH) == 2, "a secret and a CA key"
    assert by_key(database)["secret.sealed", 1] == 1, "left for the next pass"
    assert reencryption.reencrypt(database, BOTH) == 1
    sealed = database.read(
        lambda connection: connection.execute(sa.select(secret.c.sealed).where(secret.c.ref == "ref-0")).scalar_one()
    )
    assert Vault([NEW]).open(sealed, place_of(0)) == Secret(b"replaced by its user")


def test_unreadable_secrets_stay_and_are_counted(database):
    fill(database, certificates=1, machines=1, vault=Vault([LOST]))
    before = database.read(lambda connection: connection.execute(sa.select(secret.c.sealed)).scalars().all())
    assert reencryption.reencrypt(database, BOTH) == 0
    assert database.read(lambda connection: connection.execute(sa.select(secret.c.sealed)).scalars().all()) == before
    assert by_key(database)["secret.sealed", None] == by_key(database)["amphora.heartbeat_key", None] == 1


def states(database, vault=BOTH):
    counts = reencryption.count_key_usage(database, vault)
    return {one.column: (one.rows, one.misplaced) for one in counts if one.rows}


COPIED = [
    amphora.select().with_only_columns(amphora.c.heartbeat_key).where(amphora.c.id == "amphora-1"),
    certificate_authority.select()
    .with_only_columns(certificate_authority.c.sealed_key)
    .where(certificate_authority.c.sealed_key.is_not(None)),
    secret.select().with_only_columns(secret.c.sealed).where(secret.c.object_id == "object-1"),
]


@pytest.mark.parametrize("source", COPIED, ids=["heartbeat key", "authority", "certificate of another listener"])
def test_a_copy_from_another_row_is_named_and_not_reencrypted(database, source, caplog):
    fill(database, certificates=5)

    def copy(connection):
        (found,) = connection.execute(source).first()
        mine = name_of(0)
        connection.execute(
            secret.update().where(secret.c.object_id == mine.object_id, secret.c.ref == mine.ref).values(sealed=found)
        )
        return found

    copied = database.write(copy)
    with pytest.raises(StoreError, match="another row or purpose"):
        BOTH.open(copied, place_of(0))
    assert reencryption.reencrypt(database, BOTH) == 8, "all values except the copy"
    kept = database.read(lambda c: sealed_secrets.load_secrets(c, "lb"))
    assert kept[name_of(0)].content == copied
    assert states(database)["secret.sealed"] == (1, 1)
    happened = "secret.sealed of row object-0, certificate, ref-0 was encrypted for another row or another purpose"
    assert happened in caplog.text


def test_a_certificate_in_the_column_of_a_heartbeat_key_is_refused(database):
    fill(database)

    def copy(connection):
        (found,) = connection.execute(COPIED[2]).first()
        connection.execute(amphora.update().where(amphora.c.id == "amphora-0").values(heartbeat_key=found))

    database.write(copy)
    assert set(database.read(lambda c: amphorae.read_heartbeat_keys(c, BOTH))) == {"amphora-1", "amphora-2"}
    with pytest.raises(StoreError, match="table amphora was encrypted for another row or purpose"):
        database.read(lambda c: amphorae.read_heartbeat_key(c, BOTH, "amphora-0"))


def test_each_column_with_bytes_is_reencrypted():
    """All bytes in the tables are sealed; a new column of this type must be added to the re-encryption."""
    binary = {
        str(column)
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, sa.LargeBinary)
    }
    assert binary == {str(column) for column in reencryption.SEALED}
