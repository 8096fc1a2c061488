# SPDX-License-Identifier: Apache-2.0
"""All sealed columns under the newest key, and bound to their rows.

Invariant: a row is only ever changed from what was read to the same secret under the first key: whoever writes it
meanwhile wins, and the next pass looks again. So it may be ended anywhere, repeated, and run on several hosts while
everything works. What no key opens, or was sealed for another row, is left as it is, and counted.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, secret
from amphora_driver.database.tables_fleet import authority
from amphora_driver.database.vault import Binding
from amphora_driver.errors import StoreError
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.store import amphorae, ca_records, sealed_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amphora_driver.database.engine import Database
    from amphora_driver.database.vault import SecretLocation, Vault

LOG = logging.getLogger(__name__)
# What a column's values are sealed for, and the columns beside the primary key that say it.
_PLACES: dict[sa.Column[Any], tuple[tuple[sa.Column[Any], ...], Callable[[sa.Row[Any]], SecretLocation]]] = {
    secret.c.sealed: (
        (),
        lambda row: sealed_secrets.secret_location(SecretName(row.object_id, Purpose(row.purpose), row.ref)),
    ),
    amphora.c.heartbeat_key: ((), lambda row: amphorae.key_location(row.id)),
    authority.c.sealed_key: (
        (authority.c.kind, authority.c.certificate),
        lambda row: ca_records.key_location(ca_records.CaKind(row.kind), row.certificate.encode()),
    ),
}
# Every column that holds something the vault sealed; tests look for more.
SEALED: tuple[sa.Column[Any], ...] = tuple(_PLACES)
# Rows read and written at once: a certificate takes kilobytes, and a writing transaction holds others up.
_BATCH = 100


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows of a column are sealed with one key.

    Attributes:
        column: which one.
        key: its line in the file, counted from 0; None where none of ours fits.
        fingerprint: what the key is called.
        rows: how many.
        unbound: how many of those are bound to no row: an older version sealed them.
        misplaced: how many of those were sealed for another row.
    """

    column: str
    key: int | None
    fingerprint: str
    rows: int
    unbound: int = 0
    misplaced: int = 0


def count(database: Database, vault: Vault) -> list[Count]:
    """With which keys the rows are sealed: for each column every key of the file, and what fits none if there is any.

    Raises:
        StoreError: the database said no.
    """
    found: list[Count] = []
    names = vault.fingerprints
    for column in SEALED:
        rows: dict[int | None, list[Binding | None]] = {number: [] for number in range(len(names))}
        for batch in _batches(database, column):
            for row in batch:
                bound = vault.binding(row[-1], _PLACES[column][1](row))
                rows.setdefault(vault.key_index(row[-1]), []).append(bound)
                if bound is Binding.OTHER_ROW:
                    key = ", ".join(map(str, row[: len(column.table.primary_key)]))
                    LOG.warning("%s of row %s was sealed for another row or purpose", column, key)
        found += [
            Count(
                column=str(column),
                key=key,
                fingerprint=names[key] if key is not None and key < len(names) else "",
                rows=len(bindings),
                unbound=bindings.count(Binding.UNBOUND),
                misplaced=bindings.count(Binding.OTHER_ROW),
            )
            for key, bindings in rows.items()
        ]
    return found


def reseal(
    database: Database, vault: Vault, told: Callable[[int], None] = lambda _: None, *, bind: bool = False
) -> int:
    """Seal every row with the first key.

    Args:
        database: whose rows.
        vault: the keys; the first one seals.
        told: is given the number of rows done so far, after each batch.
        bind: rows that are bound to nothing are bound to where they are. Whatever a writer of the database has put
            there in the old form opens from then on.

    Returns:
        How many rows were changed.

    Raises:
        StoreError: the database said no; what was done until then is done.
    """
    done = 0
    for column in SEALED:
        for batch in _batches(database, column):
            changes = list(_changes(column, batch, vault, bind=bind))
            if changes:
                done += _write(database, column, changes)
                told(done)
    return done


def _changes(
    column: sa.Column[Any], batch: list[sa.Row[Any]], vault: Vault, *, bind: bool
) -> Iterator[tuple[sa.Row[Any], bytes]]:
    """Rows that are sealed in another way than they should be, with what takes the place of their secret."""
    for row in batch:
        with contextlib.suppress(StoreError):
            again = vault.reseal(row[-1], _PLACES[column][1](row), bind=bind)
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
    """The rows of a column in the order of their primary key, some at a time: the key first, what is sealed last."""
    keys = list(column.table.primary_key)
    query = sa.select(*keys, *_PLACES[column][0], column).where(column.is_not(None)).order_by(*keys).limit(_BATCH)
    after: tuple[Any, ...] | None = None
    while True:
        page = query if after is None else query.where(_beyond(keys, after))
        rows = database.read(lambda connection, page=page: list(connection.execute(page)))  # type: ignore[misc]
        if rows:
            yield rows
        if len(rows) < _BATCH:
            return
        after = tuple(rows[-1][: len(keys)])


def _beyond(keys: list[sa.Column[Any]], after: tuple[Any, ...]) -> sa.ColumnElement[bool]:
    """Rows after this one. Written out, because not every database compares rows by way of an index."""
    first, *others = keys
    beyond: sa.ColumnElement[bool] = first > after[0]
    if not others:
        return beyond
    return sa.or_(beyond, sa.and_(first == after[0], _beyond(others, after[1:])))
