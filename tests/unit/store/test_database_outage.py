# SPDX-License-Identifier: Apache-2.0
"""Outages of a database server: the memory of failed transactions, and the end in the log."""

import gc
import logging
import re
from pathlib import Path

import pytest
import sqlalchemy as sa

from amphora_driver import repeated_messages
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.database import outage
from amphora_driver.database.engine import Database
from amphora_driver.database.outage import OutageMonitor
from amphora_driver.errors import StoreError
from amphora_driver.repeated_messages import Occurrence, Repetitions

# PyMySQL does not close the socket of a failed connection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
URLS = {
    "mariadb": "mysql+pymysql://root@localhost/provider?unix_socket={}/socket",
    "postgresql": "postgresql+psycopg://root@/provider?host={}",
}


def select(connection):
    return connection.scalar(sa.text("SELECT 1"))


def fails(database, use):
    try:
        getattr(database, use)(select)
    except StoreError as error:
        return str(error)
    raise AssertionError("the transaction succeeded")


def count_garbage(work):
    """Return the number of objects that only the garbage collector can delete after five calls."""
    work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            work()
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("use", ["read", "write"])
@pytest.mark.parametrize("kind", URLS)
def test_a_failed_transaction_leaves_no_reference_cycle(tmp_path, kind, use):
    """A cycle would hold the failed connection until the next collection of its generation."""
    database = Database(URLS[kind].format(tmp_path))
    assert count_garbage(lambda: fails(database, use)) == 0
    database.dispose()


def test_a_failed_read_of_octavias_database_leaves_no_reference_cycle(tmp_path):
    octavia = OctaviaDatabase(URLS["mariadb"].format(tmp_path))

    def read():
        with pytest.raises(StoreError):
            octavia.read("lb")

    assert count_garbage(read) == 0


class Line:
    """A link to the socket of a server. Without the link, no connection to the server is possible."""

    def __init__(self, url, path):
        made = sa.make_url(url)
        self._target, self._path = Path(made.query["unix_socket"]), path
        self.restore()
        self.database = Database(str(made.update_query_dict({"unix_socket": str(path)})))

    def remove(self):
        self._path.unlink()
        # The server would still answer on the open connections.
        self.database.dispose()

    def restore(self):
        self._path.symlink_to(self._target)


@pytest.fixture
def line(mariadb_url, tmp_path):
    made = Line(mariadb_url, tmp_path / "socket")
    yield made
    made.database.dispose()


def test_the_log_has_the_end_of_an_outage_once(line, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(outage, "_SHORTEST", 0.0)
    repetitions = Repetitions()
    monkeypatch.setattr(repeated_messages, "_repetitions", repetitions)
    line.database.write(select)
    assert caplog.messages == []
    line.remove()
    texts = {fails(line.database, use) for use in ("write", "read", "write", "read")}
    assert len(texts) == 2
    assert [repetitions.add("away", at) for at in (0.0, 1.0)] == [Occurrence(1, 0.0), None]
    retries = [one for one in caplog.messages if "in attempt 1" in one]
    assert len(retries) == 1, "only the first failure of an outage has a line for its repetition"
    line.restore()
    line.database.read(select)
    assert not any("answers again" in one for one in caplog.messages), "writes may still fail"
    for _ in range(2):
        line.database.write(select)
    (end,) = [one for one in caplog.messages if "answers again" in one]
    assert re.fullmatch(r"the database answers again after \d+ s, in which 4 transactions failed", end)
    assert repetitions.add("away", 2.0) == Occurrence(3, 0.0), "the next outage is logged at once"


def test_a_refused_statement_is_no_outage(line, caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(StoreError, match="nothing"):
        line.database.read(lambda connection: connection.exec_driver_sql("SELECT nothing"))
    assert not line.database._outage.lasts


def test_single_failures_between_successes_are_no_outage(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    monitor = OutageMonitor(lambda: now[0])
    for _ in range(5):
        monitor.record_failure("read")
        now[0] += 1.0
        monitor.record_success("read")
    assert caplog.messages == []
    for _ in range(3):
        monitor.record_failure("read")
        now[0] += 60.0
    monitor.record_success("write")
    assert caplog.messages == []
    monitor.record_success("read")
    assert caplog.messages == ["the database answers again after 180 s, in which 3 transactions failed"]
