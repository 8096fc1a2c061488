# SPDX-License-Identifier: Apache-2.0
"""Objects that a generation omits, recorded until the generation is confirmed.

Invariant: omitted objects are recorded in the same transaction as the amphorae's confirmations. The job that confirms
the generation may run later, in another process: it reports them to the user and then clears the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import job

if TYPE_CHECKING:
    from collections.abc import Mapping


class OmittedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that a generation omits, as `job.omitted` stores them: reasons by object id."""

    generation: int
    reasons: dict[str, str]


def read_omitted_objects(row: sa.Row[tuple[object, ...]]) -> dict[str, str]:
    """Return the omitted objects of the newest generation from a row of `job`: reasons by object id."""
    if row.omitted is None:
        return {}
    found = msgspec.json.decode(row.omitted, type=OmittedObjects)
    return found.reasons if found.generation == row.generation else {}


def record_omitted_objects(
    connection: sa.Connection, load_balancer_id: str, generation: int, reasons: Mapping[str, str]
) -> None:
    """Record the omitted objects of a generation; the caller holds the lease."""
    text = msgspec.json.encode(OmittedObjects(generation=generation, reasons=dict(reasons))).decode()
    _store(connection, load_balancer_id, text)


def clear_omitted_objects(connection: sa.Connection, load_balancer_id: str) -> None:
    """Clear the record of omitted objects; the caller holds the lease."""
    _store(connection, load_balancer_id, None)


def _store(connection: sa.Connection, load_balancer_id: str, text: str | None) -> None:
    connection.execute(job.update().where(job.c.load_balancer_id == load_balancer_id).values(omitted=text))
