# SPDX-License-Identifier: Apache-2.0
"""Rounds of the drift audit: one failing amphora does not stop the audit of the others, and rounds end in time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import sqlalchemy as sa
from control import TREE, FakeCloud, controlled

from amphora_driver.agent.client import BundleState
from amphora_driver.database.tables import amphora, duty, job
from amphora_driver.errors import AgentUnreachable, StoreError
from amphora_driver.maintenance import drift_audit
from amphora_driver.maintenance.drift_audit import DUTY, DriftAuditor
from amphora_driver.queue.jobs import acquire_duty
from amphora_driver.topology import SingleTopology

MANY = 6


class RecordedAgents(FakeCloud):
    """One amphora for each load balancer; a test sets the bundle state that each reports."""

    roles = SingleTopology.roles
    priorities = SingleTopology.priorities

    def __init__(self):
        super().__init__()
        self.says = {}
        self.asked = []
        self.lock = threading.Lock()

    def bundle_state(self, amphora_id, _address, *, deadline):
        assert deadline.left() <= 5
        with self.lock:
            self.asked.append(amphora_id)
        said = self.says.get(amphora_id, BundleState(generation=1, digest="d"))
        if callable(said):
            said = said()
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def control(tmp_path):
    with controlled(tmp_path, RecordedAgents()) as made:
        for number in range(MANY):
            listeners = tuple(
                msgspec.structs.replace(one, id=f"li{number}", loadbalancer_id=f"lb{number}") for one in TREE.listeners
            )
            vip = msgspec.structs.replace(TREE.vip, address=f"198.51.100.{number + 1}", port_id=f"p{number}")
            tree = msgspec.structs.replace(TREE, id=f"lb{number}", vip=vip, listeners=listeners)
            made.recorder.create_load_balancer(tree, read_back=False)
        made.work(100)
        made.database.write(lambda c: c.execute(amphora.update().values(confirmed_at=1.0)))
        yield made


@pytest.fixture
def audits(control, monkeypatch):
    """An auditor for which all load balancers are due in each round."""
    monkeypatch.setattr(
        drift_audit.DriftAuditor, "_expected_digests", lambda _, recorded: {one.id: "d" for one in recorded.amphorae}
    )
    control.conf.set_override("interval", 1.0, "amp_drift")
    made = DriftAuditor(control.reconciler._context, "me", lambda: None)
    made._most, made._round = 4, 1.0
    yield made
    control.conf.clear_override("interval", "amp_drift")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def rows(control):
    query = sa.select(amphora.c.load_balancer_id, amphora.c.id, amphora.c.audited_at, amphora.c.drift, job)
    query = query.join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
    return {row.load_balancer_id: row for row in control.database.read(lambda c: c.execute(query).all())}


def one_of(control, load_balancer_id="lb0"):
    return rows(control)[load_balancer_id].id


def compared(control):
    return {one for one, row in rows(control).items() if row.audited_at is not None}


@pytest.mark.parametrize(
    "says",
    [
        AgentUnreachable("ask", "away"),
        StoreError("read the authorities", "away"),
        RuntimeError("unexpected"),
    ],
)
def test_unreachable_amphora_stops_no_round(control, audits, pool, says):
    one = one_of(control)
    control.cloud.says[one] = says
    assert audits.run_round(pool) == MANY - 1
    assert compared(control) == {f"lb{number}" for number in range(1, MANY)}
    assert set(audits._retry_at) == {one}, "the next round asks the amphora again"


def test_refused_row_stops_no_round(control, audits, pool, monkeypatch):
    one = one_of(control)
    control.cloud.says[one] = BundleState(generation=9)

    def overflows(*_):
        raise OverflowError("too large")

    monkeypatch.setattr(drift_audit.config_drift, "advance_generation_beyond", overflows)
    assert audits.run_round(pool) == MANY - 1
    assert set(audits._retry_at) == {one}


def test_unrenderable_load_balancer_stops_no_round(control, audits, pool, monkeypatch):
    def expected(_, recorded):
        if recorded.tree.id == "lb0":
            raise ZeroDivisionError
        return {one.id: "d" for one in recorded.amphorae}

    monkeypatch.setattr(drift_audit.DriftAuditor, "_expected_digests", expected)
    assert audits.run_round(pool) == MANY - 1
    assert set(audits._retry_at) == {one_of(control)}


def test_implausible_generation_is_reported_and_not_exceeded(control, audits, pool):
    control.cloud.says[one_of(control)] = BundleState(generation=2**62)
    assert audits.run_round(pool) == MANY
    row = rows(control)["lb0"]
    assert "no controller has pushed" in row.drift
    assert (row.generation, row.dirty) == (1, False)


def test_one_transaction_records_the_audits_without_drift(control, audits, pool, monkeypatch):
    record, recorded = drift_audit.config_drift.record_audit, []

    def fail_once(connection, ids, now, drift=None):
        recorded.append(list(ids))
        if len(recorded) == 1:
            raise OverflowError("too large")
        return record(connection, ids, now, drift)

    monkeypatch.setattr(drift_audit.config_drift, "record_audit", fail_once)
    assert audits.run_round(pool) == MANY
    # The failed record postpones these audits, so that the next round queries other amphorae.
    assert set(audits._retry_at) == {row.id for row in rows(control).values()}
    assert audits.run_round(pool) == 0
    audits._retry_at.clear()
    assert audits.run_round(pool) == MANY
    assert [len(ids) for ids in recorded] == [MANY, MANY]
    assert compared(control) == {f"lb{number}" for number in range(MANY)}


def test_amphorae_of_all_load_balancers_are_asked_in_parallel(control, audits, pool):
    together = threading.Barrier(4, timeout=60)
    chosen = [one_of(control, f"lb{number}") for number in range(4)]

    def waits():
        together.wait()
        return BundleState(generation=1, digest="d")

    control.cloud.says |= dict.fromkeys(chosen, waits)
    assert audits.run_round(pool) == MANY


def test_a_stopped_round_continues_with_the_remaining_amphorae(control, audits, pool):
    released, questions = threading.Event(), iter([True] * (MANY + 1))

    def hangs():
        released.wait(60)
        return AgentUnreachable("ask", "did not answer in time")

    control.cloud.says |= {row.id: hangs for row in rows(control).values()}
    try:
        # The stop flag is checked before each amphora; the round ends without answers.
        assert audits.run_round(pool, lambda: next(questions, False)) == 0
        first = set(audits._retry_at)
        assert 0 < len(first) <= 4, "only the running requests are finished"
    finally:
        released.set()
    control.cloud.says.clear()
    assert audits.run_round(pool) == MANY - len(first)


def test_a_round_ends_with_its_time_limit_its_duty_or_its_controller(control, audits, monkeypatch):
    stopping, draining = threading.Event(), threading.Event()
    assert audits._until_end(stopping, draining)()
    for event in (stopping, draining):
        goes_on = audits._until_end(stopping, draining)
        assert goes_on()
        event.set()
        assert not goes_on()
        event.clear()
    monkeypatch.setattr(drift_audit, "_ROUND_TIMEOUT", 0.0)
    assert not audits._until_end(stopping, draining)()
    monkeypatch.undo()
    # The duty's lease is renewed between amphorae; the round ends if another process has the duty.
    monkeypatch.setattr(drift_audit, "_RENEW_EVERY", 0.0)
    control.database.write(lambda c: c.execute(duty.update().values(leased_until=0.0)))
    goes_on = audits._until_end(stopping, draining)
    assert goes_on()
    assert not acquire_duty(control.database, DUTY, "another", 60.0)
    control.database.write(lambda c: c.execute(duty.update().values(leased_until=0.0)))
    assert acquire_duty(control.database, DUTY, "another", 60.0)
    assert not goes_on()
