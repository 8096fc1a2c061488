# SPDX-License-Identifier: Apache-2.0
"""`amphoractl loadbalancer resize`: output, metadata from a file, dry run and refusals."""

import json
import time

import migrated
import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.database.tables_fleet import failover
from amphora_driver.model.loadbalancer import LoadBalancer, Profile, Vip
from amphora_driver.store.requests import RequestRecorder

LB, OLD = (f"52cf0000-0000-4000-8000-00000000000{number}" for number in range(2))
PAIR = json.dumps({"loadbalancer_topology": "ACTIVE_STANDBY", "compute_flavor": "large"})
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url)
    profile = Profile(compute="netns", network="local", compute_flavor="small")
    tree = LoadBalancer(id=LB, project_id="demo", vip=VIP, profile=profile)
    RequestRecorder(database, lambda node: None).create_load_balancer(tree, read_back=False)
    row = {"id": OLD, "load_balancer_id": LB, "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}

    def serve(connection):
        connection.execute(job.update().values(applied=1, committed=1))
        connection.execute(amphora.insert().values(**row, created_at=time.time(), confirmed=1))

    database.write(serve)
    yield database
    database.dispose()


@pytest.fixture
def resize(tmp_path, database, amphoractl):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {database.engine.url}\n[amp_queue]\nsocket_dir = {tmp_path}/bells\n",
        encoding="utf-8",
    )
    return lambda *words: amphoractl(path, "loadbalancer", "resize", *words)


def topology(database):
    return database.read(lambda c: c.execute(sa.select(job.c.topology)).scalar_one())


def test_a_resize_shows_old_and_new_values(resize, database):
    status, out, err = resize(LB[:-1], "--flavor", PAIR, "--reason", "more traffic")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"Load balancer {LB}:",
        "  topology: SINGLE -> ACTIVE_STANDBY",
        "  compute_flavor: small -> large",
        f"Amphorae to be replaced: {OLD}.",
        "Octavia continues to show the original flavor and availability zone.",
        f"Follow it with: amphoractl loadbalancer history {LB}",
    ]
    assert topology(database) == "ACTIVE_STANDBY"
    (row,) = database.read(lambda c: c.execute(sa.select(failover)).all())
    assert (row.cause, row.reason) == ("resize", "more traffic")
    assert row.asked_by


def test_metadata_come_from_a_file(resize, database, tmp_path):
    path = tmp_path / "flavor.json"
    path.write_text(PAIR, encoding="utf-8")
    status, _, err = resize(LB, "--flavor", f"@{path}")
    assert (status, err) == (0, "")
    assert topology(database) == "ACTIVE_STANDBY"


def test_a_dry_run_records_nothing(resize, database):
    status, out, err = resize(LB, "--flavor", PAIR, "--dry-run")
    assert (status, err) == (0, "")
    assert "  topology: SINGLE -> ACTIVE_STANDBY\n" in out
    assert out.endswith("Nothing is recorded (--dry-run).\n")
    assert topology(database) == "SINGLE"
    assert database.read(lambda c: c.execute(sa.select(amphora.c.state)).scalar_one()) == "ready"


def test_a_new_configuration_replaces_no_amphora(resize, database):
    status, out, _ = resize(LB, "--flavor", '{"compute_flavor": "small", "timeout_tunnel": 60000}')
    assert status == 0
    assert "  timeout_tunnel: as configured -> 60000\n" in out
    assert "No amphora is replaced" in out
    assert database.read(lambda c: c.execute(sa.select(failover)).all()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "neither --flavor nor --availability-zone"),
        (("--flavor", "{"), "no JSON object"),
        (("--flavor", "[]"), "no JSON object"),
        (("--flavor", "@/does/not/exist"), "the file cannot be read"),
        (("--flavor", '{"compute_driver": "qemu"}'), "keeps it for its lifetime"),
        (("--flavor", '{"unknown": 1}'), "this key is unknown"),
        (("--availability-zone", '{"valid_vip_networks": ["n2"]}'), "valid_vip_networks"),
        (("--flavor", '{"compute_flavor": "small"}'), "these values already"),
    ],
    ids=["nothing", "no JSON", "a list", "no file", "backend", "key", "VIPs", "no change"],
)
def test_a_refusal_states_the_reason(resize, database, words, reason):
    status, out, err = resize(LB, *words)
    assert status != 0
    assert out == ""
    assert reason in err
    assert topology(database) == "SINGLE"


def test_an_unknown_load_balancer_is_refused(resize):
    status, _, err = resize("ffff", "--flavor", PAIR)
    assert status != 0
    assert "nothing is recorded" in err
