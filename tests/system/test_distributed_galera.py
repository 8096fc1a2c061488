# SPDX-License-Identifier: Apache-2.0
"""Two writable Galera nodes: both accept calls, and controllers work on both.

Row locks are local to a Galera node; a conflict appears at commit.
"""

import threading
import time
from collections import Counter
from contextlib import contextmanager

import galera
import pytest
import sqlalchemy as sa
from unit.provider_agent.octavia_sockets import OctaviaSockets

from amphora_driver import config
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job, object_status, request
from amphora_driver.errors import LeaseLost
from amphora_driver.health import status_writer
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import PoolReport, Report
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.model.enums import Kind, PoolProtocol
from amphora_driver.model.loadbalancer import LoadBalancer, Member, Pool, Vip
from amphora_driver.provider_agent import status_reporter, sync_transactions
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.queue.jobs import Jobs, guard_lease, release_duty
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
BALANCERS = [f"lb{number}" for number in range(6)]
CALLS = 60
# Time-out for a busy machine, in seconds; an idle one takes about two.
TIME_LIMIT = 120.0
# Changed rows of a table without a key: the second node scans the whole table for each.
LONG_ROWS = 3000

pytestmark = [pytest.mark.root, pytest.mark.extended]


@pytest.fixture(scope="module")
def nodes():
    if galera.missing():
        pytest.skip(galera.missing())
    with galera.cluster("provider") as urls:
        migrate.upgrade(urls[0])
        databases = [Database(url) for url in urls]
        yield databases
        for database in databases:
            database.dispose()


class Workers:
    """Controller loops: claim, read, work, release; they detect two workers on one load balancer."""

    def __init__(self):
        self.ending = threading.Event()
        self.at_work = set()
        self.doubled = []
        self.done = Counter()
        self._lock = threading.Lock()

    def run(self, database, name):
        jobs = Jobs(database, name, 30)
        while not self.ending.is_set():
            lease = jobs.claim()
            if lease is None:
                self.ending.wait(0.01)
                continue
            one = lease.load_balancer_id
            with self._lock:
                if one in self.at_work:
                    self.doubled.append(one)
                self.at_work.add(one)
            seen = database.read(
                lambda c, one=one: c.scalar(sa.select(job.c.generation).filter_by(load_balancer_id=one))
            )
            time.sleep(0.005)
            database.write(
                lambda c, one=one, seen=seen: c.execute(
                    job.update().where(job.c.load_balancer_id == one).values(applied=seen, committed=seen)
                )
            )
            with self._lock:
                self.at_work.discard(one)
            jobs.complete(lease, seen)
            self.done[name] += 1


def accept(database, name, failed):
    """Change load balancers as the API of one host; the other hosts change the same ones."""
    recorder = RequestRecorder(database, lambda node: None)
    try:
        for number in range(CALLS):
            recorder.update_object(Kind.LOAD_BALANCER, BALANCERS[number % len(BALANCERS)], {"name": f"{name}-{number}"})
    except Exception as error:
        failed.append(error)
        raise


def test_two_nodes_lose_no_call_and_repeat_no_work(nodes):
    for number, one in enumerate(BALANCERS):
        recorder = RequestRecorder(nodes[number % 2], lambda node: None)
        recorder.create_load_balancer(LoadBalancer(id=one, project_id="demo", vip=VIP), read_back=False)
    workers, failed = Workers(), []
    controllers = [
        threading.Thread(target=workers.run, args=(database, f"controller-{number}"))
        for number, database in enumerate((*nodes, *nodes))
    ]
    hosts = [
        threading.Thread(target=accept, args=(database, f"api-{number}", failed))
        for number, database in enumerate((*nodes, *nodes))
    ]
    for thread in (*controllers, *hosts):
        thread.start()
    try:
        for thread in hosts:
            thread.join(TIME_LIMIT)
        until = time.monotonic() + TIME_LIMIT
        unfinished = sa.select(sa.func.count()).where(job.c.applied < job.c.generation)
        while any(node.read(lambda c: c.scalar(unfinished)) for node in nodes):
            assert time.monotonic() < until, "every accepted call is applied"
            time.sleep(0.05)
    finally:
        workers.ending.set()
        for thread in controllers:
            thread.join(TIME_LIMIT)
    assert failed == []
    assert workers.doubled == []
    assert {name.split("-")[1] for name in workers.done} >= {"0", "1"}, "controllers of both nodes have done work"
    for node in nodes:
        generations = dict(
            map(tuple, node.read(lambda c: c.execute(sa.select(job.c.load_balancer_id, job.c.generation)).all()))
        )
        # Every call counts once: the calls of four hosts, and the creation.
        assert generations == dict.fromkeys(BALANCERS, 4 * CALLS // len(BALANCERS) + 1)
        assert node.read(lambda c: c.scalar(sa.select(sa.func.count(request.c.id)))) == 4 * CALLS + len(BALANCERS)


def scalar(database, statement):
    with database.engine.connect() as connection:
        return connection.exec_driver_sql(statement).first()[-1]


def waiting_write_sets(database):
    return int(scalar(database, "SHOW STATUS LIKE 'wsrep_local_recv_queue'"))


def until(condition):
    end = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def lagging(here, there):
    """Let the first node apply a long write set of the second one; later write sets wait."""
    with there.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("CREATE TABLE filler (a INT) ENGINE=InnoDB")
        connection.exec_driver_sql(f"INSERT INTO filler SELECT seq FROM seq_1_to_{LONG_ROWS}")
    until(lambda: scalar(here, "SELECT COUNT(*) FROM filler") == LONG_ROWS)
    with here.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET GLOBAL wsrep_slave_threads=1")
    with there.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("UPDATE filler SET a = -a")
    assert scalar(here, "SELECT MIN(a) FROM filler") == 1, "the long write set is not applied yet"
    yield
    until(lambda: scalar(here, "SELECT MAX(a) FROM filler") == -1)
    with there.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("DROP TABLE filler")


def test_a_late_write_of_a_former_owner_is_refused_while_its_node_lags(nodes):
    """The node has received the other controller's claim but not applied it, so the old lease looks valid."""
    here, there = nodes
    recorder = RequestRecorder(here, lambda node: None)
    recorder.create_load_balancer(LoadBalancer(id="late", project_id="demo", vip=VIP), read_back=False)
    here.write(lambda c: amphorae.insert_amphora(c, "late-amphora", "late", "SINGLE", b"key"))
    # A lease of length zero has expired when the next controller reads it.
    former = Jobs(here, "former", 0.0).claim("late")
    until(lambda: there.read(lambda c: c.scalar(sa.select(job.c.owner).filter_by(load_balancer_id="late"))))
    seen = []

    def late(connection):
        guard_lease(connection, former)
        seen.append(waiting_write_sets(here))
        connection.execute(amphora.update().where(amphora.c.id == "late-amphora").values(reason="late"))

    with lagging(here, there):
        lease = Jobs(there, "new", 60.0).claim("late")
        assert lease.epoch == former.epoch + 1
        until(lambda: waiting_write_sets(here))
        with pytest.raises(LeaseLost):
            here.write(late)
    assert seen[0] >= 1, "the guard reads the lease before the claim is applied"
    for node in nodes:
        row = node.read(lambda c: c.execute(sa.select(job).filter_by(load_balancer_id="late")).one())
        assert (row.owner, row.epoch) == ("new", lease.epoch)
        assert node.read(lambda c: c.scalar(sa.select(amphora.c.reason).filter_by(id="late-amphora"))) is None


def test_a_read_waits_for_the_earlier_writes_of_another_node(nodes):
    """Behind a balancer, a plan can read from another node than the one that has recorded the request."""
    here, there = nodes
    recorder = RequestRecorder(here, lambda node: None)
    recorder.create_load_balancer(LoadBalancer(id="read", project_id="demo", vip=VIP), read_back=False)
    of = job.c.load_balancer_id == "read"
    read = sa.select(job.c.applied).where(of)
    assert there.read(lambda c: c.scalar(read)) == 0
    with lagging(here, there):
        there.write(lambda c: c.execute(job.update().where(of).values(applied=1)))
        until(lambda: waiting_write_sets(here))
        assert scalar(here, "SELECT applied FROM job WHERE load_balancer_id = 'read'") == 0, "the node lags"
        assert here.read(lambda c: c.scalar(read)) == 1


class Colliding:
    """A function of a transaction; during its first call with a chosen row, another node commits a write to that row.

    `calls` has the ids of each call, so that a repeated transaction is there twice.
    """

    def __init__(self, function, ids_of, chosen, node, write):
        self._function, self._ids_of, self._chosen = function, ids_of, chosen
        self._node, self._write = node, write
        self.calls = []

    def __call__(self, connection, rows):
        result = self._function(connection, rows)
        self.calls.append(tuple(self._ids_of(rows)))
        if sum(self._chosen in one for one in self.calls) == 1 and self._chosen in self.calls[-1]:
            self._node.write(self._write)
        return result

    def repeated(self):
        """Return the calls that occurred more than once."""
        return [one for one, number in Counter(self.calls).items() if number > 1]


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        yield sockets


@pytest.fixture
def reporter(nodes, octavia, tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {nodes[0].url}\nencryption_key_file = {tmp_path}/keys\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/hints\n"
        f"[amp_octavia]\nstatus_socket = {tmp_path}/status.sock\nstats_socket = {tmp_path}/stats.sock\n"
        f"get_socket = {tmp_path}/get.sock\n"
    )
    made = Reporter(config.load([str(path)]), nodes[0])
    yield made
    release_duty(nodes[0], "reporter", made._name)


def create_balancers(database, names, **values):
    """Create load balancers that Octavia has committed, with further values of their jobs."""
    recorder = RequestRecorder(database, lambda node: None)
    for name in names:
        recorder.create_load_balancer(LoadBalancer(id=name, project_id="demo", vip=VIP), read_back=False)
    mine = job.c.load_balancer_id.in_(names)
    database.write(lambda c: c.execute(job.update().where(mine).values(committed=1, applied=1, **values)))


def test_a_conflict_repeats_one_part_of_the_passed_barriers(nodes, reporter, monkeypatch):
    here, there = nodes
    names = [f"barrier{number:03}" for number in range(3 * status_reporter._COMMITTED_PART - 5)]
    create_balancers(here, names, generation=2)
    met = names[status_reporter._COMMITTED_PART + 1]
    change = job.update().where(job.c.load_balancer_id == met).values(writes=job.c.writes + 1)
    mark = Colliding(
        sync_transactions.mark_committed, lambda rows: [row.load_balancer_id for row in rows], met, there,
        lambda c: c.execute(change),
    )  # fmt: skip
    monkeypatch.setattr(sync_transactions, "mark_committed", mark)
    reporter.run_once()
    assert [one for one in mark.calls if met in one] == mark.repeated() * 2
    assert set().union(*mark.calls) >= set(names)
    assert max(map(len, mark.calls)) == status_reporter._COMMITTED_PART
    mine = sa.select(job.c.committed, job.c.writes).where(job.c.load_balancer_id.in_(names))
    assert sorted(there.read(lambda c: c.execute(mine).all())) == [(2, 0)] * (len(names) - 1) + [(2, 1)]


def test_a_conflict_repeats_one_part_of_the_accepted_statuses(nodes, octavia, reporter, monkeypatch):
    here, there = nodes
    monkeypatch.setattr(status_reporter, "_REPORTED_PART", 10)
    names = [f"reported{number:03}" for number in range(25)]
    create_balancers(here, names)
    for name in names:
        here.write(lambda c, name=name: status_outbox.confirm_generation(c, name, 1, {}))
    met = names[12]
    change = object_status.update().where(object_status.c.object_id == met)
    change = change.values(operating="ONLINE", version=object_status.c.version + 1)
    mark = Colliding(
        status_outbox.mark_reported, lambda reports: [one.object_id for one in reports], met, there,
        lambda c: c.execute(change),
    )  # fmt: skip
    monkeypatch.setattr(status_outbox, "mark_reported", mark)
    reporter.run_once()
    (part,) = mark.repeated()
    assert met in part
    assert len(part) <= 10
    # The status that the other node wrote during the report is reported too.
    mine = object_status.c.object_id.in_(names)
    rows = there.read(lambda c: c.execute(sa.select(object_status).where(mine)).all())
    assert [row.object_id for row in rows if row.reported < row.version] == []
    sent = [one for document in octavia.statuses for one in document.get("loadbalancers", ())]
    active = Counter(one["id"] for one in sent if one.get("provisioning_status") == "ACTIVE" and one["id"] in names)
    assert active == Counter(names), "each provisioning status is reported once"
    assert {"id": met, "operating_status": "ONLINE"} in sent


def test_a_conflict_repeats_one_part_of_a_large_load_balancer(nodes, monkeypatch):
    here, there = nodes
    monkeypatch.setattr(status_writer, "_MAX_WRITTEN", 20)
    names = [f"large-member{number:03}" for number in range(90)]
    members = tuple(Member(id=one, pool_id="large-pool", address="192.0.2.1", protocol_port=80) for one in names)
    pool = Pool(id="large-pool", loadbalancer_id="large", protocol=PoolProtocol.HTTP, members=members)
    recorder = RequestRecorder(here, lambda node: None)
    recorder.create_load_balancer(LoadBalancer(id="large", project_id="demo", vip=VIP, pools=(pool,)), read_back=False)
    here.write(lambda c: amphorae.insert_amphora(c, "large-amphora", "large", "SINGLE", b"key"))
    reports = AmphoraReports()
    report = Report(1, {}, {"large-pool:": PoolReport("UP", dict.fromkeys(names, "UP"))}, "large-amphora")
    reports.accept(Heartbeat("large-amphora", 1, 1, report), time.monotonic())
    met = names[45]
    change = object_status.update().where(object_status.c.object_id == met).values(reason="another node")
    written = Colliding(
        status_outbox.write_all_observations, lambda seen: [one.object_id for one in seen.get("large", ())], met, there,
        lambda c: c.execute(change),
    )  # fmt: skip
    monkeypatch.setattr(status_outbox, "write_all_observations", written)
    StatusWriter(here, reports).flush()
    (part,) = written.repeated()
    assert met in part
    assert len(part) <= 20
    mine = object_status.c.object_id.in_(names)
    rows = there.read(lambda c: c.execute(sa.select(object_status).where(mine)).all())
    # The pool has no health monitor.
    assert {row.operating for row in rows} == {"NO_MONITOR"}
