# SPDX-License-Identifier: Apache-2.0
"""Lost database connections: a commit without an answer happens once."""

import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from faulty_proxy import FaultyProxy
from free_ports import free_ports

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty, job, request
from amphora_driver.database.tables_fleet import metadata
from amphora_driver.errors import StoreError
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.queue.jobs import Jobs
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def line(mariadb_url):
    url = sa.make_url(mariadb_url)
    with FaultyProxy(url.query["unix_socket"]) as line:
        line.url = str(url.update_query_dict({"unix_socket": line.path}))
        yield line


@pytest.fixture
def database(line):
    database = Database(line.url)
    yield database
    line.at_commit = None
    line.thaw()
    database.write(lambda c: [c.execute(table.delete()) for table in reversed(metadata.sorted_tables)])
    database.dispose()


@pytest.fixture
def recorder(database):
    return RequestRecorder(database, lambda node: None)


def history(database):
    rows = database.read(lambda c: c.execute(sa.select(request.c.action, request.c.generation)).all())
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_call_with_an_unanswered_commit_is_recorded_once(line, database, recorder, moment):
    line.at_commit = moment
    recorder.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)
    assert line.at_commit is None, "the connection was cut"
    line.at_commit = moment
    recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": "new"})
    assert line.at_commit is None
    assert history(database) == [("create loadbalancer", 1), ("update loadbalancer", 2)]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_write_that_is_not_repeatable_fails_with_an_error(line, database, moment):
    database.write(lambda c: c.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0)))
    line.at_commit = moment
    with pytest.raises(StoreError, match="determine whether"):
        database.write(lambda c: c.execute(duty.update().values(epoch=duty.c.epoch + 1)))
    counted = database.read(lambda c: c.execute(sa.select(duty.c.epoch)).scalar_one())
    assert counted == (moment == "after")


def test_a_claim_with_an_unanswered_commit_expires(line, database, recorder):
    recorder.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)
    line.at_commit = "after"
    with pytest.raises(StoreError, match="determine whether"):
        Jobs(database, "one", 30).claim()
    row = database.read(lambda c: c.execute(sa.select(job.c.owner, job.c.epoch)).one())
    assert tuple(row) == ("one", 1), "no process works on the job before the lease expires"
    database.write(lambda c: c.execute(job.update().values(leased_until=0.0)))
    assert Jobs(database, "two", 30).claim("lb").epoch == 2


def test_the_connection_pool_drops_dead_connections(line, database):
    for use in (database.read, database.write):
        use(lambda c: c.execute(sa.select(duty)).all())
    line.cut()
    assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
    database.write(lambda c: c.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0)))


def test_an_absent_server_is_an_error_at_once():
    (port,) = free_ports(1)
    database = Database(f"mysql+pymysql://root@127.0.0.1:{port}/x")
    begun = time.monotonic()
    for call in (database.read, database.write):
        with pytest.raises(StoreError):
            call(lambda c: c.execute(sa.select(duty)).all())
    # Each call connects twice without a wait; the bound allows for a busy machine.
    assert time.monotonic() - begun < 5
    database.dispose()


def test_a_hanging_server_causes_a_time_out(line):
    database = Database(line.url, answer_timeout=1.0)
    database.write(lambda c: c.execute(sa.select(duty)).all())
    line.freeze()
    begun = time.monotonic()
    with pytest.raises(StoreError):
        database.write(lambda c: c.execute(sa.select(duty)).all())
    # The check of the old connection and a new connection take a second each; the bound allows for a busy machine.
    assert time.monotonic() - begun < 15
    line.thaw()
    assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
    database.dispose()


def test_a_hanging_postgresql_server_causes_a_time_out(postgresql_url):
    """The database driver has no time-out for answers, and the server's time-out needs a running server."""
    url = sa.make_url(postgresql_url)
    with FaultyProxy(f"{url.query['host']}/.s.PGSQL.5432") as line:
        # The database driver looks for a socket of that name in the folder.
        folder = Path(line.path).parent
        (alias := folder / ".s.PGSQL.5432").symlink_to(line.path)
        database = Database(str(url.update_query_dict({"host": str(folder)})), answer_timeout=1.0)
        assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
        line.freeze()
        begun = time.monotonic()
        with pytest.raises(StoreError):
            database.read(lambda c: c.execute(sa.select(duty)).all())
        assert time.monotonic() - begun < 20
        line.thaw()
        assert database.read(lambda c: c.execute(sa.select(duty)).all()) == []
        database.dispose()
        alias.unlink()


@pytest.mark.parametrize("name", ["mariadb", "postgresql"])
def test_all_processes_use_the_clock_of_the_server(request, name):
    database = Database(request.getfixturevalue(f"{name}_url"))
    own = time.time()
    assert abs(database.now() - own) < 5, "server and test use the same clock"
    # A process with a wrong clock: only the database knows the time.
    database._clock_offset = (database._clock_offset[0] + 3600, time.monotonic())
    assert database.now() > own + 3000
    jobs = Jobs(database, "one", 30)
    lb = {"load_balancer_id": "lb", "op": "apply", "generation": 1, "epoch": 0}
    database.write(lambda c: c.execute(job.insert().values(**lb, due_at=time.time() + 20)))
    try:
        assert jobs.claim() is None, "the retry time has not passed by the server's clock"
        database.write(lambda c: c.execute(job.update().values(due_at=time.time() - 1)))
        assert jobs.claim("another") is None
        lease = jobs.claim("lb")
        until = database.read(lambda c: c.execute(sa.select(job.c.leased_until)).scalar_one())
        assert 20 < until - time.time() < 40
        jobs.complete(lease, 1)
    finally:
        database.write(lambda c: c.execute(job.delete()))
        database.dispose()
