# SPDX-License-Identifier: Apache-2.0
"""CAs as rows: one rotation at a time, steps that happen once, erased keys; on every database."""

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job
from amphora_driver.database.tables_fleet import certificate_authority
from amphora_driver.errors import Conflict
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import CaKind, CaState, NewCa

FILE = NewCa(certificate=b"of the files", sealed_key=None, expires_at=5000.0)
NEW = NewCa(certificate=b"new", sealed_key=b"sealed", expires_at=9000.0)


def begin(database, kind=CaKind.AMPHORA, now=100.0):
    return database.write(lambda c: ca_records.begin_ca_rotation(c, kind, FILE, NEW, now))


def states(database):
    return {one.id: one.state for one in database.read(lambda c: ca_records.list_cas(c, gone=True))}


def record(database, number, **more):
    row = {"id": f"a{number}", "load_balancer_id": "lb", "role": "single", "state": "ready", "heartbeat_key": b""}
    database.write(lambda c: c.execute(amphora.insert().values(**row, created_at=0.0, confirmed=1, **more)))


def test_a_complete_ca_rotation(any_database):
    record(any_database, 1, management_address="203.0.113.1", certificate_expires_at=300.0)
    new = begin(any_database)
    old, coming = any_database.read(ca_records.list_cas)
    assert (coming.id, coming.state, coming.sealed_key) == (new, CaState.NEXT, b"sealed")
    assert (old.state, old.certificate, old.sealed_key) == (CaState.CURRENT, b"of the files", None)
    (one,) = any_database.read(ca_records.list_amphora_certificates)
    assert (one.amphora_id, one.authority, one.ready) == ("a1", old.id, False), (
        "the CA from the files has signed the certificate"
    )
    with pytest.raises(Conflict, match="has not ended"):
        begin(any_database)
    moves = {coming: CaState.CURRENT, old: CaState.FORMER}
    assert any_database.write(lambda c: ca_records.change_ca_states(c, moves, 200.0))
    assert not any_database.write(lambda c: ca_records.change_ca_states(c, moves, 201.0)), (
        "another process has taken this step"
    )
    for state in (CaState.LEAVING, CaState.GONE):
        (old,) = [row for row in any_database.read(ca_records.list_cas) if row.id == old.id]
        assert any_database.write(lambda c, row=old, to=state: ca_records.change_ca_states(c, {row: to}, 300.0))
    assert states(any_database) == {old.id: CaState.GONE, new: CaState.CURRENT}
    third = begin(any_database, now=400.0)
    assert states(any_database) == {old.id: CaState.GONE, new: CaState.CURRENT, third: CaState.NEXT}, (
        "the next rotation uses no files"
    )
    by_id = {row.id: row for row in any_database.read(ca_records.list_cas)}
    steps = {by_id[third]: CaState.CURRENT, by_id[new]: CaState.GONE}
    assert any_database.write(lambda c: ca_records.change_ca_states(c, steps, 500.0))
    keys = any_database.read(
        lambda c: c.execute(sa.select(certificate_authority.c.id, certificate_authority.c.sealed_key)).all()
    )
    assert {row.id: row.sealed_key is None for row in keys} == {old.id: True, new: True, third: False}


def test_each_ca_kind_rotates_independently(any_database):
    first, second = begin(any_database, CaKind.AMPHORA), begin(any_database, CaKind.CONTROLLER)
    found = any_database.read(ca_records.list_cas)
    assert {(one.kind, one.state) for one in found} == {
        (kind, state) for kind in CaKind for state in (CaState.CURRENT, CaState.NEXT)
    }
    assert first != second


def test_the_expiry_of_each_ca(database):
    assert database.read(lambda c: ca_records.read_certificate_expiries(c, 0.0)) == ca_records.CertificateExpiries(
        authorities=(), amphorae=None, expired=0
    )
    new = begin(database)
    for number, end in ((1, 300.0), (2, 200.0), (3, None)):
        record(database, number, certificate_expires_at=end)
    found = database.read(lambda c: ca_records.read_certificate_expiries(c, 250.0))
    assert found.authorities == (("amphora", "current", new - 1, 5000.0), ("amphora", "next", new, 9000.0))
    assert (found.amphorae, found.expired) == (200.0, 1)


def test_only_idle_load_balancers_are_made_due(database):
    def put(connection):
        for name, more in {"quiet": {}, "failing": {"dirty": True}, "owned": {"owner": "me"}}.items():
            row = {"load_balancer_id": name, "op": "apply", "generation": 1, "dirty": False, "due_at": 7.0, **more}
            connection.execute(job.insert().values(**row))

    database.write(put)
    names = ["quiet", "failing", "owned", "unknown"]
    assert database.write(lambda c: ca_records.make_load_balancers_due(c, names, 50.0)) == 1
    rows = database.read(lambda c: c.execute(sa.select(job)).all())
    assert {row.load_balancer_id: (row.dirty, row.due_at) for row in rows} == {
        "quiet": (True, 50.0),
        "failing": (True, 7.0),
        "owned": (False, 7.0),
    }
