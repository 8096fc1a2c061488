# SPDX-License-Identifier: Apache-2.0
"""All sealed columns under the newest key.

Invariant: a row is only ever changed from what was read to the same secret under the first key: whoever writes it
meanwhile wins, and the next pass looks again. So it may be ended anywhere, repeated, and run on several hosts while
everything works. What no key opens is left as it is, and counted.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.errors import StoreError
from amphora_driver.store.fleet_tables import authority
from amphora_driver.store.tables import amphora, secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amphora_driver.store.engine import Database
    from amphora_driver.store.vault import Vault

# Every column that holds something the vault sealed; tests look for more.
SEALED: tuple[sa.Column[Any], ...] = (secret.c.sealed, amphora.c.heartbeat_key, authority.c.sealed_key)
# Rows read and written at once: a certificate takes kilobytes, and a writing transaction holds others up.
_BATCH = 100


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows of a column are sealed with one key; `key` is its place in the file, None where none of ours fits.

    `fingerprint` is what the key is called.
    """

    column: str
    key: int | None
    fingerprint: str
    rows: int


def count(database: Database, vault: Vault) -> list[Count]:
    """With which keys the rows are sealed: for each column every key of the file, and what fits none if there is any.

    Raises:
        StoreError: the database said no.
    """
    found: list[Count] = []
    names = vault.fingerprints
    for column in SEALED:
        rows: dict[int | None, int] = dict.fromkeys(range(len(names)), 0)
        for batch in _batches(database, column):
            for row in batch:
                place = vault.sealed_with(row[-1])
                rows[place] = rows.get(place, 0) + 1
        found += [
            Count(
                column=str(column),
                key=place,
                fingerprint=names[place] if place is not None and place < len(names) else "",
                rows=number,
            )
            for place, number in rows.items()
        ]
    return found


def reseal(database: Database, vault: Vault, told: Callable[[int], None] = lambda _: None) -> int:
    """Seal every row with the first key.

    Args:
        database: whose rows.
        vault: the keys; the first one seals.
        told: is given the number of rows done so far, after each batch.

    Returns:
        How many rows were changed.

    Raises:
        StoreError: the database said no; what was done until then is done.
    """
    done = 0
    for column in SEALED:
        for batch in _batches(database, column):
            changes = list(_changes(batch, vault))
            if changes:
                done += _write(database, column, changes)
                told(done)
    return done


def _changes(batch: list[sa.Row[Any]], vault: Vault) -> Iterator[tuple[sa.Row[Any], bytes]]:
    """Rows that another key than the first one sealed, with what takes the place of their secret."""
    for row in batch:
        with contextlib.suppress(StoreError):
            again = vault.reseal(row[-1])
            if again != row[-1]:
                yield row, again


def _write(database: Database, column: sa.Column[Any], changes: list[tuple[sa.Row[Any], bytes]]) -> int:
    table = column.table
    keys = list(table.primary_key)

    def work(connection: sa.Connection) -> int:
        changed = 0
        for row, again in changes:
            same = [key == row[place] for place, key in enumerate(keys)]
            query = table.update().where(column == row[-1], *same).values({column.name: again})
            changed += connection.execute(query).rowcount
        return changed

    return database.write(work)


def _batches(database: Database, column: sa.Column[Any]) -> Iterator[list[sa.Row[Any]]]:
    """The rows of a column in the order of their primary key, some at a time: key, then what is sealed."""
    keys = list(column.table.primary_key)
    query = sa.select(*keys, column).where(column.is_not(None)).order_by(*keys).limit(_BATCH)
    after: tuple[Any, ...] | None = None
    while True:
        page = query if after is None else query.where(_beyond(keys, after))
        rows = database.read(lambda connection, page=page: list(connection.execute(page)))  # type: ignore[misc]
        if rows:
            yield rows
        if len(rows) < _BATCH:
            return
        after = tuple(rows[-1][:-1])


def _beyond(keys: list[sa.Column[Any]], after: tuple[Any, ...]) -> sa.ColumnElement[bool]:
    """Rows after this one. Written out, because not every database compares rows by way of an index."""
    first, *others = keys
    beyond: sa.ColumnElement[bool] = first > after[0]
    if not others:
        return beyond
    return sa.or_(beyond, sa.and_(first == after[0], _beyond(others, after[1:])))
