# SPDX-License-Identifier: Apache-2.0
"""Connections that the server has closed, with and without a test before their next use."""

import pytest
import sqlalchemy as sa

from amphora_driver.database import idle_ping

_OWN_ID = {"mysql": "SELECT CONNECTION_ID()", "postgresql": "SELECT pg_backend_pid()"}
_CLOSE = {"mysql": "KILL {}", "postgresql": "SELECT pg_terminate_backend({})"}


@pytest.fixture
def server(any_database):
    if any_database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connections to a server")
    return any_database


def own_id(connection):
    return connection.scalar(sa.text(_OWN_ID[connection.dialect.name]))


@pytest.mark.parametrize("seconds", [0.0, 3600.0], ids=["tested", "not tested"])
@pytest.mark.parametrize("use", ["read", "write"])
def test_a_closed_connection_is_replaced(server, monkeypatch, seconds, use):
    monkeypatch.setattr(idle_ping, "TESTED_AFTER_SECONDS", seconds)
    first = getattr(server, use)(own_id)
    other = sa.create_engine(server.url)
    with other.connect() as connection:
        connection.execute(sa.text(_CLOSE[connection.dialect.name].format(first)))
    other.dispose()
    assert getattr(server, use)(own_id) != first


@pytest.mark.parametrize(("seconds", "tests"), [(0.0, 2), (3600.0, 0)])
def test_only_an_idle_connection_is_tested(server, monkeypatch, seconds, tests):
    first = server.read(own_id), server.write(own_id)
    monkeypatch.setattr(idle_ping, "TESTED_AFTER_SECONDS", seconds)
    sent = []
    for engine in server.engines:
        ping = engine.dialect.do_ping
        monkeypatch.setattr(engine.dialect, "do_ping", lambda connection, ping=ping: sent.append(1) or ping(connection))
    assert (server.read(own_id), server.write(own_id)) == first
    assert len(sent) == tests
