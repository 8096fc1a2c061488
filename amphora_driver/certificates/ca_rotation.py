# SPDX-License-Identifier: Apache-2.0
"""Rules of certificate renewal and CA rotation. Pure.

Invariant: a step of a rotation is returned only if every connection works after the step. All amphorae and controllers
that need another trust list or certificate have it, and operations that began before the last step have ended. The
result names the amphorae that the next step waits for.

The column `amphora.trusts` is one text. It holds the ids of the controllers' CAs, or ``files-`` and a digest if the
CAs are files. If the CA of amphorae is a file too, ``/`` and its digest follow. The digest shows a replacement of the
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from amphora_driver.store.ca_records import AmphoraCertificate, CaKind, CaRecord, CaState

DAY = 86400.0
_DIGITS = 12
# Each renewal is shifted by up to this fraction of the certificate's age at renewal. Otherwise, certificates of the
# same day would all be renewed at once.
_SPREAD = 0.1


class DesiredTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Desired issuing CA (None: the CA of the files) and trust list of every amphora."""

    authority: int | None
    trusts: str


class CertificateLifetime(msgspec.Struct, frozen=True, kw_only=True):
    """Lifetime of certificates.

    `validity` in seconds applies to a certificate without a recorded issue date. `renew_at` is the fraction of the
    lifetime after which a certificate is renewed.
    """

    validity: float
    renew_at: float


class RotationPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the rotation of one kind of CA.

    Attributes:
        moves: the next step, if the step is possible now; `until` is its earliest time (seconds since 1970).
        waits_for: the amphorae that must meet the condition `reason` before the next step.
    """

    moves: dict[CaRecord, CaState] = {}
    until: float = 0.0
    waits_for: tuple[str, ...] = ()
    reason: str = ""


def file_digest(content: bytes) -> str:
    """Return a short digest of a file, to detect its replacement."""
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def format_trusts(controllers: Iterable[int], client_ca: bytes, signer: bytes | None) -> str:
    """Return the text of `amphora.trusts`.

    `controllers` are the ids of the controllers' CAs; empty if the CAs are files with the content `client_ca`. `signer`
    is the file of the CA of amphorae; None if the database has this CA.
    """
    named = ",".join(str(one) for one in sorted(controllers)) or f"files-{file_digest(client_ca)}"
    return named if signer is None else f"{named}/{file_digest(signer)}"


def parse_controller_ids(text: str | None) -> frozenset[int]:
    """Return the ids of the controllers' CAs that an amphora certainly trusts."""
    named = (text or "").partition("/")[0]
    return frozenset(int(one) for one in named.split(",") if one.isdecimal())


def common_trust(first: str | None, second: str) -> str:
    """Return the common part of two trust lists: the amphora has one of the two."""
    if first is None or first == second:
        return second
    both = parse_controller_ids(first) & parse_controller_ids(second)
    return ",".join(str(one) for one in sorted(both)) or "unknown"


def renewal_reason(one: AmphoraCertificate, desired: DesiredTrust, lifetime: CertificateLifetime, now: float) -> str:
    """Return why an amphora needs a new certificate now; empty if the present certificate is right."""
    if one.authority != desired.authority:
        return "another authority signs certificates now"
    if trust_differs(one.trusts, desired):
        return "other authorities must be trusted now"
    due = renewal_due_at(one, lifetime)
    if due is None:
        return "the expiry of its certificate is not known"
    if one.expires_at is not None and one.expires_at <= now:
        return "its certificate has expired"
    return "its certificate has reached its renewal time" if due <= now else ""


def trust_differs(text: str | None, desired: DesiredTrust) -> bool:
    """Return whether the trust list of an amphora differs from the desired one."""
    if text is None:
        # The column `trusts` is NULL in rows that are older than this column. Such an amphora trusts the CAs of the
        # configured files.
        return not desired.trusts.startswith("files-")
    named, _, signer = text.partition("/")
    to_name, _, to_sign = desired.trusts.partition("/")
    return named != to_name or bool(to_sign and signer and signer != to_sign)


def renewal_due_at(one: AmphoraCertificate, lifetime: CertificateLifetime) -> float | None:
    """Return the latest time of the renewal; None for a certificate without a recorded expiry.

    Renewals of certificates that were issued together spread over a fifth of the time.
    """
    if one.expires_at is None:
        return None
    issued = one.expires_at - lifetime.validity if one.issued_at is None else one.issued_at
    fraction = int(hashlib.sha256(one.amphora_id.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    return issued + (one.expires_at - issued) * min(lifetime.renew_at * (1 - _SPREAD + 2 * _SPREAD * fraction), 0.99)


def certificate_state(one: AmphoraCertificate, desired: DesiredTrust, lifetime: CertificateLifetime, now: float) -> str:
    """Return the state of an amphora's certificate: fine, due, overdue or expired."""
    if one.expires_at is not None and one.expires_at <= now:
        return "expired"
    due = renewal_due_at(one, lifetime)
    if due is not None and one.expires_at is not None and now > due + (one.expires_at - due) / 2:
        return "overdue"
    return "due" if renewal_reason(one, desired, lifetime, now) else "fine"


def is_rotating(kind: CaKind, recorded: Sequence[CaRecord]) -> bool:
    """Return whether a CA of this kind is being replaced."""
    return any(one.kind is kind and one.state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING) for one in recorded)


def rotation_phase(
    kind: CaKind, recorded: Sequence[CaRecord], held: Sequence[AmphoraCertificate], now: float, settle: float
) -> RotationPhase:
    """Return the next step of the rotation of one kind of CA, or its wait condition.

    Args:
        recorded: all CAs that are not gone; other kinds are ignored.
        held: certificates and trust lists of the amphorae.
        now: seconds since 1970, by the database's clock.
        settle: minimum seconds of each step: longer than any process uses the data of the step before.
    """
    by_state = {one.state: one for one in recorded if one.kind is kind}
    current = by_state.get(CaState.CURRENT)
    if current is None:
        return RotationPhase()
    if coming := by_state.get(CaState.NEXT):
        without = [one.amphora_id for one in held if coming.id not in parse_controller_ids(one.trusts)]
        moves = {coming: CaState.CURRENT, current: CaState.FORMER}
        waits = without if kind is CaKind.CONTROLLER else []
        return _step(moves, coming, waits, "every amphora must trust the new one", now, settle)
    if former := by_state.get(CaState.FORMER):
        waits = _not_signed_by(held, current) if kind is CaKind.AMPHORA else []
        reason = "every certificate must be signed by the new one"
        return _step({former: CaState.LEAVING}, former, waits, reason, now, settle)
    if leaving := by_state.get(CaState.LEAVING):
        waits = _not_signed_by(held, current)
        if kind is CaKind.CONTROLLER:
            waits = [one.amphora_id for one in held if parse_controller_ids(one.trusts) != {current.id}]
        return _step({leaving: CaState.GONE}, leaving, waits, "no amphora may trust the old one", now, settle)
    return RotationPhase()


def _step(
    moves: dict[CaRecord, CaState], since: CaRecord, waits_for: list[str], reason: str, now: float, settle: float
) -> RotationPhase:
    until = since.changed_at + settle
    if now < until or waits_for:
        return RotationPhase(until=until, waits_for=tuple(waits_for), reason=reason)
    return RotationPhase(moves=moves, until=until, reason=reason)


def _not_signed_by(held: Sequence[AmphoraCertificate], current: CaRecord) -> list[str]:
    return [one.amphora_id for one in held if one.authority != current.id]
