# SPDX-License-Identifier: Apache-2.0
"""Every sealed column comes under the newest key, whoever writes meanwhile, on every database."""

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver.secret import Secret
from amphora_driver.store import resealing
from amphora_driver.store.fleet_tables import authority, metadata
from amphora_driver.store.tables import amphora, secret
from amphora_driver.store.vault import Vault

OLD, NEW, LOST = (Fernet.generate_key() for _ in range(3))
BEFORE, BOTH = Vault([OLD]), Vault([NEW, OLD])


def fill(database, secrets=250, amphorae=3, vault=BEFORE):
    def work(connection):
        connection.execute(
            secret.insert(),
            [
                # Several rows share parts of their key: paging has to compare all of it.
                {
                    "object_id": f"object-{number // 4}",
                    "purpose": "certificate",
                    "ref": f"ref-{number % 4}",
                    "load_balancer_id": "lb",
                    "sealed": vault.seal(Secret(b"secret %d" % number)),
                }
                for number in range(secrets)
            ],
        )
        connection.execute(
            secret.insert().values(
                object_id="none", purpose="crl", ref="", load_balancer_id="lb", sealed=None, reason="never given"
            )
        )
        for number in range(amphorae):
            connection.execute(
                amphora.insert().values(
                    id=f"amphora-{number}",
                    load_balancer_id="lb",
                    role="single",
                    state="ready",
                    created_at=0.0,
                    heartbeat_key=vault.seal(Secret(b"heartbeat %d" % number)),
                )
            )

        row = {"kind": "amphora", "state": "former", "certificate": "", "expires_at": 0.0}
        times = {"created_at": 0.0, "changed_at": 0.0}
        connection.execute(authority.insert().values(**row, **times, sealed_key=vault.seal(Secret(b"authority"))))
        # One that was imported: its key is in a file.
        connection.execute(authority.insert().values(**row, **times, sealed_key=None))

    database.write(work)


def by_key(database, vault=BOTH):
    return {(one.column, one.key): one.rows for one in resealing.count(database, vault)}


def test_every_row_once(any_database):
    fill(any_database)
    assert by_key(any_database) == {
        ("secret.sealed", 0): 0,
        ("secret.sealed", 1): 250,
        ("amphora.heartbeat_key", 0): 0,
        ("amphora.heartbeat_key", 1): 3,
        ("authority.sealed_key", 0): 0,
        ("authority.sealed_key", 1): 1,
    }
    told = []
    assert resealing.reseal(any_database, BOTH, told.append) == 254
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
        assert only.open(row.sealed) == Secret(b"secret %d" % number)
    assert resealing.reseal(any_database, BOTH) == 0, "again: nothing to do"


def test_it_goes_on_where_it_was_ended(database):
    fill(database)

    class Killed(Exception):
        pass

    def die(_done):
        raise Killed

    with pytest.raises(Killed):
        resealing.reseal(database, BOTH, die)
    assert by_key(database)["secret.sealed", 0] == 100
    assert resealing.reseal(database, BOTH) == 154


def test_whoever_writes_meanwhile_wins(database, monkeypatch):
    fill(database, secrets=2, amphorae=0)
    fresh = BEFORE.seal(Secret(b"replaced by its user"))
    write = resealing._write

    def late(*words):
        database.write(
            lambda connection: connection.execute(secret.update().where(secret.c.ref == "ref-0").values(sealed=fresh))
        )
        monkeypatch.setattr(resealing, "_write", write)
        return write(*words)

    monkeypatch.setattr(resealing, "_write", late)
    assert resealing.reseal(database, BOTH) == 2, "a secret, and the key of an authority"
    assert by_key(database)["secret.sealed", 1] == 1, "left for the next pass"
    assert resealing.reseal(database, BOTH) == 1
    sealed = database.read(
        lambda connection: connection.execute(sa.select(secret.c.sealed).where(secret.c.ref == "ref-0")).scalar_one()
    )
    assert Vault([NEW]).open(sealed) == Secret(b"replaced by its user")


def test_what_no_key_opens_stays_and_is_counted(database):
    fill(database, secrets=1, amphorae=1, vault=Vault([LOST]))
    before = database.read(lambda connection: connection.execute(sa.select(secret.c.sealed)).scalars().all())
    assert resealing.reseal(database, BOTH) == 0
    assert database.read(lambda connection: connection.execute(sa.select(secret.c.sealed)).scalars().all()) == before
    assert by_key(database)["secret.sealed", None] == by_key(database)["amphora.heartbeat_key", None] == 1


def test_no_column_with_bytes_is_forgotten():
    """All bytes in our tables are sealed; a new column of this kind has to be named."""
    binary = {
        str(column)
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, sa.LargeBinary)
    }
    assert binary == {str(column) for column in resealing.SEALED}
