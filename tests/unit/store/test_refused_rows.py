# SPDX-License-Identifier: Apache-2.0
"""Rows that the database refuses: rows of other load balancers are written."""

import time

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_heartbeat, listener_statistics, object_status
from amphora_driver.errors import ContentRefused, StoreError
from amphora_driver.health import status_writer, write_batch
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import LastDrift, ListenerReport, Report
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

MANY = 20
BAD = 13
# A trigger that refuses the statuses of one listener, as for a value that the database cannot hold.
TRIGGERS = {
    "sqlite": """CREATE TRIGGER refusing BEFORE UPDATE ON object_status WHEN NEW.object_id = 'li13'
        BEGIN SELECT RAISE(ABORT, 'refused'); END""",
    "postgresql": """CREATE FUNCTION refuse() RETURNS trigger AS $$
        BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = 'data_exception'; END $$ LANGUAGE plpgsql;
        CREATE TRIGGER refusing BEFORE UPDATE ON object_status FOR EACH ROW
        WHEN (NEW.object_id = 'li13') EXECUTE FUNCTION refuse()""",
    "mysql": """CREATE TRIGGER refusing BEFORE UPDATE ON object_status FOR EACH ROW
        IF NEW.object_id = 'li13' THEN SET NEW.object_id = NULL; END IF""",
}
UNDO = {"postgresql": "DROP TRIGGER refusing ON object_status; DROP FUNCTION refuse()"}


VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


def tree(number):
    lb = f"lb{number}"
    listener = Listener(id=f"li{number}", loadbalancer_id=lb, protocol=ListenerProtocol.TCP, protocol_port=80)
    return LoadBalancer(id=lb, project_id="demo", vip=VIP, listeners=(listener,))


@pytest.fixture
def manager(any_database, monkeypatch):
    monkeypatch.setattr(write_batch, "_HEARTBEAT_WRITE_INTERVAL", 0.0)
    recorder = RequestRecorder(any_database, lambda node: None)
    for number in range(MANY):
        recorder.create_load_balancer(tree(number), read_back=False)
        any_database.write(
            lambda c, number=number: amphorae.insert_amphora(c, f"am{number}", f"lb{number}", "standalone", b"key")
        )
    dialect = any_database.engine.dialect.name
    run(any_database, TRIGGERS[dialect])
    yield any_database
    run(any_database, UNDO.get(dialect, "DROP TRIGGER refusing"))


def run(database, statements):
    with database.engine.begin() as connection:
        connection.exec_driver_sql(statements)


def say(received, sequence, count):
    for number in range(MANY):
        report = Report(1, {f"li{number}": ListenerReport("OPEN", 1, count, count, 0, count)}, {}, f"am{number}")
        assert received.accept(Heartbeat(f"am{number}", 7, sequence, report), time.monotonic())


def read(database, column, key):
    return dict(map(tuple, database.read(lambda c: c.execute(sa.select(key, column)).all())))


def test_refused_rows_of_one_load_balancer_do_not_block_the_others(manager, caplog):
    received = AmphoraReports()
    writer = StatusWriter(manager, received)
    others = {f"li{number}" for number in range(MANY)} - {f"li{BAD}"}
    for sequence in (1, 2, 3):
        say(received, sequence, 5 * sequence)
        writer.flush()
        counted = read(manager, listener_statistics.c.bytes_in, listener_statistics.c.listener_id)
        assert counted == dict.fromkeys(others, 5 * sequence)
        places = read(manager, amphora_heartbeat.c.sequence, amphora_heartbeat.c.amphora_id)
        assert places == {f"am{number}": sequence for number in range(MANY)}, (
            "the heartbeat of a refused row is not recorded"
        )
    told = read(manager, object_status.c.operating, object_status.c.object_id)
    assert {f"lb{number}" for number in range(MANY) if told[f"lb{number}"] == "ONLINE"} == {
        f"lb{number}" for number in range(MANY) if number != BAD
    }
    assert writer._batches.refused == {f"lb{BAD}": 3}
    assert caplog.text.count("the database refused the reports of lb13") == 1, "the log repeats the refusal rarely"


def test_a_refused_load_balancer_is_written_separately(manager):
    received = AmphoraReports()
    writer = StatusWriter(manager, received)
    transactions = []
    writer._batches._database = Counting(manager, transactions)
    for sequence in (1, 2):
        transactions.clear()
        say(received, sequence, 5 * sequence)
        writer.flush()
    # One write for all others, one for the refused load balancer, one for the heartbeats.
    assert len(transactions) == 2


class Counting:
    def __init__(self, database, transactions):
        self._database, self._transactions = database, transactions

    def write(self, work):
        self._transactions.append(work)
        return self._database.write(work)


def test_a_database_outage_is_no_refusal(manager):
    class Away:
        def write(self, _work):
            raise StoreError("write to the database", "it is away")

    away = write_batch.BatchWriter(Away())
    with pytest.raises(StoreError):
        away.write([write_batch.Entry("lb1")], [])
    assert not away.refused
    with pytest.raises(ContentRefused):
        manager.write(
            lambda c: c.execute(
                object_status.update().where(object_status.c.object_id == "li13").values(operating="ERROR")
            )
        )


def test_a_report_that_raises_an_error_affects_no_other_report(manager, monkeypatch):
    judge = status_writer.operating_statuses

    def strange(tree, reports):
        if tree.id == f"lb{BAD}":
            raise KeyError("a word that no rule knows")
        return judge(tree, reports)

    monkeypatch.setattr(status_writer, "operating_statuses", strange)
    received = AmphoraReports()
    writer = StatusWriter(manager, received)
    say(received, 1, 5)
    writer.flush()
    assert len(read(manager, listener_statistics.c.bytes_in, listener_statistics.c.listener_id)) == MANY - 1
    assert writer._batches.refused == {f"lb{BAD}": 1}


def test_a_refused_drift_notice_does_not_block_the_others(manager):
    if manager.engine.dialect.name == "sqlite":
        statement = """CREATE TRIGGER finding BEFORE UPDATE ON amphora WHEN NEW.id = 'am13' AND NEW.drift IS NOT NULL
            BEGIN SELECT RAISE(ABORT, 'refused'); END"""
    elif manager.engine.dialect.name == "postgresql":
        statement = """CREATE TRIGGER finding BEFORE UPDATE ON amphora FOR EACH ROW
            WHEN (NEW.id = 'am13' AND NEW.drift IS NOT NULL) EXECUTE FUNCTION refuse()"""
    else:
        statement = """CREATE TRIGGER finding BEFORE UPDATE ON amphora FOR EACH ROW
            IF NEW.id = 'am13' AND NEW.drift IS NOT NULL THEN SET NEW.id = NULL; END IF"""
    run(manager, statement)
    try:
        received = AmphoraReports()
        writer = StatusWriter(manager, received)
        for number in range(MANY):
            found = LastDrift(at=1_000_000_000.0, sentences=("eth1 is down",), repaired=True)
            report = Report(1, {}, {}, f"am{number}", drifted=found)
            assert received.accept(Heartbeat(f"am{number}", 7, 1, report), time.monotonic())
        writer.flush()
        noted = {one for one, drift in read(manager, amphora.c.drift, amphora.c.id).items() if drift}
        assert noted == {f"am{number}" for number in range(MANY) if number != BAD}
    finally:
        run(manager, "DROP TRIGGER finding" + (" ON amphora" if manager.engine.dialect.name == "postgresql" else ""))
