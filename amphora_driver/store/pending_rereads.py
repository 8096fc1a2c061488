# SPDX-License-Identifier: Apache-2.0
"""Objects that Octavia delivered incompletely, to be read again after Octavia's commit.

Invariant: the controller pushes nothing of the load balancer until the read succeeds or is cancelled, because an
incomplete request must not be served. A reread of the complete tree includes every object.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import DUE_NOW, job
from amphora_driver.model.enums import Kind
from amphora_driver.store.generations import update_job

_ASKED = sa.select(job.c.read_back, job.c.reread).where(job.c.load_balancer_id == sa.bindparam("of"))


def request_object_reread(connection: sa.Connection, load_balancer_id: str, kind: Kind, object_id: str) -> None:
    """Request a read of one object after Octavia's commit."""
    row = connection.execute(_ASKED, {"of": load_balancer_id}).one()
    if row.read_back and row.reread is None:
        return
    objects = list(decode_objects(row.reread) or ())
    if (kind, object_id) not in objects:
        objects.append((kind, object_id))
    update_job(connection, load_balancer_id, read_back=True, reread=msgspec.json.encode(objects).decode())


def request_tree_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Request a read of the complete tree after Octavia's commit."""
    update_job(connection, load_balancer_id, read_back=True, reread=None)


def decode_objects(reread: str | None) -> Sequence[tuple[Kind, str]] | None:
    """Decode the column `job.reread`: the objects to read; None for the complete tree."""
    return None if reread is None else msgspec.json.decode(reread, type=list[tuple[Kind, str]])


def finish_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """End the reread and make the load balancer due."""
    update_job(connection, load_balancer_id, read_back=False, reread=None, dirty=True, due_at=DUE_NOW)


def cancel_reread(connection: sa.Connection, load_balancer_id: str) -> None:
    """Cancel the reread, because the load balancer is being deleted."""
    update_job(connection, load_balancer_id, read_back=False, reread=None)
