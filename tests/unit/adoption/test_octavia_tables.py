# SPDX-License-Identifier: Apache-2.0
"""Reads and the two transactions on Octavia's real schema."""

import datetime as dt
import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from unit.adoption import octavia_rows
from unit.adoption.octavia_rows import AMPHORAE, LB, LISTENER, MEMBER, PORTS, VIP_PORT, read, set_status, write

from amphora_driver.adoption import octavia_tables
from amphora_driver.adoption.octavia_state import OctaviaState
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.errors import ConfigurationError, Conflict, StoreError

OURS = "haproxy"


@pytest.fixture
def engine(tmp_path):
    made = octavia_rows.write_database(tmp_path / "octavia.sqlite", pair=True)
    yield made
    made.dispose()


@pytest.fixture
def octavia(engine):
    return OctaviaDatabase(str(engine.url))


def locked(octavia, engine):
    """The recorded state of the load balancer, which is locked afterwards."""
    before = msgspec.json.decode(msgspec.json.encode(octavia.read(LB)), type=OctaviaState)
    set_status(engine, "PENDING_UPDATE")
    return before


def test_a_load_balancer_is_read_with_its_amphorae(octavia):
    found = octavia.read(LB)
    assert (found.provider, found.status, found.topology) == ("amphora", "ACTIVE", "ACTIVE_STANDBY")
    assert [(one.id, one.port_id, one.status) for one in found.amphorae] == [
        (one, PORTS[one], "ALLOCATED") for one in AMPHORAE
    ]
    assert (found.vip_port_id, found.vip_owned, found.vnic_types) == (VIP_PORT, True, {"normal"})
    assert found.member_ports == ("member-0", "member-1")
    assert found.unsettled == {}
    assert octavia.read("unknown") is None


@pytest.mark.parametrize(("value", "owned"), [("NULL", None), ("0", False), ("1", True)])
def test_the_owner_of_the_vip_port_can_be_unknown(octavia, engine, value, owned):
    write(engine, f"UPDATE vip SET octavia_owned = {value} WHERE load_balancer_id = '{LB}'")
    assert octavia.read(LB).vip_owned is owned


def test_a_deleted_load_balancer_is_unknown(octavia, engine):
    set_status(engine, "DELETED")
    assert octavia.read(LB) is None


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        (f"UPDATE member SET weight = 7 WHERE id = '{MEMBER}'", True),
        (f"UPDATE listener SET insert_headers = x'00' WHERE id = '{LISTENER}'", True),
        (f"INSERT INTO listener_cidr (listener_id, cidr) VALUES ('{LISTENER}', '192.0.2.0/24')", True),
        (f"UPDATE vip SET qos_policy_id = 'q' WHERE load_balancer_id = '{LB}'", True),
        (f"UPDATE load_balancer SET name = 'other' WHERE id = '{LB}'", True),
        (f"UPDATE member SET operating_status = 'ERROR', updated_at = '2026-02-02' WHERE id = '{MEMBER}'", False),
        (f"UPDATE load_balancer SET operating_status = 'DEGRADED' WHERE id = '{LB}'", False),
        (f"UPDATE listener SET provisioning_status = 'PENDING_UPDATE' WHERE id = '{LISTENER}'", False),
    ],
)
def test_the_fingerprint_follows_the_configuration_only(octavia, engine, statement, changes):
    before = octavia.read(LB).fingerprint
    write(engine, statement)
    assert (octavia.read(LB).fingerprint != before) is changes


def test_load_balancers_are_found_by_project_and_tag(octavia, engine):
    write(engine, f"INSERT INTO tags (resource_id, tag) VALUES ('{LB}', 'wave-1')")
    assert octavia.find(project_id="demo") == octavia.find(tag="wave-1") == [LB]
    assert octavia.find(project_id="other") == octavia.find(tag="wave-2") == []
    write(engine, f"UPDATE load_balancer SET provider = NULL WHERE id = '{LB}'")
    assert octavia.find(project_id="demo") == [LB]
    write(engine, f"UPDATE load_balancer SET provider = 'ovn' WHERE id = '{LB}'")
    assert octavia.find(project_id="demo") == []


def test_a_tag_in_another_spelling_selects_nothing(octavia, engine):
    """As in MySQL and MariaDB, the columns ignore upper and lower case."""
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE tags")
        columns = "resource_id VARCHAR(36), tag VARCHAR(255) COLLATE NOCASE"
        connection.exec_driver_sql(f"CREATE TABLE tags ({columns})")
    write(engine, f"INSERT INTO tags (resource_id, tag) VALUES ('{LB}', 'wave-1')")
    assert read(engine, "SELECT tag FROM tags WHERE tag = 'Wave-1'") == [("wave-1",)]
    assert octavia.find(tag="wave-1") == [LB]
    assert octavia.find(tag="Wave-1") == []


def test_the_take_over_leaves_no_row_of_an_amphora(octavia, engine):
    before = locked(octavia, engine)
    for _ in range(2):
        octavia.take_over(before, OURS)
        assert read(engine, "SELECT provider, provisioning_status, server_group_id FROM load_balancer") == [
            (OURS, "PENDING_UPDATE", None)
        ]
        for table in ("amphora", "amphora_health", "amphora_member_port"):
            assert read(engine, f"SELECT * FROM {table}") == []
    assert octavia.read(LB).fingerprint == before.fingerprint


def test_octavias_health_manager_touches_no_former_amphora(engine):
    """Octavia's own code replaces a stale amphora, and deletes the machine of a row with the status DELETED."""
    program = Path(__file__).with_name("octavia_health.py")
    command = [sys.executable, str(program), str(engine.url), LB]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    before, with_status, afterwards, inserted = json.loads(said.stdout.splitlines()[-1])
    assert before["stale"] in AMPHORAE
    assert with_status["deleted"] == ["server-1"]
    assert afterwards == {"stale": None, "deleted": []}
    # A row that appears between the two reads for a heartbeat has no machine yet.
    assert inserted == {"stale": None, "deleted": [None]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"UPDATE load_balancer SET provisioning_status = 'ACTIVE' WHERE id = '{LB}'", "the lock is lost"),
        (f"UPDATE load_balancer SET provider = 'ovn' WHERE id = '{LB}'", "its provider is ovn"),
        (f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'", "its configuration has changed"),
        (f"UPDATE member SET provisioning_status = 'PENDING_UPDATE' WHERE id = '{MEMBER}'", "is in progress"),
        (f"UPDATE amphora SET vrrp_port_id = 'other' WHERE id = '{AMPHORAE[0]}'", "its amphorae have changed"),
        (f"UPDATE amphora SET status = 'DELETED' WHERE id = '{AMPHORAE[0]}'", "its amphorae have changed"),
        (f"UPDATE load_balancer SET provisioning_status = 'DELETED' WHERE id = '{LB}'", "does not know it"),
    ],
)
def test_a_changed_load_balancer_is_not_taken_over(octavia, engine, change, said):
    before = locked(octavia, engine)
    write(engine, change)
    kept = octavia_rows.rows(engine)
    with pytest.raises(Conflict, match=said):
        octavia.take_over(before, OURS)
    assert octavia_rows.rows(engine) == kept


def test_statuses_of_heartbeats_do_not_prevent_the_take_over(octavia, engine):
    before = locked(octavia, engine)
    write(engine, f"UPDATE member SET operating_status = 'ERROR', updated_at = '2026-03-03' WHERE id = '{MEMBER}'")
    write(engine, f"UPDATE amphora_health SET last_update = '2026-03-03' WHERE amphora_id = '{AMPHORAE[0]}'")
    octavia.take_over(before, OURS)
    assert read(engine, "SELECT provider FROM load_balancer") == [(OURS,)]


def test_the_return_restores_every_row(octavia, engine):
    original = octavia_rows.rows(engine)
    before = locked(octavia, engine)
    octavia.take_over(before, OURS)
    for _ in range(2):
        octavia.insert_amphorae(before, OURS)
    for _ in range(2):
        octavia.give_back(before, OURS)
    set_status(engine, "ACTIVE")
    assert octavia_rows.rows(engine) == original
    now = dt.datetime.now(dt.timezone.utc).replace(tzinfo=None)
    for (said,) in read(engine, "SELECT last_update FROM amphora_health"):
        assert abs(now - dt.datetime.fromisoformat(said)) < dt.timedelta(minutes=1)


def test_a_row_of_a_late_heartbeat_does_not_prevent_the_return(octavia, engine):
    before = locked(octavia, engine)
    octavia.take_over(before, OURS)
    write(engine, f"INSERT INTO amphora_health VALUES ('{AMPHORAE[0]}', '2026-01-01', 1)")
    octavia.insert_amphorae(before, OURS)
    octavia.give_back(before, OURS)
    assert read(engine, "SELECT busy FROM amphora_health") == [(0,), (0,)]


def test_a_load_balancer_that_changed_afterwards_is_not_given_back(octavia, engine):
    before = locked(octavia, engine)
    octavia.take_over(before, OURS)
    write(engine, f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'")
    kept = octavia_rows.rows(engine)
    for change in (octavia.insert_amphorae, octavia.give_back):
        with pytest.raises(Conflict, match="its configuration has changed"):
            change(before, OURS)
    assert octavia_rows.rows(engine) == kept


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'", "its configuration has changed"),
        (f"UPDATE amphora SET vrrp_port_id = 'other' WHERE id = '{AMPHORAE[0]}'", "its amphorae have changed"),
        (f"DELETE FROM amphora_member_port WHERE amphora_id = '{AMPHORAE[0]}'", "its amphorae have changed"),
        (f"UPDATE load_balancer SET provisioning_status = 'DELETED' WHERE id = '{LB}'", "does not know it"),
    ],
)
def test_inserted_amphorae_are_removed_after_a_change(octavia, engine, change, said):
    before = locked(octavia, engine)
    octavia.take_over(before, OURS)
    octavia.insert_amphorae(before, OURS)
    write(engine, f"INSERT INTO amphora_health VALUES ('{AMPHORAE[0]}', '2026-01-01', 1)")
    write(engine, change)
    with pytest.raises(Conflict, match=said):
        octavia.insert_amphorae(before, OURS)
    for _ in range(2):
        octavia.remove_inserted(before, OURS)
        for table in ("amphora", "amphora_health", "amphora_member_port"):
            assert read(engine, f"SELECT * FROM {table}") == []


def test_only_inserted_amphorae_are_removed(octavia, engine):
    before = locked(octavia, engine)
    octavia.take_over(before, OURS)
    octavia.insert_amphorae(before, OURS)
    write(engine, f"UPDATE amphora SET compute_id = 'server' WHERE id = '{AMPHORAE[1]}'")
    kept = octavia_rows.rows(engine)
    octavia.remove_inserted(before, "another")
    assert octavia_rows.rows(engine) == kept
    octavia.remove_inserted(before, OURS)
    assert read(engine, "SELECT id FROM amphora") == [(AMPHORAE[1],)]
    assert read(engine, "SELECT amphora_id FROM amphora_member_port") == [(AMPHORAE[1],)]


def test_a_server_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(octavia_tables, "_ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mysql+pymysql://u:p@127.0.0.1:{silent.getsockname()[1]}/octavia"
        with pytest.raises(StoreError, match="timed out"):
            OctaviaDatabase(url).read(LB)


def test_another_database_is_refused_by_its_missing_tables(tmp_path):
    with pytest.raises(ConfigurationError, match=r"it has no .*amphora"):
        OctaviaDatabase(f"sqlite:///{tmp_path}/empty.sqlite").read(LB)
    with pytest.raises(ConfigurationError, match="octavia_connection"):
        OctaviaDatabase("").read(LB)
