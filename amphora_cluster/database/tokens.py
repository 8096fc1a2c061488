# SPDX-License-Identifier: Apache-2.0
"""Tokens of webhooks, and the nonces of signed requests.

A token is `ID.RANDOM`. The database has only the SHA-256 of the token, sealed by the vault. A client may send the
token, or a signature with the SHA-256 as the key; so neither the database nor a signed request reveals the token.

Invariant: a token belongs to one group, and its creation is the only moment at which it is shown. A nonce is accepted
once until it expires.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_cluster.database.tables import group_row, nonce_row, token_row
from amphora_driver.database import clock
from amphora_driver.database.engine import Database, set_commit_marker
from amphora_driver.database.vault import SecretLocation, Vault
from amphora_driver.errors import ContentRefused, UnknownObject
from amphora_driver.secret import Secret

_RANDOM_BYTES = 32
# Maximum number of characters of a nonce.
MOST_NONCE = 128


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    group_id: str
    name: str
    created_at: float
    created_by: str
    expires_at: float | None = None


def token_digest(token: Secret) -> Secret:
    """Return the SHA-256 of a token: what the database has, and the key of signatures."""
    return Secret(hashlib.sha256(token.reveal()).digest())


def token_id(token: str) -> str:
    """Return the id in a token; empty if the text is not a token."""
    found, point, _ = token.partition(".")
    return found if point else ""


def digest_location(token: str) -> SecretLocation:
    """Return the location to which the vault binds the digest of the token with this id."""
    return SecretLocation("cluster_token", (token, "digest"))


class TokenStore:
    """The tokens of a database."""

    def __init__(self, database: Database, vault: Vault) -> None:
        self._database = database
        self._vault = vault

    def now(self) -> float:
        """Return the database clock, in seconds since 1970."""
        return self._database.now()

    def create(
        self, group_id: str, name: str, created_by: str, seconds: float | None = None
    ) -> tuple[TokenRecord, Secret]:
        """Record a new token, valid for `seconds` or without a limit; return it with its text.

        Raises:
            UnknownObject: the group does not exist, or is being deleted.
        """
        new = str(uuid.uuid4())
        token = Secret(new.encode() + b"." + secrets.token_urlsafe(_RANDOM_BYTES).encode())
        sealed = self._vault.seal(token_digest(token), digest_location(new))

        def write(connection: sa.Connection) -> TokenRecord:
            alive = group_row.c.id == group_id, sa.not_(group_row.c.deleting)
            if connection.execute(sa.select(group_row.c.id).where(*alive)).first() is None:
                raise UnknownObject("create a token", f"group {group_id} does not exist, or is being deleted")
            now = float(connection.execute(sa.select(clock.now(connection))).scalar_one())
            values: dict[str, Any] = {"id": new, "group_id": group_id, "name": name, "created_by": created_by}
            values |= {"created_at": now, "expires_at": None if seconds is None else now + seconds}
            connection.execute(token_row.insert().values(**values, digest=sealed))
            set_commit_marker(connection, sa.select(token_row.c.id).where(token_row.c.id == new), {})
            return TokenRecord(**values)

        return self._database.write(write), token

    def list_tokens(self, group_id: str) -> tuple[TokenRecord, ...]:
        """Return the tokens of a group, oldest first."""
        query = sa.select(token_row).where(token_row.c.group_id == group_id)
        query = query.order_by(token_row.c.created_at, token_row.c.id)
        return tuple(map(_record, self._database.read(lambda connection: connection.execute(query).all())))

    def delete(self, group_id: str, wanted: str) -> None:
        """Delete the token of a group with this id; it is refused from now on. Raises UnknownObject."""
        mine = token_row.delete().where(token_row.c.id == wanted, token_row.c.group_id == group_id)
        if not self._database.write(lambda connection: connection.execute(mine).rowcount):
            raise UnknownObject(f"delete token {wanted}", f"group {group_id} has no such token")

    def find(self, wanted: str) -> tuple[TokenRecord, Secret] | None:
        """Return the token with this id and its digest; None if it is unknown, expired or of a deleted group.

        Raises:
            StoreError: no key of the vault opens the digest.
        """

        def read(connection: sa.Connection) -> Any:
            valid = sa.or_(token_row.c.expires_at.is_(None), token_row.c.expires_at > clock.now(connection))
            query = sa.select(token_row).join(group_row, group_row.c.id == token_row.c.group_id)
            return connection.execute(
                query.where(token_row.c.id == wanted, valid, sa.not_(group_row.c.deleting))
            ).first()

        row = self._database.read(read)
        return None if row is None else (_record(row), self._vault.open(row.digest, digest_location(row.id)))

    def use_nonce(self, token: str, nonce: str, seconds: float) -> bool:
        """Record the nonce of a signed request for `seconds`; return False if it was used before.

        Args:
            token: id of the token that signed the request.
            nonce: at most `MOST_NONCE` characters.
            seconds: longer than a timestamp of a request stays valid.
        """
        same = nonce_row.c.token_id == token, nonce_row.c.nonce == nonce

        def write(connection: sa.Connection) -> bool:
            if connection.execute(sa.select(nonce_row.c.nonce).where(*same)).first() is not None:
                return False
            now = clock.now(connection)
            connection.execute(nonce_row.insert().values(token_id=token, nonce=nonce, expires_at=now + seconds))
            return True

        try:
            return self._database.write(write)
        except ContentRefused:
            # Another process has just recorded this nonce, so the request is a repetition.
            return False


def _record(row: Any) -> TokenRecord:
    return TokenRecord(**{name: getattr(row, name) for name in TokenRecord.__struct_fields__})
