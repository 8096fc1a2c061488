# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON texts: many rows in one text, or the columns of one row in one text.

A client in Python needs most of the time of a read for the rows of a large result, and for the description of each
column of a small result. A decoder in C needs a tenth of it for the same values in JSON. `join_rows` reads tens of
thousands of rows as at most 256 texts, and `JsonRow` reads many columns as one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from amphora_driver.errors import StoreError

T = TypeVar("T", bound=msgspec.Struct)


class JsonRow(FunctionElement[str]):
    """The values of columns as a JSON array, in text; a Boolean may be the number 0 or 1."""

    name = "json_row"
    inherit_cache = True
    type = sa.Text()


@compiles(JsonRow)
def _compile(element: Any, compiler: Any, **options: Any) -> str:
    return f"json_array({compiler.process(element.clauses, **options)})"


@compiles(JsonRow, "sqlite")
def _compile_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    # SQLite's JSON functions keep 15 digits of a number, but a time in seconds with microseconds has 16. So `printf`
    # formats each number with 17 digits.
    values = []
    for clause in element.clauses:
        value = compiler.process(clause, **options)
        if isinstance(clause.type, sa.Float):
            value = f"json(CASE WHEN {value} IS NULL THEN 'null' ELSE printf('%!.17g', {value}) END)"
        values.append(value)
    return f"json_array({', '.join(values)})"


@compiles(JsonRow, "postgresql")
def _compile_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"CAST(json_build_array({compiler.process(element.clauses, **options)}) AS TEXT)"


def join_rows(
    source: sa.FromClause, key: sa.ColumnElement[str], *columns: sa.ColumnElement[Any], limit: int | None = None
) -> sa.Select[Any]:
    """Return a query of rows for `read_rows`.

    Args:
        source: the joined tables.
        key: the id that divides the rows into groups by its first two characters.
        columns: the columns in the order of the fields of the rows.
        limit: largest number of rows, those with the smallest keys; None for all.
    """
    joined = sa.func.aggregate_strings(JsonRow(*columns), ",").label("joined")
    columns_of_group: tuple[sa.ColumnElement[Any], ...] = (sa.func.count().label("number"), joined)
    query = sa.select(*columns_of_group).select_from(source).group_by(sa.func.substr(key, 1, 2))
    if limit is None:
        return query
    # The subquery finds the first key beyond the limit in the index. So the server does not sort whole rows.
    after = sa.select(key).order_by(key).limit(1).offset(limit).correlate(None).scalar_subquery()
    return query.where(sa.or_(after.is_(None), key < after))


def read_rows(connection: sa.Connection, query: sa.Select[Any], kind: type[T]) -> list[T]:
    """Return the rows of `join_rows` in no order. `kind` is a struct with `array_like`.

    Raises:
        StoreError: the server has shortened a text.
    """
    decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
    found: list[T] = []
    for number, joined in connection.execute(query):
        try:
            rows = decode(f"[{joined}]")
        except msgspec.DecodeError as error:
            raise _shortened(str(error)) from error
        if len(rows) != number:
            raise _shortened(f"{len(rows)} of {number} rows arrived")
        found += rows
    return found


def _shortened(happened: str) -> StoreError:
    remedy = "Raise max_allowed_packet and group_concat_max_len of the database server to at least 16 MiB."
    return StoreError("read the rows of the fleet", f"the server has shortened a text ({happened})", remedy)
