# SPDX-License-Identifier: Apache-2.0
"""Rows as typed objects, long lists in parts of one statement, columns, and hints for indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
# Maximum number of values in one IN (...) list, which database servers limit.
CHUNK = 500


def chunks(values: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """Yield the values in parts of at most `size`."""
    return (values[start : start + size] for start in range(0, len(values), size))


def plain_columns(table: sa.Table, *omitted: str) -> list[sa.Column[Any]]:
    """Return the columns of a table except the omitted and generated ones.

    Generated columns serve as indexes only, and the records of the status page do not contain them.
    """
    return [one for one in table.c if one.computed is None and one.name not in omitted]


def force_index(query: sa.Select[Any], table: sa.Table, name: str) -> sa.Select[Any]:
    """Let MySQL and MariaDB read a table by its index `name`, also if they expect that many rows match."""
    hint = f"FORCE INDEX (ix_{table.name}_{name})"
    return query.with_hint(table, hint, "mysql").with_hint(table, hint, "mariadb")


def to_struct(row: Any, shape: type[S], **given: Any) -> S:
    """Return a row as an object: a field has the given value, or the value of the column with its name."""
    known = {name: getattr(row, name) for name in shape.__struct_fields__ if name not in given}
    return msgspec.convert({**known, **given}, shape)


def load_as(
    connection: sa.Connection, shape: type[S], query: sa.Select[Any], bound: Mapping[str, Any] | None = None
) -> list[S]:
    """Return the rows of a query as objects, see `to_struct`."""
    return [to_struct(row, shape) for row in connection.execute(query, bound)]
