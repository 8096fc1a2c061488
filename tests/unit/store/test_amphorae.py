# SPDX-License-Identifier: Apache-2.0
"""Rows of amphorae with their load balancer, and bulk writes of heartbeats."""

import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora_heartbeat, job
from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort, Partner
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.store import amphorae
from amphora_driver.store.amphorae import LastHeartbeat


@pytest.fixture
def database(any_database):
    return any_database


def record(database, *amphora_ids, load_balancer_id="lb"):
    for amphora_id in amphora_ids:
        database.write(
            lambda c, one=amphora_id: amphorae.insert_amphora(c, one, load_balancer_id, "standalone", b"key")
        )


def heard(amphora_id, epoch, sequence, at=1000.0):
    return LastHeartbeat(amphora_id=amphora_id, seen_at=at, generation=sequence, epoch=epoch, sequence=sequence)


def seen(database, *reports):
    database.write(lambda c: amphorae.record_heartbeats(c, reports))
    return database.read(amphorae.last_heartbeats)


def test_the_later_heartbeat_stays(database):
    record(database, "a", "b")
    assert seen(database, heard("b", 1, 5), heard("a", 1, 9)) == {"a": (1, 9), "b": (1, 5)}
    assert seen(database, heard("a", 1, 8), heard("b", 2, 1)) == {"a": (1, 9), "b": (2, 1)}
    assert seen(database, heard("b", 1, 99)) == {"a": (1, 9), "b": (2, 1)}
    assert database.read(lambda c: amphorae.last_heartbeats(c, ["a", "unknown"])) == {"a": (1, 9)}


def test_real_epochs_fit(database):
    record(database, "a")
    largest = 2**63 - 1
    assert seen(database, heard("a", 1_900_000_000_000_000_000, largest)) == {"a": (1_900_000_000_000_000_000, largest)}


def test_latest_report_names_the_vip_holder(database):
    record(database, "a", "b")
    for sequence, said in enumerate((True, False, None, True)):
        at = msgspec.structs.replace(heard("a", 1, sequence, at=1000.5 + sequence), holds_vip=said)
        seen(database, at, heard("b", 1, sequence))
        one, other = database.read(lambda c: amphorae.load_amphorae(c, "lb"))
        assert (one.holds_vip, one.heard_at) == (said, 1000.5 + sequence)
        assert other.holds_vip is None
    seen(database, msgspec.structs.replace(heard("a", 1, 0), holds_vip=False))
    assert database.read(lambda c: amphorae.load_amphorae(c, "lb"))[0].holds_vip, "a late heartbeat does not count"


def test_the_remaining_drain_time(database):
    record(database, "a")
    assert database.read(lambda c: amphorae.load_amphorae(c, "lb"))[0].drains_until is None
    until = 1795291234.123456
    database.write(lambda c: amphorae.update_amphora(c, "a", handed_over=True, drains_until=until))
    one = database.read(lambda c: amphorae.load_amphorae(c, "lb"))[0]
    assert (one.handed_over, one.drains_until) == (True, until)


def test_all_columns_of_a_job_and_its_amphorae_arrive_unchanged(database):
    port = Port(
        id="p", network_id="n", mac="fa:16:3e:00:00:01", mtu=1500,
        addresses=(FixedAddress(subnet_id="s", address="2001:db8::1"),),
    )  # fmt: skip
    subnet = Subnet(id="s", network_id="n", cidr="2001:db8::/64", gateway=None)
    plugged = AttachedPort(port=port, subnets=(subnet,), sr_iov=True)
    values = {
        "compute_id": 'quotes " and \\', "management_address": "192.0.2.1", "confirmed": 2**53 + 1,
        "plugged": (plugged,), "booted_at": 1795291234.123456, "confirmed_at": -0.5,
        "partners": (Partner(id="b", address="203.0.113.1"),), "handed_over": True, "drains_until": 1e300,
        "certificate_issued_at": 1795291234.000001, "certificate_expires_at": 0.0, "certificate_authority": 2**62,
        "trusts": "[1],[2]", "host": "null", "zone": "é 漢",
    }  # fmt: skip
    with_job = {"load_balancer_id": "lb", "op": "apply", "generation": 2**62, "owner": "me", "epoch": 7, "due_at": -1.0}
    database.write(lambda c: c.execute(job.insert().values(**with_job, omitted='{"a": "\\n"}')))
    assert database.read(lambda c: amphorae.load_with_work(c, "lb"))[1] == ()
    record(database, "a")
    database.write(lambda c: amphorae.update_amphora(c, "a", state="ready", **values))
    seen(database, msgspec.structs.replace(heard("a", 1, 1, at=1795291234.654321), holds_vip=False))
    row, found = database.read(lambda c: amphorae.load_with_work(c, "lb"))
    expected = Amphora(
        id="a", load_balancer_id="lb", role="standalone", state=AmphoraState.READY, **values,
        heard_at=1795291234.654321, holds_vip=False,
    )  # fmt: skip
    assert found == database.read(lambda c: amphorae.load_amphorae(c, "lb")) == (expected,)
    assert {name: getattr(row, name) for name in with_job} == with_job
    assert (row.topology, row.applied, row.omitted, row.tickets) == ("SINGLE", 0, '{"a": "\\n"}', None)
    assert (row.read_back, row.replacing, row.vips_held, row.takes_vips) == (False,) * 4
    assert database.read(lambda c: amphorae.load_with_work(c, "another")) == (None, ())


def test_a_removed_amphora_leaves_no_row(database):
    record(database, "a")
    assert seen(database, heard("a", 1, 1), heard("gone", 1, 1)) == {"a": (1, 1)}
    database.write(lambda c: amphorae.delete_amphora(c, "a"))
    assert seen(database, heard("a", 1, 2)) == {}


def test_two_health_managers_insert_the_first_heartbeat_at_once(database, monkeypatch):
    record(database, "a")
    seen(database, heard("a", 1, 5))
    # The second health manager has read the rows before the first one's commit.
    nothing = sa.select(amphora_heartbeat.c.amphora_id).where(sa.false()).scalar_subquery()
    stale = sa.select(sa.literal("a").label("id"), nothing.label("amphora_id")).where(
        sa.literal("a").in_(sa.bindparam("ids", expanding=True))
    )
    monkeypatch.setattr(amphorae, "_WITH_HEARTBEAT", stale)
    assert seen(database, heard("a", 1, 4)) == {"a": (1, 5)}
    assert seen(database, heard("a", 1, 6)) == {"a": (1, 6)}


def test_many_heartbeats_are_written_at_once(database):
    names = [f"a{number:04}" for number in range(1100)]

    def write(connection):
        for name in names:
            amphorae.insert_amphora(connection, name, f"lb{name[:3]}", "standalone", b"key")
        for load_balancer_id in {f"lb{name[:3]}" for name in names}:
            connection.execute(job.insert().values(load_balancer_id=load_balancer_id, op="apply", generation=3))

    database.write(write)
    assert len(seen(database, *(heard(name, 1, 1) for name in names))) == 1100
    found = database.read(lambda c: amphorae.load_serving_states(c, names))
    assert sum(len(one.amphorae) for one in found.values()) == 1100
    assert {one.generation for one in found.values()} == {3}
