# SPDX-License-Identifier: Apache-2.0
"""The log of the provider agent while Octavia refuses statuses: a few objects by name, many as a number."""

import logging

import pytest
import sqlalchemy as sa
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.provider_agent import refused_statuses
from amphora_driver.provider_agent.refused_statuses import OctaviaFailure, RefusalLog, failure_of, reason_of
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.repeated_messages import RepetitionFilter, Repetitions
from amphora_driver.store import status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
NAMES = [f"lb{number:03}" for number in range(12)]


class Lines(logging.Handler):
    """The lines that a handler of the provider agent writes."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.addFilter(RepetitionFilter(Repetitions()))

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    handler = Lines()
    logging.getLogger("amphora_driver").addHandler(handler)
    yield handler.lines
    logging.getLogger("amphora_driver").removeHandler(handler)


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        yield sockets


def database_error(document):
    """Return the answer of octavia-driver-agent if its database fails: SQLAlchemy's text about the first object."""
    kind, (first, *_) = next(iter(document.items()))
    engine = sa.create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            update = sa.text("UPDATE load_balancer SET operating_status=:operating_status WHERE id=:id")
            connection.execute(update, {"operating_status": first["operating_status"], "id": first["id"]})
    except sa.exc.OperationalError as error:
        return kind, first["id"], str(error)
    finally:
        engine.dispose()
    raise AssertionError("the statement fails")


def record(database):
    recorder = RequestRecorder(database, lambda node: None)
    for name in NAMES:
        recorder.create_load_balancer(LoadBalancer(id=name, project_id="demo", vip=VIP), read_back=False)
        database.write(lambda c, name=name: status_outbox.confirm_generation(c, name, 1, {}))
    database.write(lambda c: c.execute(job.update().values(committed=1, applied=1)))
    operating = [
        status_outbox.Observation(object_id=name, kind="loadbalancers", operating=status_outbox.Operating.ONLINE)
        for name in NAMES
    ]
    database.write(lambda c: status_outbox.write_all_observations(c, {one.object_id: [one] for one in operating}))


def test_an_outage_of_octavias_database_is_a_few_lines(conf, database, octavia, lines):
    record(database)
    reporter = Reporter(conf, database)
    calls = []
    octavia.refuse = lambda document: calls.append(document) or database_error(document)
    for _ in range(2):
        calls.clear()
        reporter._refused.clear()
        reporter.run_once()
        assert len(calls) == 1 + len(NAMES), "a round sends each status once, and ends"
    # The first line of the text is the same for all objects; the statement and its parameters are not.
    reason = "(sqlite3.OperationalError) no such table: load_balancer"
    assert all(line.endswith(reason) for line in lines), lines
    assert [line for line in lines if "one by one" in line] == [
        f"Octavia refused a call with several statuses; the provider agent sends the statuses one by one: {reason}"
    ]
    assert [name for name in NAMES if any(name in line for line in lines)] == NAMES[: refused_statuses._NAMED]
    assert len(lines) == refused_statuses._NAMED + 2
    octavia.refuse = lambda document: None
    reporter._refused.clear()
    reporter.run_once()
    reported = [one["id"] for document in octavia.statuses for one in document["loadbalancers"]]
    assert sorted(reported) == NAMES, "no status is lost"


def test_an_outage_in_front_of_the_barriers_is_a_few_lines(conf, database, octavia, lines):
    record(database)
    database.write(lambda c: c.execute(job.update().values(generation=2)))
    reporter = Reporter(conf, database)
    octavia.refuse = database_error
    for _ in range(2):
        reporter._refused.clear()
        reporter.run_once()
    assert len(lines) == refused_statuses._NAMED + 2, lines
    assert "test update" in lines[0]


def test_objects_of_different_reasons_are_named(lines):
    log = RefusalLog()
    for number in range(20):
        log.log_object("status", "members", f"me{number}", 1.0, f"reason {number}")
    assert len(lines) == 20
    assert lines[7] == "Octavia refused the status of members me7; the provider agent tries again in 1 s: reason 7"


def test_each_minute_names_objects_again(lines):
    now = [0.0]
    log = RefusalLog(lambda: now[0])
    for minute in range(2):
        now[0] = 60.0 * minute
        for number in range(10):
            log.log_object("status", "members", f"me{minute}{number}", 1.0, "Unknown member.")
    named = [line for line in lines if "members me" in line]
    assert len(named) == 2 * refused_statuses._NAMED
    assert len(lines) == len(named) + 1


def test_the_reasons_in_memory_are_limited(monkeypatch):
    monkeypatch.setattr(refused_statuses, "_CAPACITY", 5)
    log = RefusalLog()
    for number in range(20):
        log.log_object("status", "members", "me", 1.0, f"reason {number}")
    assert len(log._intervals) == 5


def test_a_reason_has_neither_statement_nor_object():
    fault = "(pymysql.err.OperationalError) (2013, 'Lost connection')\n[SQL: UPDATE member]\n[parameters: ('me1',)]"
    assert reason_of(fault) == "(pymysql.err.OperationalError) (2013, 'Lost connection')"
    assert reason_of("No member me1 exists.", "me1") == "No member (object) exists."
    assert reason_of(None) == reason_of("") == "no reason given"
    assert str(failure_of(OctaviaFailure(fault))) == reason_of(fault)
    error = OSError("no")
    assert failure_of(error) is error
