# SPDX-License-Identifier: Apache-2.0
"""Registry of the control plane's processes: each process updates its own row.

Invariant: a row is a heartbeat, never a lease. No decision that two processes could make at the same time depends on a
row. `beat` grows only while the process works, and is compared with an earlier value, not with a clock.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from enum import Enum
from typing import Any

import sqlalchemy as sa

from amphora_driver.database import clock, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import drained_host, process
from amphora_driver.installation import installed_version

# Each process writes a heartbeat every HEARTBEAT_INTERVAL seconds. The row of a process is deleted after _PURGED_AFTER
# seconds without a heartbeat.
HEARTBEAT_INTERVAL = 2.0
_PURGED_AFTER = 3600.0


class ProcessKind(str, Enum):
    """Kinds of processes."""

    CONTROLLER = "controller"
    HEALTH_MANAGER = "health-manager"
    PROVIDER_AGENT = "provider-agent"


class ProcessRegistration:
    """The registry row of this process; `name` is its `process_name()`."""

    def __init__(self, database: Database, name: str, kind: ProcessKind) -> None:
        self._database = database
        self._name = name
        self._kind = kind
        self._beat = 0
        # Last known drain state of this process. If another process deletes the row of this process, the new row gets
        # this state.
        self._draining = False

    def heartbeat(self, *, jobs: int = 0, working: bool = True) -> bool:
        """Update the row of this process; return whether the process is drained and must not accept new jobs.

        `beat` increases only if the process is `working`.
        """
        self._beat += working

        def write(connection: sa.Connection) -> bool:
            now = clock.now(connection)
            values = {"seen_at": now, "beat": self._beat, "jobs": jobs}
            is_own, host = process.c.name == self._name, socket.gethostname()
            if not connection.execute(process.update().where(is_own).values(**values)).rowcount:
                row = {**values, "kind": self._kind.value, "host": host, "version": installed_version()}
                row |= {"name": self._name, "started_at": now, "draining": self._draining}
                row["schema_revision"] = schema_check.known_revisions()[-1]
                connection.execute(process.insert().values(**row))
            self._draining = bool(connection.execute(sa.select(process.c.draining).where(is_own)).scalar())
            if self._draining:
                return True
            return host in list_drained_hosts(connection)

        return self._database.write(write)

    def deregister(self) -> None:
        """Delete the row, because the process ends."""
        mine = process.delete().where(process.c.name == self._name)
        self._database.write(lambda connection: connection.execute(mine))


def list_processes(connection: sa.Connection, kind: ProcessKind | None = None) -> Sequence[sa.Row[Any]]:
    """Return all processes, or those of one kind, ordered by name."""
    query = sa.select(process).order_by(process.c.kind, process.c.name)
    return connection.execute(query if kind is None else query.where(process.c.kind == kind.value)).all()


def set_process_draining(connection: sa.Connection, name: str, *, draining: bool) -> bool:
    """Drain a controller until its process ends, or resume it; return False if it is unknown."""
    mine = process.c.name == name, process.c.kind == ProcessKind.CONTROLLER.value
    return bool(connection.execute(process.update().where(*mine).values(draining=draining)).rowcount)


def set_host_draining(connection: sa.Connection, host: str, asked_by: str | None, *, draining: bool) -> bool:
    """Drain or resume all controllers of a host, also controllers that start later.

    A resumption includes controllers that were drained one by one. Return whether anything changed.
    """
    is_drained = host in list_drained_hosts(connection)
    if draining and not is_drained:
        connection.execute(drained_host.insert().values(host=host, since=clock.now(connection), asked_by=asked_by))
    elif is_drained and not draining:
        connection.execute(drained_host.delete().where(drained_host.c.host == host))
    theirs = process.c.host == host, process.c.kind == ProcessKind.CONTROLLER.value, process.c.draining != draining
    changed = connection.execute(process.update().where(*theirs).values(draining=draining)).rowcount
    return bool(changed) or is_drained != draining


def list_drained_hosts(connection: sa.Connection) -> dict[str, float]:
    """Return the drained hosts, with the time of their drain (seconds since 1970)."""
    return dict(connection.execute(sa.select(drained_host.c.host, drained_host.c.since)).tuples().all())


def list_duties(connection: sa.Connection) -> dict[str, list[str]]:
    """Return the current duties of each process, by its name."""
    found: dict[str, list[str]] = {}
    held = sa.select(duty.c.owner, duty.c.name).where(duty.c.leased_until > clock.now(connection))
    for row in connection.execute(held.order_by(duty.c.name)):
        found.setdefault(row.owner, []).append(row.name)
    return found


def remove_dead_process(connection: sa.Connection, name: str) -> None:
    """Delete the row of a dead process and release its duties."""
    connection.execute(duty.update().where(duty.c.owner == name).values(leased_until=0.0))
    connection.execute(process.delete().where(process.c.name == name))


def purge_silent_processes(connection: sa.Connection, now: float) -> None:
    """Delete the rows of processes without a recent heartbeat."""
    connection.execute(process.delete().where(process.c.seen_at < now - _PURGED_AFTER))
