# SPDX-License-Identifier: Apache-2.0
"""Reads of operators in large fleets: a page of a list, and the options of a session of PostgreSQL."""

import itertools
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from read_effort import effort

from amphora_driver.cli import queries
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, desired_object, job, object_status
from amphora_driver.model.enums import Kind
from amphora_driver.sources import Sources
from amphora_driver.store.generations import Op

PAGE, MEMBERS = 100, 3
TABLES = (job, amphora, object_status, desired_object)


def fill(database, number):
    """Insert load balancers with an amphora and some members each."""
    ids = [f"{one * 2654435761 % 2**32:08x}" for one in range(number)]
    kinds = [(one, one, Kind.LOAD_BALANCER.value) for one in ids]
    kinds += [(f"{one}-{n}", one, Kind.MEMBER.value) for one in ids for n in range(MEMBERS)]
    machine = {"role": "STANDALONE", "state": "ready", "confirmed": 3, "heartbeat_key": b"k", "created_at": 1.0}
    objects = [{"load_balancer_id": owner, "kind": kind} for _, owner, kind in kinds]
    names = [one for one, *_ in kinds]
    bodies = [{"id": one, "created": 1, "generation": 1, "body": "{}"} for one in names]
    statuses = [{"object_id": one, "version": 1, "reported": 1, "since": 0.0} for one in names]

    def write(connection):
        works = [{"load_balancer_id": one, "op": Op.APPLY, "generation": 3, "dirty": False} for one in ids]
        connection.execute(job.insert(), works)
        connection.execute(amphora.insert(), [{"id": f"{one}-a", "load_balancer_id": one, **machine} for one in ids])
        connection.execute(desired_object.insert(), [a | b for a, b in zip(objects, bodies, strict=True)])
        connection.execute(object_status.insert(), [a | b for a, b in zip(objects, statuses, strict=True)])

    database.write(write)
    if database.engine.dialect.name == "postgresql":
        # PostgreSQL does the same from time to time by itself.
        with database.engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")


def list_page(connection):
    found = list(itertools.islice(queries.iter_load_balancers(connection), PAGE))
    assert [len(found), len(found[0].amphorae)] == [PAGE, 1]
    assert found[0].status is not None


def test_a_page_of_load_balancers_needs_as_much_in_a_fleet_of_any_size(any_database, monkeypatch):
    monkeypatch.setattr(queries, "_PART", PAGE)
    efforts = {}
    for number in (3 * PAGE, 15 * PAGE):
        fill(any_database, number)
        efforts[number] = effort(any_database, list_page, TABLES, "load_balancer_id")
        any_database.write(lambda c: [c.execute(table.delete()) for table in TABLES])
    assert efforts[15 * PAGE] < 1.5 * efforts[3 * PAGE]


def test_postgresql_compiles_no_statement(postgresql_url):
    database = Database(postgresql_url)
    assert database.read(lambda c: c.exec_driver_sql("SHOW jit").scalar_one()) == "off"
    database.dispose()


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_the_schema_is_read_with_the_connection_of_later_reads(kind, request, tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {request.getfixturevalue(f'{kind}_url')}\n")
    sources = Sources(SimpleNamespace(status_url=None, config_file=[str(path)]), "VARIABLE")
    query = sa.text("SELECT connection_id()" if kind == "mariadb" else "SELECT pg_backend_pid()")
    connections = []

    def note(connection, *_others):
        connections.append(connection)

    for engine in sources.database.engines:
        sa.event.listen(engine, "connect", note)
    sources.recorded_schema()
    sources.read(lambda c: c.execute(query).scalar_one())
    sources.close()
    assert len(connections) == 1
