# SPDX-License-Identifier: Apache-2.0
"""What Octavia has handed over incompletely, and is asked for once it has committed.

Invariant: until it has been read, or was given up, nothing of the load balancer is pushed: half a request must not be
served. A whole tree contains every object of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import DUE_NOW, work
from amphora_driver.model.enums import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

_Objects = list[tuple[Kind, str]]
_ASKED = sa.select(work.c.read_back, work.c.reread).where(work.c.load_balancer_id == sa.bindparam("of"))


def request_object_reread(connection: sa.Connection, load_balancer_id: str, kind: Kind, object_id: str) -> None:
    """Have one listener or pool read after Octavia's commit."""
    row = connection.execute(_ASKED, {"of": load_balancer_id}).one()
    if row.read_back and row.reread is None:
        return
    objects = list(decode_objects(row.reread) or ())
    if (kind, object_id) not in objects:
        objects.append((kind, object_id))
    _set(connection, load_balancer_id, read_back=True, reread=msgspec.json.encode(objects).decode())


def request_tree_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Have the whole tree read after Octavia's commit."""
    _set(connection, load_balancer_id, read_back=True, reread=None)


def decode_objects(reread: str | None) -> Sequence[tuple[Kind, str]] | None:
    """The objects that are to be read, as the column has them; None for the whole tree."""
    return None if reread is None else msgspec.json.decode(reread, type=_Objects)


def finish_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """All that can be known is known: the load balancer may be worked on."""
    _set(connection, load_balancer_id, read_back=False, reread=None, dirty=True, free_at=DUE_NOW)


def cancel_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Nobody needs to know any more."""
    _set(connection, load_balancer_id, read_back=False, reread=None)


def _set(connection: sa.Connection, load_balancer_id: str, **values: object) -> None:
    connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(**values))
