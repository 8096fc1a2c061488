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

from amphora_driver.store import clock
from amphora_driver.store.fleet_tables import process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.store.engine import Database

# Seconds between two signs of life, and after which a row of one that has gone without a word is dropped.
EVERY = 2.0
_FORGOTTEN_AFTER = 3600.0


class Kind(str, Enum):
    """What a process is there for."""

    CONTROLLER = "controller"
    HEALTH_MANAGER = "health-manager"
    PROVIDER_AGENT = "provider-agent"


class Registry:
    """One process's row.

    Args:
        database: where it is.
        name: `process_name()` of this process.
        kind: what it is there for.
    """

    def __init__(self, database: Database, name: str, kind: Kind) -> None:
        self._database = database
        self._name = name
        self._kind = kind
        self._beat = 0

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
            mine = process.c.name == self._name
            if not connection.execute(process.update().where(mine).values(**said)).rowcount:
                whole = {**said, "kind": self._kind.value, "host": socket.gethostname(), "version": version()}
                connection.execute(process.insert().values(name=self._name, started_at=now, draining=False, **whole))
            return bool(connection.execute(sa.select(process.c.draining).where(mine)).scalar())

        return self._database.write(write)

    def leave(self) -> None:
        """It ends well.

        Raises:
            StoreError: the database is away.
        """
        self._database.write(
            lambda connection: connection.execute(process.delete().where(process.c.name == self._name))
        )


def every(connection: sa.Connection, kind: Kind | None = None) -> Sequence[sa.Row[Any]]:
    """All that are known, or those of a kind, by name."""
    query = sa.select(process).order_by(process.c.kind, process.c.name)
    return connection.execute(query if kind is None else query.where(process.c.kind == kind.value)).all()


def drain(connection: sa.Connection, name: str, *, draining: bool) -> bool:
    """Have a process take up nothing new, or go on; False if it is not known."""
    return bool(connection.execute(process.update().where(process.c.name == name).values(draining=draining)).rowcount)


def tidy(connection: sa.Connection, now: float) -> None:
    """Forget those of whom nothing was heard for long."""
    connection.execute(process.delete().where(process.c.seen_at < now - _FORGOTTEN_AFTER))


def version() -> str:
    """Of this installation."""
    try:
        return metadata.version("octavia-amphora-driver")
    except metadata.PackageNotFoundError:
        return "not installed"
