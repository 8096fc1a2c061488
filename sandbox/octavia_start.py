# SPDX-License-Identifier: Apache-2.0
"""Octavia's API and driver agent on SQLite, without a change to Octavia.

Invariant: a file lock serializes write transactions on Octavia's database. SQLite has no SELECT … FOR UPDATE, and it
refuses the change of a read transaction to a write transaction. Therefore the outermost transaction of a thread takes
the lock and begins as a write transaction. A nested session (Octavia reads a flavor) stays a read transaction, because
the thread would wait for its own lock.

SQLAlchemy refuses Octavia's default of `[database] pool_timeout` for SQLite files.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from oslo_config import cfg
from sqlalchemy import engine, event, orm, pool
from wsme import types as wsme_types  # type: ignore[import-untyped]

from sandbox.local_requests import Application, reject_remote_requests

_PROJECT = "sandbox"


class _WriteLock(threading.local):
    """The write lock of this thread: the open lock file and the connection that holds it."""

    lock: int | None = None
    holder: int | None = None


_write_lock = _WriteLock()


def _is_octavia_database(connection: Any) -> bool:
    url = connection.engine.url
    return bool(url.get_backend_name() == "sqlite" and str(url) == cfg.CONF.database.connection)


def _begin(connection: Any) -> None:
    # The sandbox sends BEGIN itself, because it must take the write lock before BEGIN. `in_transaction` prevents a
    # second BEGIN by oslo.db.
    if not _is_octavia_database(connection) or "in_transaction" in connection.info:
        return
    connection.info["in_transaction"] = True
    mine = id(connection.connection.driver_connection)
    if _write_lock.lock is None:
        _write_lock.lock = os.open(
            f"{connection.engine.url.database}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        _write_lock.holder = mine
        fcntl.flock(_write_lock.lock, fcntl.LOCK_EX)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _write_lock.holder == mine else "BEGIN")


def _checkin(dbapi_connection: Any, _record: Any) -> None:
    # The write lock is released when the connection returns to the pool, because SQLAlchemy raises the event "commit"
    # before the database commits.
    if _write_lock.lock is not None and _write_lock.holder == id(dbapi_connection):
        os.close(_write_lock.lock)
        _write_lock.lock = _write_lock.holder = None


def _sort_by_definition(kind: type, attributes: list[Any]) -> None:
    """Sort the attributes of an API type in the order of their definition.

    WSME parses the source of each class to find this order. The parser takes more than half of the start time of the
    API and of the driver agent. In current versions of Python, a class keeps the order.
    """
    order = [name for one in kind.__mro__ for name in vars(one)]
    attributes.sort(key=lambda attribute: order.index(attribute.key))


def prepare() -> None:
    """Install the SQLite lock and the fast start. Other modules of Octavia are imported after this call."""
    wsme_types.sort_attributes = _sort_by_definition
    from octavia.common import config  # noqa: F401, PLC0415 - the import registers the options

    cfg.CONF.set_override("pool_timeout", None, group="database")
    event.listen(engine.Engine, "begin", _begin)
    event.listen(pool.Pool, "checkin", _checkin)


def api() -> Application:
    """The WSGI application for gunicorn."""
    prepare()
    from octavia.api import app  # noqa: PLC0415 - `prepare` must run first

    from sandbox import octavia_schema  # noqa: PLC0415 - `prepare` must run first

    application = app.setup_app(argv=["octavia-api", "--config-file", os.environ["OCTAVIA_CONF"]])
    octavia_schema.ensure_schema()

    def with_project(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # Octavia requires a project id, but clients with the auth type "none" send no project id. So the sandbox adds a
        # fixed project id.
        environ.setdefault("HTTP_X_PROJECT_ID", _PROJECT)
        environ.setdefault("HTTP_X_USER_ID", _PROJECT)
        return application(environ, start_response)  # type: ignore[no-any-return]

    return reject_remote_requests(with_project)


def driver_agent() -> int:
    """Run octavia-driver-agent.

    The agent forks for every call. All forks share the modules and statements that the agent loads before the fork.
    """
    prepare()
    from octavia.cmd import driver_agent as agent  # noqa: PLC0415 - `prepare` must run first
    from octavia.common import service  # noqa: PLC0415 - `prepare` must run first
    from octavia.db import models  # noqa: F401, PLC0415 - configure_mappers needs these classes

    orm.configure_mappers()
    sys.argv = ["octavia-driver-agent", "--config-file", os.environ["OCTAVIA_CONF"]]
    read_options = service.prepare_service

    def read_options_and_compile(arguments: list[str]) -> None:
        read_options(arguments)
        _compile_statements()

    # octavia-driver-agent calls `prepare_service` before its first fork. The replacement also compiles the SQL
    # statements, which all forked processes share.
    service.prepare_service = read_options_and_compile
    return int(agent.main() or 0)


def _compile_statements() -> None:
    """Compile the SQL statements of a status report before the first fork.

    The function reports the status of an object that does not exist. Without this report, every fork compiles the
    statements: a call takes 55 ms of processor time instead of 26 ms. Forks must not share the connection.
    """
    from octavia.api.drivers.driver_agent import driver_updater  # noqa: PLC0415 - `prepare` must run first
    from octavia.db import api as database  # noqa: PLC0415 - `prepare` must run first

    updater = driver_updater.DriverUpdater()
    unknown = {"id": "00000000-0000-0000-0000-000000000000", "operating_status": "OFFLINE"}
    updater.update_loadbalancer_status({"loadbalancers": [unknown], "listeners": [dict(unknown)]})
    updater.db_session.close()
    database.get_engine().dispose()


if __name__ == "__main__":
    sys.exit(driver_agent())
