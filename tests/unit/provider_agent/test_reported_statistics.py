# SPDX-License-Identifier: Apache-2.0
"""Statistics of many listeners: full calls to Octavia, each listener in turn, few statements."""

import threading
import time

import pytest
import sqlalchemy as sa
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job, listener_statistics
from amphora_driver.health import statistics
from amphora_driver.provider_agent import statistics_shares
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import listener_stats

LISTENERS = [f"listener-{number:04}" for number in range(700)]


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        yield sockets


@pytest.fixture
def reporter(conf, database, octavia):
    def fill(connection):
        values = {"load_balancer_id": "lb", "op": "apply", "generation": 1, "committed": 1, "dirty": False}
        connection.execute(job.insert().values(**values))

    database.write(fill)
    return Reporter(conf, database)


def count(database, total, listeners=LISTENERS):
    """Let both amphorae of a pair report this number of connections to each listener."""
    rows = [
        statistics.Row(
            listener_id=one, amphora_id=amphora_id, load_balancer_id="lb", active_connections=1,
            bytes_in=total, bytes_out=total, request_errors=0, total_connections=total,
        )
        for one in listeners for amphora_id in ("first", "second")
    ]  # fmt: skip
    database.write(lambda connection: statistics.write_rows(connection, rows))


def reported(call):
    return [one["id"] for one in call["listeners"]]


def report_all(reporter):
    while reporter.report_statistics():
        pass


def test_one_turn_reports_all_listeners_in_full_calls(reporter, database, octavia):
    count(database, 5)
    report_all(reporter)
    assert [len(reported(call)) for call in octavia.statistics] == [300, 300, 100]
    assert sorted(one for call in octavia.statistics for one in reported(call)) == LISTENERS
    assert {one["total_connections"] for call in octavia.statistics for one in call["listeners"]} == {10}
    report_all(reporter)
    assert len(octavia.statistics) == 3, "unchanged totals are reported again"


def test_listeners_that_always_change_delay_no_other_listener(reporter, database, octavia):
    count(database, 1)
    for number in range(3):
        reporter.report_statistics()
        count(database, 2 + number, LISTENERS[:400])
    assert {one for call in octavia.statistics for one in reported(call)} == set(LISTENERS)


def test_each_host_reports_its_part_of_the_listeners(conf, database, octavia, reporter):
    listeners = [f"{number:x}-listener" for number in range(16)] + ["F-listener"]
    count(database, 1, listeners)
    hosts = [Reporter(conf, database, name) for name in ("first", "second")]
    for host, parts in zip(hosts, ("01234567", "89abcdef"), strict=True):
        host._shares.parts()
        host.report_statistics(frozenset(parts))
        host.report_statistics(frozenset())
    assert [sorted(reported(call)) for call in octavia.statistics] == [
        sorted(listeners[:8]), sorted(listeners[8:])
    ]  # fmt: skip


def test_no_call_starts_after_a_read_that_outlasts_the_lease(reporter, database, octavia, monkeypatch):
    count(database, 1, LISTENERS[:2])
    read = listener_stats.list_due_totals

    with monkeypatch.context() as slow:

        def read_slowly(*arguments):
            # The rest of the lease is now too short for a call.
            slow.setattr(statistics_shares, "_LEAST", statistics_shares._LEASE)
            return read(*arguments)

        slow.setattr(listener_stats, "list_due_totals", read_slowly)
        assert not reporter.report_statistics(reporter._shares.parts())
    assert octavia.statistics == []
    reporter.report_statistics(reporter._shares.parts())
    assert [reported(call) for call in octavia.statistics] == [LISTENERS[:2]]


def test_a_counter_that_changes_during_the_call_is_reported_afterwards(reporter, database, octavia):
    count(database, 1, LISTENERS[:2])
    send = reporter.library.update_listener_statistics

    def change_meanwhile(document):
        send(document)
        count(database, 2, LISTENERS[:1])

    reporter.library.update_listener_statistics = change_meanwhile
    reporter.report_statistics()
    reporter.library.update_listener_statistics = send
    reporter.report_statistics()
    assert [reported(call) for call in octavia.statistics] == [LISTENERS[:2], LISTENERS[:1]]
    behind = sa.select(listener_statistics).where(listener_statistics.c.version > listener_statistics.c.reported)
    assert database.read(lambda connection: connection.execute(behind).all()) == []


def test_the_number_of_statements_does_not_depend_on_the_number_of_listeners(reporter, database):
    counted = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *arguments: counted.append(arguments[2]))
    numbers = []
    for listeners in (LISTENERS[:10], LISTENERS[10:300]):
        count(database, 1, listeners)
        counted.clear()
        reporter.report_statistics()
        numbers.append(len(counted))
    assert numbers[0] == numbers[1], counted


def test_an_unexpected_error_does_not_end_the_statistics(conf, reporter, database, octavia, caplog):
    conf.set_override("poll_interval", 0.1, "amp_queue")
    count(database, 1, LISTENERS[:1])
    send, errors = reporter.library.update_listener_statistics, [ValueError("half of an answer")]

    def send_or_fail(document):
        if errors:
            raise errors.pop()
        send(document)

    reporter.library.update_listener_statistics = send_or_fail
    stopping = threading.Event()
    thread = threading.Thread(target=reporter.run, args=(stopping.is_set,))
    thread.start()
    deadline = time.monotonic() + 20
    while not octavia.statistics and time.monotonic() < deadline:
        time.sleep(0.01)
    stopping.set()
    thread.join()
    assert [reported(call) for call in octavia.statistics] == [LISTENERS[:1]]
    assert "half of an answer" in caplog.text
