# SPDX-License-Identifier: Apache-2.0
"""What a generation is served without, until it is confirmed.

Invariant: what amphorae do not serve is written down with their confirmations, so that whoever says later that the
generation is served, in another turn or another process, says what it is served without. Once that is said it is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import work

if TYPE_CHECKING:
    from collections.abc import Mapping


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """What could not be served in a generation, as `work.left_out` has it: reasons by object id."""

    generation: int
    reasons: dict[str, str]


def left_out_of(row: sa.Row[tuple[object, ...]]) -> dict[str, str]:
    """What a row of `work` says of its newest generation: reasons by object id."""
    if row.left_out is None:
        return {}
    found = msgspec.json.decode(row.left_out, type=LeftOut)
    return found.reasons if found.generation == row.generation else {}


def leave_out(connection: sa.Connection, load_balancer_id: str, generation: int, reasons: Mapping[str, str]) -> None:
    """Write down what a generation is served without; under the lease."""
    text = msgspec.json.encode(LeftOut(generation=generation, reasons=dict(reasons))).decode()
    _put(connection, load_balancer_id, text)


def forget(connection: sa.Connection, load_balancer_id: str) -> None:
    """It was said; under the lease."""
    _put(connection, load_balancer_id, None)


def _put(connection: sa.Connection, load_balancer_id: str, text: str | None) -> None:
    connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(left_out=text))
