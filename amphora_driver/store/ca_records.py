# SPDX-License-Identifier: Apache-2.0
"""Authorities that were rotated, and what amphorae have of them.

Invariant: of each kind exactly one authority is current, once one was rotated; before that there is no row, and the
files of the configuration count. A state changes only from the one it was decided upon. What an amphora has is written
down before it can have less than that, and after it was seen to have more. Private keys are sealed, and erased when
their authority is gone.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import amphora, amphora_seen, work
from amphora_driver.database.tables_fleet import authority
from amphora_driver.database.vault import SecretLocation
from amphora_driver.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class CaKind(str, Enum):
    """For whom it vouches: agents show certificates of the one, controllers show certificates of the other."""

    AMPHORA = "amphora"
    CONTROLLER = "controller"


class CaState(str, Enum):
    """Where an authority is in its life, in this order.

    `next` is trusted and signs nothing yet, `current` signs, `former` is still trusted, `leaving` is being taken out of
    what amphorae trust and is trusted by no controller any more, `gone` is history.
    """

    NEXT = "next"
    CURRENT = "current"
    FORMER = "former"
    LEAVING = "leaving"
    GONE = "gone"


TRUSTED_STATES = frozenset({CaState.NEXT, CaState.CURRENT, CaState.FORMER})
_ROTATING_STATES = (CaState.NEXT, CaState.FORMER, CaState.LEAVING)


class CaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One authority as recorded.

    Attributes:
        certificate: PEM; one that was imported from files may be several in one.
        sealed_key: its private key, sealed; None where only the files of the configuration have it, or nobody of ours.
        expires_at: seconds since 1970, as the other times.
    """

    id: int
    kind: CaKind
    state: CaState
    certificate: bytes
    sealed_key: bytes | None
    created_at: float
    changed_at: float
    expires_at: float


class NewCa(msgspec.Struct, frozen=True, kw_only=True):
    """An authority to be written down."""

    certificate: bytes
    sealed_key: bytes | None
    expires_at: float


class AmphoraCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """What an amphora has: its certificate, and whose client certificates it accepts.

    Attributes:
        ready: its agent has answered once.
        authority: the id of who issued its certificate; None for the one of the files, or where that is not known.
        trusts: see `certificates.rotation`.
        heard_at: when it was heard last.
    """

    amphora_id: str
    load_balancer_id: str
    ready: bool
    issued_at: float | None
    expires_at: float | None
    authority: int | None
    trusts: str | None
    heard_at: float | None = None


class CertificateExpiries(msgspec.Struct, frozen=True, kw_only=True):
    """What ends when (seconds since 1970), for whoever watches.

    Attributes:
        authorities: those that are trusted: kind, state, id, end.
        amphorae: the first certificate of an amphora to end; None if there is none.
        expired: how many certificates of amphorae have ended.
    """

    authorities: tuple[tuple[str, str, int, float], ...]
    amphorae: float | None
    expired: int


def key_location(kind: CaKind, certificate: bytes) -> SecretLocation:
    """What the key of this authority is sealed for: its certificate tells it from all others before it has an id."""
    return SecretLocation("authority", (kind.value, hashlib.sha256(certificate).hexdigest()))


def list_cas(connection: sa.Connection, *, gone: bool = False) -> tuple[CaRecord, ...]:
    """All authorities, the oldest first; those that are gone only if asked for."""
    query = sa.select(authority).order_by(authority.c.id)
    if not gone:
        query = query.where(authority.c.state != CaState.GONE.value)
    return tuple(
        CaRecord(
            id=int(row.id),
            kind=CaKind(row.kind),
            state=CaState(row.state),
            certificate=row.certificate.encode(),
            sealed_key=None if row.sealed_key is None else bytes(row.sealed_key),
            created_at=row.created_at,
            changed_at=row.changed_at,
            expires_at=row.expires_at,
        )
        for row in connection.execute(query)
    )


def begin_ca_rotation(connection: sa.Connection, kind: CaKind, configured: NewCa, new: NewCa, now: float) -> int:
    """Begin a rotation: from now on everybody is to trust the new authority too.

    Args:
        connection: of a writing transaction.
        kind: which one.
        configured: the one of the files, written down as the current one if no other was.
        new: the one that comes.
        now: seconds since 1970, by the database's clock.

    Returns:
        The id of the new one.

    Raises:
        Conflict: the last rotation of this kind has not ended.
    """
    found = connection.execute(
        sa.select(authority.c.id, authority.c.state)
        .where(authority.c.kind == kind.value, authority.c.state != CaState.GONE.value)
        .with_for_update()
    ).all()
    if any(row.state in _ROTATING_STATES for row in found):
        raise Conflict(
            f"rotate the authority of kind {kind.value}",
            "its last rotation has not ended",
            "amphoractl authority list says what it waits for.",
        )
    if not found:
        imported = _insert_ca(connection, kind, CaState.CURRENT, configured, now)
        if kind is CaKind.AMPHORA:
            nobody = amphora.c.certificate_authority.is_(None)
            connection.execute(amphora.update().where(nobody).values(certificate_authority=imported))
    return _insert_ca(connection, kind, CaState.NEXT, new, now)


def _insert_ca(connection: sa.Connection, kind: CaKind, state: CaState, one: NewCa, now: float) -> int:
    row: dict[str, Any] = {
        "kind": kind.value,
        "state": state.value,
        "certificate": one.certificate.decode(),
        "sealed_key": one.sealed_key,
        "created_at": now,
        "changed_at": now,
        "expires_at": one.expires_at,
    }
    key = connection.execute(authority.insert().values(**row)).inserted_primary_key
    return int(key[0]) if key else 0


def change_ca_states(connection: sa.Connection, moves: Mapping[CaRecord, CaState], now: float) -> bool:
    """Have authorities take the next step, all of them or none; the key of one that is gone is erased.

    Returns:
        False if one of them is not in the state any more in which it was seen.
    """
    seen = [sa.and_(authority.c.id == one.id, authority.c.state == one.state.value) for one in moves]
    found = connection.execute(sa.select(authority.c.id).where(sa.or_(*seen)).with_for_update()).all()
    if len(found) != len(moves):
        return False
    for one, state in moves.items():
        values: dict[str, Any] = {"state": state.value, "changed_at": now}
        if state is CaState.GONE:
            values["sealed_key"] = None
        connection.execute(authority.update().where(authority.c.id == one.id).values(**values))
    return True


def list_amphora_certificates(connection: sa.Connection) -> tuple[AmphoraCertificate, ...]:
    """What every amphora has that has something, or is about to be given it."""
    has_any = sa.or_(amphora.c.management_address.is_not(None), amphora.c.certificate_issued_at.is_not(None))
    query = (
        sa.select(
            amphora.c.id,
            amphora.c.load_balancer_id,
            amphora.c.ready_at,
            amphora.c.certificate_issued_at,
            amphora.c.certificate_expires_at,
            amphora.c.certificate_authority,
            amphora.c.trusts,
            amphora_seen.c.seen_at,
        )
        .outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
        .where(has_any)
        .order_by(amphora.c.certificate_expires_at, amphora.c.id)
    )
    return tuple(
        AmphoraCertificate(
            amphora_id=row.id,
            load_balancer_id=row.load_balancer_id,
            ready=row.ready_at is not None,
            issued_at=row.certificate_issued_at,
            expires_at=row.certificate_expires_at,
            authority=row.certificate_authority,
            trusts=row.trusts,
            heard_at=row.seen_at,
        )
        for row in connection.execute(query)
    )


def make_load_balancers_due(connection: sa.Connection, load_balancer_ids: Collection[str], now: float) -> int:
    """Have load balancers looked at that nobody has anything else to do for; returns how many.

    Those that something is being done to are looked at anyway, and whoever waits already comes first.
    """
    settled = (~work.c.dirty, work.c.owner.is_(None))
    return sum(
        connection.execute(
            work.update().where(work.c.load_balancer_id == one, *settled).values(dirty=True, free_at=now)
        ).rowcount
        for one in sorted(load_balancer_ids)
    )


def read_certificate_expiries(connection: sa.Connection, now: float) -> CertificateExpiries:
    """When authorities and certificates end; of authorities of which there are only files nothing is said."""
    rows = connection.execute(
        sa.select(authority.c.kind, authority.c.state, authority.c.id, authority.c.expires_at)
        .where(authority.c.state.in_([one.value for one in TRUSTED_STATES]))
        .order_by(authority.c.id)
    )
    ends = amphora.c.certificate_expires_at
    first, ended = connection.execute(
        sa.select(sa.func.min(ends), sa.func.count(sa.case((ends <= now, amphora.c.id)))).where(ends.is_not(None))
    ).one()
    return CertificateExpiries(
        authorities=tuple((row.kind, row.state, int(row.id), float(row.expires_at)) for row in rows),
        amphorae=None if first is None else float(first),
        expired=int(ended),
    )
