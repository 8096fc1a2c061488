# SPDX-License-Identifier: Apache-2.0
"""Users' secrets: certificates with their keys, CA certificates, revocation lists.

Invariant: the table contains encrypted secrets only, and only while an object of the same load balancer refers to
them. All functions work inside the caller's transaction; encryption takes time, so it runs outside of transactions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.rows import chunks
from amphora_driver.database.tables import desired_object, secret
from amphora_driver.database.vault import SecretLocation
from amphora_driver.model.enums import Kind
from amphora_driver.model.secret_refs import Purpose, SecretName

_OF_LOAD_BALANCER = secret.select().where(secret.c.load_balancer_id == sa.bindparam("of"))
_NAMES = sa.select(secret.c.purpose, secret.c.ref, secret.c.sealed.is_not(None).label("known")).where(
    secret.c.object_id == sa.bindparam("of")
)
_DELETE = secret.delete().where(
    secret.c.object_id == sa.bindparam("of"),
    secret.c.purpose == sa.bindparam("for_purpose"),
    secret.c.ref == sa.bindparam("under_ref"),
)


# Certificates whose expiry is unknown, in the order of the primary key.
_UNREAD = (
    sa.select(secret.c.object_id, secret.c.ref, secret.c.sealed)
    .where(secret.c.expires_at.is_(None), secret.c.purpose == Purpose.CERTIFICATE.value, secret.c.sealed.is_not(None))
    .order_by(secret.c.object_id, secret.c.ref)
)

# First expiry among the certificates of each object. Without the grouping, an object with many certificates could fill
# the limit and hide other objects.
_FIRST = sa.func.min(secret.c.expires_at).label("expires_at")
_DUE = (
    sa.select(secret.c.load_balancer_id, secret.c.object_id, _FIRST)
    .where(secret.c.expires_at >= sa.bindparam("after", type_=sa.Double))
    .where(secret.c.expires_at < sa.bindparam("before", type_=sa.Double))
    .group_by(secret.c.load_balancer_id, secret.c.object_id)
    .subquery("due")
)
_EXPIRING = (
    sa.select(_DUE.c.load_balancer_id, _DUE.c.object_id, desired_object.c.kind, _DUE.c.expires_at)
    .join(desired_object, desired_object.c.id == _DUE.c.object_id)
    .order_by(_DUE.c.expires_at, _DUE.c.object_id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_KIND_WORDS = {Kind.LISTENER.value: "listener", Kind.POOL.value: "pool"}


class SealedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A stored secret. Without content, `reason` says why it cannot be used."""

    content: bytes | None = None
    reason: str = ""


class ExpiringSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of an object that expires first; `kind` is listener or pool."""

    load_balancer_id: str
    object_id: str
    kind: str
    expires_at: float


class UnreadCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed certificate without a recorded expiry."""

    name: SecretName
    content: bytes


def secret_location(name: SecretName) -> SecretLocation:
    """Return the location to which the encrypted content of a secret is bound."""
    return SecretLocation("secret", (name.object_id, name.purpose.value, name.ref))


def load_secrets(connection: sa.Connection, load_balancer_id: str) -> dict[SecretName, SealedSecret]:
    """Return all secrets of a load balancer."""
    rows = connection.execute(_OF_LOAD_BALANCER, {"of": load_balancer_id}).all()
    names = [SecretName(row.object_id, Purpose(row.purpose), row.ref) for row in rows]
    contents = [SealedSecret(content=row.sealed, reason=row.reason or "") for row in rows]
    return dict(zip(names, contents, strict=True))


def list_secret_names(connection: sa.Connection, object_id: str) -> dict[SecretName, bool]:
    """Return the secrets of one object, and whether their content is stored."""
    rows = connection.execute(_NAMES, {"of": object_id})
    return {SecretName(object_id, Purpose(row.purpose), row.ref): bool(row.known) for row in rows}


def replace_secrets(connection: sa.Connection, load_balancer_id: str, given: Mapping[SecretName, SealedSecret]) -> None:
    """Insert or replace secrets."""
    if not given:
        return
    delete_secrets(connection, given)
    rows: list[dict[str, Any]] = [
        {"object_id": name.object_id, "purpose": name.purpose.value, "ref": name.ref}
        | {"load_balancer_id": load_balancer_id, "sealed": one.content, "reason": one.reason or None}
        for name, one in given.items()
    ]
    connection.execute(secret.insert(), rows)


def delete_secrets(connection: sa.Connection, unwanted: Iterable[SecretName]) -> None:
    """Delete secrets."""
    rows = [{"of": one.object_id, "for_purpose": one.purpose.value, "under_ref": one.ref} for one in unwanted]
    if rows:
        connection.execute(_DELETE, rows)


def delete_secrets_of_objects(connection: sa.Connection, object_ids: Sequence[str]) -> None:
    """Delete all secrets of deleted objects."""
    for ids in chunks(object_ids):
        connection.execute(secret.delete().where(secret.c.object_id.in_(ids)))


def delete_secrets_of_load_balancer(connection: sa.Connection, load_balancer_id: str) -> None:
    """Delete all secrets of a load balancer."""
    connection.execute(secret.delete().where(secret.c.load_balancer_id == load_balancer_id))


def sync_object_secrets(
    connection: sa.Connection,
    load_balancer_id: str,
    object_id: str,
    used: Collection[SecretName],
    given: Mapping[SecretName, SealedSecret],
) -> set[SecretName]:
    """Store the secrets an object uses, delete its others, and return the used ones without content."""
    recorded = list_secret_names(connection, object_id)
    delete_secrets(connection, recorded.keys() - set(used))
    replace_secrets(connection, load_balancer_id, {name: one for name, one in given.items() if name in used})
    return {name for name in used if name not in given and not recorded.get(name)}


def list_unread_certificates(
    connection: sa.Connection, after: SecretName | None, limit: int
) -> list[UnreadCertificate]:
    """Return certificates without a recorded expiry, in the order of their names, from `after` on."""
    query = _UNREAD.limit(limit)
    if after is not None:
        query = query.where(
            sa.or_(
                secret.c.object_id > after.object_id,
                sa.and_(secret.c.object_id == after.object_id, secret.c.ref > after.ref),
            )
        )
    return [
        UnreadCertificate(name=SecretName(row.object_id, Purpose.CERTIFICATE, row.ref), content=row.sealed)
        for row in connection.execute(query)
    ]


def list_expiring(connection: sa.Connection, now: float, before: float, limit: int) -> list[ExpiringSecret]:
    """Return the objects with a certificate that expires before a time, the first one first.

    Expired certificates of abandoned load balancers accumulate, and must not hide those that users still need. So
    `limit` is the largest number of objects with an expired certificate, and of objects with a valid one. `now` and
    `before` are in seconds since 1970.
    """
    found: dict[str, ExpiringSecret] = {}
    for after, until in ((0.0, now), (now, before)):
        for row in connection.execute(_EXPIRING, {"after": after, "before": until, "most": limit}):
            kind = _KIND_WORDS.get(row.kind, row.kind)
            one = ExpiringSecret(
                load_balancer_id=row.load_balancer_id, object_id=row.object_id, kind=kind, expires_at=row.expires_at
            )
            found.setdefault(row.object_id, one)
    return list(found.values())


def record_expiries(connection: sa.Connection, expiries: Iterable[tuple[UnreadCertificate, float]]) -> int:
    """Record when certificates expire (seconds since 1970); return the number of changed rows.

    A certificate that was replaced or encrypted again meanwhile stays without an expiry.
    """
    changed = 0
    for one, expires_at in expiries:
        same = (secret.c.object_id == one.name.object_id, secret.c.ref == one.name.ref, secret.c.sealed == one.content)
        query = secret.update().where(secret.c.purpose == Purpose.CERTIFICATE.value, *same)
        changed += connection.execute(query.values(expires_at=expires_at)).rowcount
    return changed
