# SPDX-License-Identifier: Apache-2.0
"""Encryption of all secrets with the first key. Idempotent; it may be interrupted.

Invariant: a row is changed only if it still has the value that was read, so a concurrent change is never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_cluster.database.groups import credential_location
from amphora_cluster.database.tables import group_row, token_row
from amphora_cluster.database.tokens import digest_location
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError

# Each table with its encrypted column, and the function that returns the location of a secret (table and row). The
# encryption includes the location, so a secret that was copied to another row cannot be decrypted.
_SECRETS = (
    (group_row, group_row.c.credential, credential_location),
    (token_row, token_row.c.digest, digest_location),
)


class Reencrypted(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of secrets: encrypted again, encrypted with the first key before, and opened by no key."""

    changed: int
    current: int
    unreadable: int


def reencrypt(database: Database, vault: Vault) -> Reencrypted:
    """Encrypt application credentials and digests of tokens with the first key."""
    changed = current = unreadable = 0
    for table, column, location in _SECRETS:
        for row_id, sealed in _read(database, table, column):
            try:
                again = vault.reseal(sealed, location(row_id))
            except StoreError:
                unreadable += 1
                continue
            if again == sealed:
                current += 1
            else:
                changed += _replace(database, table, column, (row_id, sealed, again))
    return Reencrypted(changed=changed, current=current, unreadable=unreadable)


def _read(database: Database, table: sa.Table, column: sa.Column[Any]) -> Sequence[Any]:
    query = sa.select(table.c.id, column).where(column.is_not(None))
    return database.read(lambda connection: connection.execute(query).all())


def _replace(database: Database, table: sa.Table, column: sa.Column[Any], values: tuple[str, bytes, bytes]) -> int:
    row_id, sealed, again = values
    same = table.update().where(table.c.id == row_id, column == sealed).values({column.name: again})
    return database.write(lambda connection: connection.execute(same).rowcount)
