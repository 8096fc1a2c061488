# SPDX-License-Identifier: Apache-2.0
"""The two transactions on Octavia's schema in MariaDB, also beside a transaction of Octavia."""

import os
import shutil
import threading

import mariadb
import msgspec
import pytest
import sqlalchemy as sa
from octavia.db import models
from unit.adoption import octavia_rows
from unit.adoption.octavia_rows import LB, read, set_status

from amphora_driver.adoption.octavia_state import OctaviaState
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.errors import Conflict

OURS = "haproxy"


@pytest.fixture(scope="module")
def engine():
    if os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")):
        pytest.skip("needs root and mariadbd")
    with mariadb.server("adopt") as (url,):
        made = sa.create_engine(url)
        octavia_rows.fill(made, pair=True)
        yield made
        made.dispose()


@pytest.fixture
def octavia(engine):
    return OctaviaDatabase(engine.url.render_as_string(hide_password=False))


def recorded(octavia):
    """The state as the record of an adoption keeps it."""
    return msgspec.json.decode(msgspec.json.encode(octavia.read(LB)), type=OctaviaState)


def test_ids_and_tags_in_another_spelling_are_unknown(octavia, engine):
    with engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO tags (resource_id, tag) VALUES ('{LB}', 'wave-1')")
    assert octavia.find(tag="wave-1") == octavia.find(project_id="demo") == [LB]
    assert octavia.find(tag="Wave-1") == octavia.find(project_id="Demo") == []
    octavia_rows.write(engine, f"DELETE FROM tags WHERE resource_id = '{LB}'")
    name = "0000abcd-0000-4000-8000-000000000001"
    statuses = {"provisioning_status": "ACTIVE", "operating_status": "ONLINE"}
    with sa.orm.Session(engine) as session, session.begin():
        session.add(models.LoadBalancer(id=name, project_id="other", provider="amphora", enabled=True, **statuses))
    assert octavia.read(name).load_balancer_id == name
    assert octavia.read(name.upper()) is None
    octavia_rows.write(engine, f"DELETE FROM load_balancer WHERE id = '{name}'")


def test_every_row_returns(octavia, engine):
    original = octavia_rows.rows(engine)
    before = recorded(octavia)
    set_status(engine, "PENDING_UPDATE")
    for _ in range(2):
        octavia.take_over(before, OURS)
    assert read(engine, "SELECT provider FROM load_balancer") == [(OURS,)]
    assert read(engine, "SELECT id FROM amphora") == []
    for _ in range(2):
        octavia.insert_amphorae(before, OURS)
    for _ in range(2):
        octavia.give_back(before, OURS)
    set_status(engine, "ACTIVE")
    assert octavia_rows.rows(engine) == original


def test_the_take_over_waits_for_a_transaction_of_octavia_and_sees_its_result(octavia, engine):
    """Octavia's worker ends a change while the adoption commits: the load balancer is ACTIVE, so the lock is lost."""
    before = recorded(octavia)
    set_status(engine, "PENDING_UPDATE")
    raised = []

    def take_over():
        with pytest.raises(Conflict, match="the lock is lost") as caught:
            octavia.take_over(before, OURS)
        raised.append(caught.value)

    with engine.begin() as connection:
        statement = f"SELECT id FROM load_balancer WHERE id = '{LB}' FOR UPDATE"
        connection.exec_driver_sql(statement).all()
        thread = threading.Thread(target=take_over)
        thread.start()
        query = "SELECT COUNT(*) FROM information_schema.innodb_lock_waits"
        while read(engine, query) == [(0,)]:
            assert thread.is_alive()
        connection.exec_driver_sql(f"UPDATE load_balancer SET provisioning_status = 'ACTIVE' WHERE id = '{LB}'")
    thread.join(30)
    assert len(raised) == 1
    assert read(engine, "SELECT provider FROM load_balancer") == [("amphora",)]
