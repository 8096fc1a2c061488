# SPDX-License-Identifier: Apache-2.0
"""The fleet queries on MariaDB and PostgreSQL, where some statements have another meaning."""

import os
import shutil

import mariadb
import postgresql
import pytest
import sqlalchemy as sa
from fleet_rows import NOW, identifier, rows, write

from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.errors import StoreError
from amphora_driver.telemetry import fleet_queries
from amphora_driver.telemetry.records import Scope, read_records
from amphora_driver.telemetry.snapshot_cache import open_read_only


@pytest.fixture(scope="module", params=["mariadb", "postgresql"])
def server_url(request):
    if request.param == "mariadb":
        if os.geteuid() != 0 or not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")):
            pytest.skip("needs root and mariadbd")
        with mariadb.server("telemetry") as (url,):
            yield url
        return
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with postgresql.server("telemetry") as (url,):
        yield url


def test_the_fleet_is_read_and_the_connection_cannot_write(server_url):
    migrate.upgrade(server_url)
    found = rows(3)
    found["job"][0] |= {"generation": 6}
    found["request"] = [
        {"load_balancer_id": identifier(1), "action": "update", "object_id": identifier(1), "generation": 6}
        | {"accepted_at": NOW}
    ]
    found["failover"] = [{"load_balancer_id": identifier(1), "cause": "silent", "begun_at": NOW}]
    found["failover_event"] = [{"failover_id": 1, "at": NOW, "word": "begun"}]
    writer = Database(server_url)
    cache = open_read_only(server_url)
    try:
        write(writer, found)
        told = fleet_queries.read_fleet(cache)
        assert (len(told.balancers), len(told.amphorae)) == (3, 6)
        assert [one.accepted_at for one in told.balancers] == [NOW, None, None]
        assert [one.step for one in told.failovers] == ["begun"]
        assert fleet_queries.list_ended_failovers(cache, 0.0)[0] == ()
        counts = {"job": 3, "amphora": 6, "failover": 1, "request": 1, "desired_object": 3, "object_status": 3}
        documents = (
            (Scope(), counts),
            (Scope(load_balancer=identifier(1)), {**dict.fromkeys(counts, 1), "amphora": 2, "failover_event": 1}),
            (Scope(failover=1), {"failover": 1, "failover_event": 1}),
        )
        for scope, expected in documents:
            read = read_records(cache, scope, "1", {}).tables
            assert {name: len(read[name].rows) for name in expected} == expected
        for use in (cache.write, cache.read):
            with pytest.raises(StoreError, match=r"(?i)read.?only"):
                use(lambda connection: connection.execute(sa.text("DELETE FROM job")))
    finally:
        cache.dispose()
        writer.dispose()
