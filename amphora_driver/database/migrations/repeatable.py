# SPDX-License-Identifier: Apache-2.0
"""Steps of migrations that may be repeated.

Invariant: each does nothing if the database has the result. MariaDB commits before and after each such statement, so
that an upgrade that was ended half way left some of them done; it is then run again from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

if TYPE_CHECKING:
    from collections.abc import Sequence


def create_table(name: str, *columns: sa.schema.SchemaItem) -> None:
    """A new table."""
    if not _look().has_table(name):
        op.create_table(name, *columns)


def create_index(name: str, table: str, columns: Sequence[str]) -> None:
    """A new index."""
    if name not in {one["name"] for one in _look().get_indexes(table)}:
        op.create_index(name, table, list(columns), unique=False)


def add_column(table: str, column: sa.Column[Any]) -> None:
    """One more column."""
    if column.name not in {one["name"] for one in _look().get_columns(table)}:
        op.add_column(table, column)


def _look() -> sa.Inspector:
    # A new one each time: an inspector remembers what it saw.
    return sa.inspect(op.get_bind())
