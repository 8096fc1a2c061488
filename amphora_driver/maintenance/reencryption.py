# SPDX-License-Identifier: Apache-2.0
"""Re-encrypts all sealed columns with the newest key.

Invariant: each update replaces exactly the value that was read by the same secret under the first key. A concurrent
write wins, and the next run handles its row. A run may therefore be interrupted and repeated, and several hosts may run
it during normal operation. A value that no key opens, or that was sealed for another row, stays and is counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, secret
from amphora_driver.database.tables_fleet import certificate_authority
from amphora_driver.database.vault import SecretLocation, Vault
from amphora_driver.errors import StoreError
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.store import amphorae, ca_records, sealed_secrets

LOG = logging.getLogger(__name__)
# For each encrypted column: additional columns to read, and a function that returns the location of a row's encrypted
# value. The vault needs this location to decrypt the value.
_LOCATIONS: dict[sa.Column[Any], tuple[tuple[sa.Column[Any], ...], Callable[[sa.Row[Any]], SecretLocation]]] = {
    secret.c.sealed: (
        (),
        lambda row: sealed_secrets.secret_location(SecretName(row.object_id, Purpose(row.purpose), row.ref)),
    ),
    amphora.c.heartbeat_key: ((), lambda row: amphorae.key_location(row.id)),
    certificate_authority.c.sealed_key: (
        (certificate_authority.c.kind, certificate_authority.c.certificate),
        lambda row: ca_records.key_location(ca_records.CaKind(row.kind), row.certificate.encode()),
    ),
}
# The encrypted columns. A unit test checks that no encrypted column of the tables is missing here.
SEALED: tuple[sa.Column[Any], ...] = tuple(_LOCATIONS)
# Maximum number of rows in one transaction, because other writers wait until the transaction ends.
_BATCH = 100
# Maximum number of rows of a read without a write.
_PAGE = 2000


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Number of rows of a column with one key; `misplaced` of them were sealed for another row.

    `key` is the line of the key in the file, counted from 0; None for rows that no key of the file opens.
    """

    column: str
    key: int | None
    fingerprint: str
    rows: int
    misplaced: int = 0


def count_key_usage(database: Database, vault: Vault) -> list[KeyUsage]:
    """Return the key usage of each column, by key; rows that no key opens have an entry of their own.

    Raises:
        StoreError: the database refused the query.
    """
    found: list[KeyUsage] = []
    names = vault.fingerprints
    for column in SEALED:
        rows: dict[int | None, list[bool]] = {number: [] for number in range(len(names))}
        locate = _LOCATIONS[column][1]
        for batch in _batches(database, column, _PAGE):
            used = vault.find_keys((row[-1], locate(row)) for row in batch)
            for row, (number, misplaced) in zip(batch, used, strict=True):
                rows.setdefault(number, []).append(misplaced)
                if misplaced:
                    key = ", ".join(map(str, row[: len(column.table.primary_key)]))
                    LOG.warning(
                        "the secret in column %s of row %s was encrypted for another row or another purpose, so "
                        "the driver does not use the secret and leaves it unchanged",
                        column,
                        key,
                    )
        for place, flags in rows.items():
            name = names[place] if place is not None and place < len(names) else ""
            usage = KeyUsage(column=str(column), key=place, fingerprint=name, rows=len(flags), misplaced=sum(flags))
            found.append(usage)
    return found


def reencrypt(database: Database, vault: Vault, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Seal every row with the first key of the vault; return the number of changed rows.

    `on_progress` is called after each batch with the number of changed rows so far.

    Raises:
        StoreError: the database refused a transaction; earlier batches stay changed.
    """
    done = 0
    for column in SEALED:
        for batch in _batches(database, column, _BATCH):
            changes = list(_changes(column, batch, vault))
            if changes:
                done += _write(database, column, changes)
                on_progress(done)
    return done


def _changes(column: sa.Column[Any], batch: list[sa.Row[Any]], vault: Vault) -> Iterator[tuple[sa.Row[Any], bytes]]:
    for row in batch:
        with contextlib.suppress(StoreError):
            again = vault.reseal(row[-1], _LOCATIONS[column][1](row))
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


def _batches(database: Database, column: sa.Column[Any], size: int) -> Iterator[list[sa.Row[Any]]]:
    """Yield batches of rows in the order of the primary key: its columns first, the sealed column last."""
    keys = list(column.table.primary_key)
    query = sa.select(*keys, *_LOCATIONS[column][0], column).where(column.is_not(None)).order_by(*keys).limit(size)
    after: tuple[Any, ...] | None = None
    while True:
        page = query if after is None else query.where(_beyond(keys, after))
        rows = database.read(lambda connection, page=page: list(connection.execute(page)))  # type: ignore[misc]
        if rows:
            yield rows
        if len(rows) < size:
            return
        after = tuple(rows[-1][: len(keys)])


def _beyond(keys: list[sa.Column[Any]], after: tuple[Any, ...]) -> sa.ColumnElement[bool]:
    """Return the condition for rows after this key: some databases use no index to compare row values."""
    first, *others = keys
    beyond: sa.ColumnElement[bool] = first > after[0]
    if not others:
        return beyond
    return sa.or_(beyond, sa.and_(first == after[0], _beyond(others, after[1:])))
