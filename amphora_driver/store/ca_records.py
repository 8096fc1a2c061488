# SPDX-License-Identifier: Apache-2.0
"""Rows of rotated CAs, and the certificates and trust stores of amphorae.

Invariant: before the first rotation of a kind there is no row, and the configured files are used. After the rotation
exactly one CA of the kind is current. A state change is conditional on the state that the decision used. An amphora's
row never claims more trust than the amphora has: a CA leaves the row before it leaves the amphora, and enters the row
after the amphora has confirmed it. Private keys are encrypted, and erased when their CA is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.joined_rows import join_rows, read_rows
from amphora_driver.database.rows import to_struct
from amphora_driver.database.tables import amphora, amphora_heartbeat, job
from amphora_driver.database.tables_fleet import certificate_authority
from amphora_driver.database.vault import SecretLocation
from amphora_driver.errors import Conflict
from amphora_driver.store.generations import update_job


class CaKind(str, Enum):
    """Holders of the certificates that a CA issues: agents or controllers."""

    AMPHORA = "amphora"
    CONTROLLER = "controller"


class CaState(str, Enum):
    """Life cycle of a CA, in this order.

    `next` is trusted and signs nothing yet, `current` signs, `former` is still trusted. `leaving` is being removed from
    the trust stores of amphorae and no controller trusts it. `gone` is history.
    """

    NEXT = "next"
    CURRENT = "current"
    FORMER = "former"
    LEAVING = "leaving"
    GONE = "gone"


TRUSTED_STATES = frozenset({CaState.NEXT, CaState.CURRENT, CaState.FORMER})
_ROTATING_STATES = (CaState.NEXT, CaState.FORMER, CaState.LEAVING)


class CaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded CA.

    `certificate` is PEM; an import from files may contain several certificates. `sealed_key` is None if the private
    key is in the configured files only, or unknown.
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
    """A CA to insert."""

    certificate: bytes
    sealed_key: bytes | None
    expires_at: float


class AmphoraCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of an amphora, and the CAs of client certificates that it accepts.

    `ready`: the agent has answered once. `authority`: id of the issuing CA; None for the configured files, or if
    unknown. `trusts`: see `certificates.ca_rotation`.
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
    """Expiry times for monitoring; `authorities` has kind, state, id and expiry of each trusted CA.

    `amphorae` is the earliest expiry of an amphora's certificate, `expired` the number of expired certificates.
    """

    authorities: tuple[tuple[str, str, int, float], ...]
    amphorae: float | None
    expired: int


def key_location(kind: CaKind, certificate: bytes) -> SecretLocation:
    """Return the location to which a CA's encrypted key is bound.

    The certificate identifies the CA, because the key is encrypted before the CA has an id.
    """
    return SecretLocation("certificate_authority", (kind.value, hashlib.sha256(certificate).hexdigest()))


def list_cas(connection: sa.Connection, *, gone: bool = False) -> tuple[CaRecord, ...]:
    """Return all CAs, the oldest first; CAs in state `gone` only if `gone` is true."""
    query = sa.select(certificate_authority).order_by(certificate_authority.c.id)
    if not gone:
        query = query.where(certificate_authority.c.state != CaState.GONE.value)
    rows = connection.execute(query)
    return tuple(to_struct(row, CaRecord, certificate=row.certificate.encode()) for row in rows)


def begin_ca_rotation(connection: sa.Connection, kind: CaKind, configured: NewCa, new: NewCa, now: float) -> int:
    """Insert a new CA as trusted, which amphorae and controllers then trust; return its id.

    The first rotation also inserts the CA of the configured files as the current one.

    Raises:
        Conflict: the last rotation of this kind has not ended.
    """
    found = connection.execute(
        sa.select(certificate_authority.c.id, certificate_authority.c.state)
        .where(certificate_authority.c.kind == kind.value, certificate_authority.c.state != CaState.GONE.value)
        .with_for_update()
    ).all()
    if any(row.state in _ROTATING_STATES for row in found):
        raise Conflict(
            f"rotate the CA of kind {kind.value}",
            "its last rotation has not ended",
            "The command amphoractl ca list shows the reason.",
        )
    if not found:
        imported = _insert_ca(connection, kind, CaState.CURRENT, configured, now)
        if kind is CaKind.AMPHORA:
            issued_by_files = amphora.c.certificate_authority.is_(None)
            connection.execute(amphora.update().where(issued_by_files).values(certificate_authority=imported))
    return _insert_ca(connection, kind, CaState.NEXT, new, now)


def _insert_ca(connection: sa.Connection, kind: CaKind, state: CaState, one: NewCa, now: float) -> int:
    row = {**msgspec.structs.asdict(one), "certificate": one.certificate.decode(), "created_at": now, "changed_at": now}
    insert = certificate_authority.insert().values(**row, kind=kind.value, state=state.value)
    key = connection.execute(insert).inserted_primary_key
    return int(key[0]) if key else 0


def change_ca_states(connection: sa.Connection, moves: Mapping[CaRecord, CaState], now: float) -> bool:
    """Change the states of CAs, and erase the keys of CAs that become `gone`.

    Return False without a change if another transaction has changed the state of one of them.
    """
    seen = [
        sa.and_(certificate_authority.c.id == one.id, certificate_authority.c.state == one.state.value) for one in moves
    ]
    found = connection.execute(sa.select(certificate_authority.c.id).where(sa.or_(*seen)).with_for_update()).all()
    if len(found) != len(moves):
        return False
    for one, state in moves.items():
        values: dict[str, Any] = {"state": state.value, "changed_at": now}
        if state is CaState.GONE:
            values["sealed_key"] = None
        connection.execute(certificate_authority.update().where(certificate_authority.c.id == one.id).values(**values))
    return True


class _CertificateRow(msgspec.Struct, frozen=True, array_like=True):
    """The columns of `AmphoraCertificate`, in its order."""

    amphora_id: str
    load_balancer_id: str
    ready_at: float | None
    issued_at: float | None
    expires_at: float | None
    authority: int | None
    trusts: str | None
    heard_at: float | None


_CERTIFICATES = join_rows(
    amphora.outerjoin(amphora_heartbeat, amphora_heartbeat.c.amphora_id == amphora.c.id),
    amphora.c.id,
    *(amphora.c.id, amphora.c.load_balancer_id, amphora.c.ready_at, amphora.c.certificate_issued_at),
    *(amphora.c.certificate_expires_at, amphora.c.certificate_authority, amphora.c.trusts),
    amphora_heartbeat.c.seen_at,
).where(sa.or_(amphora.c.management_address.is_not(None), amphora.c.certificate_issued_at.is_not(None)))


def list_amphora_certificates(connection: sa.Connection) -> tuple[AmphoraCertificate, ...]:
    """Return the certificates of all amphorae that have one or will get one, the first expiry first."""
    rows = read_rows(connection, _CERTIFICATES, _CertificateRow)
    rows.sort(key=lambda row: (row.expires_at is not None, row.expires_at or 0.0, row.amphora_id))
    return tuple(
        AmphoraCertificate(
            amphora_id=row.amphora_id,
            load_balancer_id=row.load_balancer_id,
            ready=row.ready_at is not None,
            issued_at=row.issued_at,
            expires_at=row.expires_at,
            authority=row.authority,
            trusts=row.trusts,
            heard_at=row.heard_at,
        )
        for row in rows
    )


def make_load_balancers_due(connection: sa.Connection, load_balancer_ids: Collection[str], now: float) -> int:
    """Make idle load balancers due, after all rows that already wait. Return their number.

    A load balancer with a job or a lease needs no change, because the job runs anyway.
    """
    idle = (~job.c.dirty, job.c.owner.is_(None))
    return sum(update_job(connection, one, *idle, dirty=True, due_at=now) for one in sorted(load_balancer_ids))


def read_certificate_expiries(connection: sa.Connection, now: float) -> CertificateExpiries:
    """Return the expiry times of recorded CAs and of certificates. CAs in files only are not included."""
    trusted = [one for one in list_cas(connection) if one.state in TRUSTED_STATES]
    ends = amphora.c.certificate_expires_at
    first, ended = connection.execute(
        sa.select(sa.func.min(ends), sa.func.count(sa.case((ends <= now, amphora.c.id)))).where(ends.is_not(None))
    ).one()
    return CertificateExpiries(
        authorities=tuple((one.kind.value, one.state.value, one.id, one.expires_at) for one in trusted),
        amphorae=None if first is None else float(first),
        expired=int(ended),
    )
