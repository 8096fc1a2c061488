# SPDX-License-Identifier: Apache-2.0
"""Idempotent migration steps.

Invariant: each step does nothing if the database already has its result. MariaDB commits before and after each
statement that changes a schema, so an interrupted upgrade leaves some steps done. The upgrade then starts again from
the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op


def create_table(name: str, *columns: sa.schema.SchemaItem) -> None:
    """Create a table unless it exists."""
    if not _inspector().has_table(name):
        op.create_table(name, *columns)


def create_index(name: str, table: str, columns: Sequence[str]) -> None:
    """Create an index unless it exists."""
    if name not in {one["name"] for one in _inspector().get_indexes(table)}:
        op.create_index(name, table, list(columns), unique=False)


def add_column(table: str, column: sa.Column[Any]) -> None:
    """Add a column unless it exists."""
    if column.name not in {one["name"] for one in _inspector().get_columns(table)}:
        op.add_column(table, column)


def drop_column(table: str, name: str) -> None:
    """Drop a column if it exists; only in a contract migration."""
    if name in {one["name"] for one in _inspector().get_columns(table)}:
        op.drop_column(table, name)


def _inspector() -> sa.Inspector:
    # An inspector caches its results, so each step needs a new one.
    return sa.inspect(op.get_bind())
