# SPDX-License-Identifier: Apache-2.0
"""`amphora failover`, `loadbalancer failover` and `spare list`, with explanations for the operator."""

import json
import time

import migrated
import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import URGENT, amphora, job
from amphora_driver.database.tables_fleet import failover
from amphora_driver.store import failovers, spare_pools
from amphora_driver.store.spare_pools import SparePoolSpec

LB, GONE, FRESH = (f"52cf0000-0000-4000-8000-00000000000{number}" for number in range(3))
FIRST, SECOND, LAST, SPARE = (f"0b9d1c52-7f0e-4a55-9f0c-00000000000{number}" for number in range(4))
SPEC = SparePoolSpec(number=2, compute="netns", network="local", compute_flavor="big")


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url)
    database.write(_fill)
    yield database
    database.dispose()


@pytest.fixture
def said(tmp_path, database, amphoractl):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {database.engine.url}\n[amp_queue]\nsocket_dir = {tmp_path}/bells\n",
        encoding="utf-8",
    )
    return lambda *words: amphoractl(path, *words)


def _fill(connection):
    for name, op in ((LB, "apply"), (GONE, "delete"), (FRESH, "apply"), (SPEC.id, spare_pools.OP)):
        connection.execute(
            job.insert().values(
                load_balancer_id=name,
                op=op,
                generation=3,
                dirty=False,
                spare_pool=SPEC.id if name == LB else None,
                spares=msgspec.json.encode(SPEC).decode() if op == spare_pools.OP else None,
            )
        )
    for name, of, role in (
        (FIRST, LB, "MASTER"),
        (SECOND, LB, "BACKUP"),
        (LAST, GONE, "STANDALONE"),
        (SPARE, SPEC.id, spare_pools.ROLE),
    ):
        row = {"id": name, "load_balancer_id": of, "role": role, "state": "ready", "heartbeat_key": b"", "image": "one"}
        connection.execute(amphora.insert().values(**row, created_at=time.time()))


def rows(database, table):
    return database.read(lambda c: c.execute(sa.select(table)).all())


def states(database):
    return {row.id: row.state for row in rows(database, amphora)}


def test_amphora_failover_retires_the_amphora(said, database):
    status, out, err = said("amphora", "failover", SECOND[:-1] + "1", "--reason", "its disk is old")
    assert (status, err) == (0, "")
    assert f"Amphora {SECOND} is to be replaced" in out
    (row,) = rows(database, failover)
    assert f"amphoractl failover show {row.id}" in out
    assert (row.cause, row.reason, row.amphora_id) == ("operator", "its disk is old", SECOND)
    assert row.asked_by
    assert states(database)[SECOND] == "retiring"
    assert states(database)[FIRST] == "ready"
    owner = next(one for one in rows(database, job) if one.load_balancer_id == LB)
    assert (owner.dirty, owner.due_at, owner.generation) == (True, URGENT, 3), (
        "no new generation, and no object is PENDING"
    )


def test_loadbalancer_failover_retires_all_amphorae(said, database):
    status, out, _ = said("loadbalancer", "failover", LB)
    assert status == 0
    assert "2 amphorae" in out
    assert "one at a time" in out
    assert len(rows(database, failover)) == 2
    assert states(database)[LAST] == "ready"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("amphora", "failover", SPARE), "it is a warm spare"),
        (("amphora", "failover", LAST), "it is being deleted"),
        (("amphora", "failover", "nobody"), "nothing is recorded"),
        (("loadbalancer", "failover", GONE), "it is being deleted"),
        (("loadbalancer", "failover", FRESH), "it has no amphora yet"),
        (("loadbalancer", "failover", SPEC.id), "nothing is recorded"),
    ],
    ids=["a spare", "deleted", "unknown", "load balancer deleted", "no amphora", "a pool"],
)
def test_a_refused_request_states_the_cause(said, database, words, reason):
    status, _, err = said(*words)
    assert status != 0
    assert reason.removeprefix("it ") in err
    assert rows(database, failover) == []


def test_a_second_replacement_is_refused_with_its_cause(said, database):
    why = failovers.FailoverTrigger(cause=failovers.Cause.SILENT, reason="not heard for 10 s")
    database.write(lambda c: failovers.open_failovers(c, LB, None, why, time.time() - 30))
    for words in (("amphora", "failover", FIRST), ("loadbalancer", "failover", LB)):
        status, _, err = said(*words)
        assert status != 0
        assert "being replaced already (fail-over 1, begun 3" in err
        assert "silent: not heard for 10 s" in err
    assert len(rows(database, failover)) == 2


def test_spares_are_listed_by_pool(said):
    status, out, _ = said("spare", "list", "-f", "json")
    assert status == 0
    (pool,) = json.loads(out)
    assert pool["Pool"] == SPEC.id
    assert (pool["Wanted"], pool["Ready"], pool["Booting"], pool["Load balancers"]) == (2, 1, 0, 1)
    assert (pool["Flavor"], pool["Images"]) == ("big", {"one": 1})
