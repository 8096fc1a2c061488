# SPDX-License-Identifier: Apache-2.0
"""The processes of the control plane, as they say themselves that they live.

Invariant: a row is a sign of life, never a lease: nothing is decided by it that two processes could decide at once.
`beat` grows only while its process does what it is there for, and is to be compared with itself, not with a clock.
"""

from __future__ import annotations

import socket
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import drained_host, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.database.engine import Database

# Seconds between two signs of life, and after which a row of one that has gone without a word is dropped.
HEARTBEAT_INTERVAL = 2.0
_PURGED_AFTER = 3600.0


class ProcessKind(str, Enum):
    """What a process is there for."""

    CONTROLLER = "controller"
    HEALTH_MANAGER = "health-manager"
    PROVIDER_AGENT = "provider-agent"


class ProcessRegistration:
    """One process's row.

    Args:
        database: where it is.
        name: `process_name()` of this process.
        kind: what it is there for.
    """

    def __init__(self, database: Database, name: str, kind: ProcessKind) -> None:
        self._database = database
        self._name = name
        self._kind = kind
        self._beat = 0
        # What was said to it last: a row that others have dropped is written anew with that.
        self._draining = False

    def sign(self, *, jobs: int = 0, does_its_duty: bool = True) -> bool:
        """Say that this process lives; returns whether it is to take up nothing new.

        Args:
            jobs: what it works on.
            does_its_duty: otherwise `beat` stays.

        Raises:
            StoreError: the database is away.
        """
        self._beat += does_its_duty

        def write(connection: sa.Connection) -> bool:
            now = clock.now(connection)
            said = {"seen_at": now, "beat": self._beat, "jobs": jobs}
            mine, host = process.c.name == self._name, socket.gethostname()
            if not connection.execute(process.update().where(mine).values(**said)).rowcount:
                whole = {**said, "kind": self._kind.value, "host": host, "version": installed_version()}
                whole |= {"name": self._name, "started_at": now, "draining": self._draining}
                connection.execute(process.insert().values(**whole))
            self._draining = bool(connection.execute(sa.select(process.c.draining).where(mine)).scalar())
            if self._draining:
                return True
            asked = sa.select(drained_host.c.host).where(drained_host.c.host == host)
            return connection.execute(asked).first() is not None

        return self._database.write(write)

    def leave(self) -> None:
        """It ends well.

        Raises:
            StoreError: the database is away.
        """
        self._database.write(
            lambda connection: connection.execute(process.delete().where(process.c.name == self._name))
        )


def list_processes(connection: sa.Connection, kind: ProcessKind | None = None) -> Sequence[sa.Row[Any]]:
    """All that are known, or those of a kind, by name."""
    query = sa.select(process).order_by(process.c.kind, process.c.name)
    return connection.execute(query if kind is None else query.where(process.c.kind == kind.value)).all()


def set_process_draining(connection: sa.Connection, name: str, *, draining: bool) -> bool:
    """Have a controller take up nothing new, or go on; False if it is not known. It ends with the process."""
    mine = process.c.name == name, process.c.kind == ProcessKind.CONTROLLER.value
    return bool(connection.execute(process.update().where(*mine).values(draining=draining)).rowcount)


def set_host_draining(connection: sa.Connection, host: str, asked_by: str | None, *, draining: bool) -> bool:
    """Have a host's controllers take up nothing new, or go on: those that run now, and those that start there later.

    Args:
        connection: of a writing transaction.
        host: as its processes call it.
        asked_by: who.
        draining: otherwise they go on, whatever was said of each of them.

    Returns:
        Whether that changed anything.
    """
    known = connection.execute(sa.select(drained_host.c.host).where(drained_host.c.host == host)).first()
    if draining and known is None:
        connection.execute(drained_host.insert().values(host=host, since=clock.now(connection), asked_by=asked_by))
    elif known is not None and not draining:
        connection.execute(drained_host.delete().where(drained_host.c.host == host))
    theirs = process.c.host == host, process.c.kind == ProcessKind.CONTROLLER.value, process.c.draining != draining
    changed = connection.execute(process.update().where(*theirs).values(draining=draining)).rowcount
    return bool(changed) or (known is None) == draining


def list_drained_hosts(connection: sa.Connection) -> dict[str, float]:
    """Hosts whose controllers take up nothing new, and since when (seconds since 1970)."""
    return dict(connection.execute(sa.select(drained_host.c.host, drained_host.c.since)).tuples().all())


def list_duties(connection: sa.Connection) -> dict[str, list[str]]:
    """The duties that each process performs now, by its name."""
    found: dict[str, list[str]] = {}
    held = sa.select(duty.c.owner, duty.c.name).where(duty.c.leased_until > clock.now(connection))
    for row in connection.execute(held.order_by(duty.c.name)):
        found.setdefault(row.owner, []).append(row.name)
    return found


def remove_dead_process(connection: sa.Connection, name: str) -> None:
    """A process is known to be dead: others may have its duties."""
    connection.execute(duty.update().where(duty.c.owner == name).values(leased_until=0.0))
    connection.execute(process.delete().where(process.c.name == name))


def purge_silent_processes(connection: sa.Connection, now: float) -> None:
    """Forget those of whom nothing was heard for long."""
    connection.execute(process.delete().where(process.c.seen_at < now - _PURGED_AFTER))


def installed_version() -> str:
    """Of this installation."""
    try:
        return metadata.version("octavia-amphora-driver")
    except metadata.PackageNotFoundError:
        return "not installed"
