# SPDX-License-Identifier: Apache-2.0
"""Withdrawn confirmations, and generations above a foreign generation."""

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, job
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.store import amphorae, config_drift
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def database(any_database):
    """Each database, because MariaDB evaluates assignments from other columns differently."""
    return any_database


@pytest.fixture
def served(database):
    """A load balancer whose two amphorae have confirmed generation 3."""
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)

    def write(connection):
        for one in ("a", "b"):
            amphorae.insert_amphora(connection, one, "lb", "STANDALONE", b"")
            amphorae.update_amphora(connection, one, state="ready", confirmed=3, confirmed_at=50.0)
        connection.execute(
            job.update().values(generation=3, committed=3, applied=3, dirty=False, owner=None, due_at=900.0)
        )

    database.write(write)
    return database


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def of(database, one):
    return database.read(lambda c: c.execute(sa.select(amphora).where(amphora.c.id == one)).one())


def test_drift_makes_a_load_balancer_due_once(served):
    assert served.write(lambda c: config_drift.revoke_confirmation(c, "a", 3, "files")) is True
    assert (of(served, "a").confirmed, of(served, "a").drift, of(served, "b").confirmed) == (2, "files", 3)
    assert (of(served, "a").drifts, of(served, "b").drifts) == (True, False)
    assert (row(served).dirty, row(served).due_at, row(served).generation) == (True, 0.0, 3)
    assert served.write(lambda c: config_drift.revoke_confirmation(c, "a", 3, "again")) is False, (
        "the confirmed generation has changed"
    )
    served.write(lambda c: amphorae.update_amphora(c, "b", state="retiring"))
    assert served.write(lambda c: config_drift.revoke_confirmation(c, "b", 3, "late")) is False


def test_ports_are_forgotten_only_if_an_interface_is_missing(served):
    served.write(lambda c: c.execute(amphora.update().values(plugged="[]")))
    served.write(lambda c: config_drift.revoke_confirmation(c, "a", 3, "files"))
    served.write(lambda c: config_drift.revoke_confirmation(c, "b", 3, "interface", replug=True))
    assert (of(served, "a").plugged, of(served, "b").plugged) == ("[]", None)


def test_an_operator_revokes_all_confirmations_of_a_load_balancer(served):
    assert served.write(lambda c: config_drift.revoke_all_confirmations(c, "lb", "operator")) == ["a", "b"]
    assert row(served).dirty


@pytest.mark.parametrize(("beyond", "committed", "after"), [(8, 3, (9, 9)), (1, 3, (4, 4)), (8, 2, (9, 2))])
def test_the_generation_advances_beyond_a_foreign_one(served, beyond, committed, after):
    served.write(lambda c: c.execute(job.update().values(committed=committed)))
    assert served.write(lambda c: config_drift.advance_generation_beyond(c, "lb", 3, beyond)) is True
    assert (row(served).generation, row(served).committed) == after
    assert row(served).dirty
    assert served.write(lambda c: config_drift.advance_generation_beyond(c, "lb", 3, beyond)) is False, (
        "a job is pending"
    )


def test_the_order_of_audits(served):
    def candidates(before, limit=10):
        return [one.amphora_id for one in served.read(lambda c: config_drift.list_audit_candidates(c, before, limit))]

    assert served.read(config_drift.count_auditable) == 2
    assert candidates(40.0) == [], "the confirmations are recent"
    assert candidates(60.0) == ["a", "b"]
    served.write(lambda c: config_drift.record_audit(c, ["a"], 55.0, "renderer"))
    assert (of(served, "a").drift, of(served, "a").drifts) == ("renderer", True)
    assert candidates(60.0) == ["b", "a"]
    assert candidates(60.0, 1) == ["b"]
    served.write(lambda c: config_drift.record_audit(c, ["a"], 70.0))
    assert (of(served, "a").drift, candidates(60.0)) == ("renderer", ["b"])
    assert of(served, "a").drifts is False, "no drift now; the last finding stays as history"
    served.write(lambda c: c.execute(job.update().values(dirty=True)))
    assert candidates(60.0) == [], "a job is pending"


def test_a_recorded_drift_is_not_new(served):
    first, later = "2001-09-09 01:46:40 UTC, mended: 100% of _it", "2001-09-09 01:47:10 UTC, mended: it"
    assert served.write(lambda c: config_drift.record_agent_finding(c, "a", first, first[:23])) is True
    assert (
        served.write(lambda c: config_drift.record_agent_finding(c, "a", "the same in other words", first[:23]))
        is False
    )
    assert (of(served, "a").drift, of(served, "a").drifts) == (first, False)
    assert served.write(lambda c: config_drift.record_agent_finding(c, "a", later, later[:23])) is True
    assert of(served, "a").drift == later


def test_drift_marks_are_set_and_removed(served):
    served.write(lambda c: config_drift.set_drifting(c, {"b": True, "a": True}))
    assert (of(served, "a").drifts, of(served, "b").drifts) == (True, True)
    serving = served.read(lambda c: amphorae.load_serving_states(c, ["a"]))["lb"]
    assert serving.drifting == {"a", "b"}
    served.write(lambda c: config_drift.set_drifting(c, {"b": False}))
    assert (of(served, "a").drifts, of(served, "b").drifts) == (True, False)


@pytest.mark.parametrize(
    "does",
    [
        lambda c: config_drift.revoke_confirmation(c, "a", 3, "files"),
        lambda c: config_drift.revoke_all_confirmations(c, "lb", "operator"),
        lambda c: config_drift.lock_work_of_amphorae(c, ["b", "a"]),
    ],
)
def test_a_drift_mark_locks_the_job_row_before_the_amphora_row(served, does):
    """Every step uses this order: two transactions with different orders would be a deadlock."""
    said = []

    def listened(connection):
        sa.event.listen(connection, "before_cursor_execute", lambda *words: said.append(words[2]))
        does(connection)

    served.write(listened)
    if served.engine.dialect.name != "sqlite":
        # SQLite has one writer at a time and no row locks.
        locks = [index for index, words in enumerate(said) if "FOR UPDATE" in words and "FROM job" in words]
        assert locks
        assert all(index > locks[0] for index, words in enumerate(said) if words.startswith("UPDATE amphora"))
    reads = [index for index, words in enumerate(said) if "FROM job" in words]
    assert reads
    assert all(index > reads[0] for index, words in enumerate(said) if words.startswith("UPDATE"))
