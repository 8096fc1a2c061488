# SPDX-License-Identifier: Apache-2.0
"""A new version meets the database of an old one with a load balancer in it: refused in words, upgraded, goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from openstack.exceptions import HttpException

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.tables_fleet import metadata

pytestmark = [pytest.mark.root, pytest.mark.extended]

SERVICES = ("amphora-controller", "amphora-health-manager")
OTHERS = ("octavia-api", "octavia-driver-agent")
SENTENCE = "the schema is 0001, this version requires"


def age(url, tmp_path):
    """Take away what came after revision 0001; the rest of every row stays."""
    first = sa.create_engine(f"sqlite:///{tmp_path}/first.sqlite")
    old = sa.MetaData()
    with first.begin() as connection:
        command.upgrade(migrate.alembic_config(connection), "0001")
        old.reflect(connection)
    first.dispose()
    database = Database(url)
    with database.engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            if table.name not in old.tables:
                connection.exec_driver_sql(f"DROP TABLE {table.name}")
                continue
            for column in set(table.columns.keys()) - set(old.tables[table.name].columns.keys()):
                connection.exec_driver_sql(f"ALTER TABLE {table.name} DROP COLUMN {column}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    database.dispose()


def amphoractl(settings, *words):
    done = subprocess.run(
        [Path(sys.executable).with_name("amphoractl"), *words, "-f", "json"],
        env={**os.environ, **settings.environment()},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_an_old_database_is_refused_upgraded_and_served(cloud, stack, settings, tmp_path):
    balancer = cloud.served("old", ("member1",))
    before = cloud.amphorae(balancer)
    pool, listener = cloud.pool_of(balancer), cloud.listener_of(balancer)
    programs = {program.name: program for program in stack.programs()}
    supervision = stack.supervision
    try:
        for name in (*SERVICES, *OTHERS):
            supervision.stop(name)
        age(settings.database_url, tmp_path)
        for name in SERVICES:
            supervision.start(programs[name])
            cloud.until(lambda name=name: supervision.running(name) is None, f"{name} has ended")
            assert SENTENCE in supervision.tail(name)
            assert "amphoractl database upgrade" in supervision.tail(name)
        supervision.start(programs["octavia-api"])
        supervision.wait_ready(programs["octavia-api"], 60.0)
        with pytest.raises(HttpException, match="could not use its database") as refused:
            cloud.balancers.update_listener(listener, name="renamed")
        # The reference that the user is told leads the operator to the reason.
        reference = str(refused.value).split("this reference: ")[1][:8]
        log = supervision.log("octavia-api").read_text(encoding="utf-8")
        assert any(reference in line and SENTENCE in line for line in log.splitlines())
        assert amphoractl(settings, "database", "status")["Schema"] == "0001"
        newest = schema_check.known_revisions()[-1]
        assert amphoractl(settings, "database", "upgrade") == {"Before": "0001", "After": newest}
    finally:
        stack.up()
    # The API process is the same one: it has looked again.
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
    assert cloud.amphorae(balancer) == before
    lines = amphoractl(settings, "loadbalancer", "history", balancer.id)
    calls = [row["Event"] for row in lines if not row["Event"].startswith("applied")]
    assert calls == ["create member", "create loadbalancer"], "and nothing was lost of its history"
    cloud.until(lambda: amphoractl(settings, "job", "list") == [], "nothing is pending")
