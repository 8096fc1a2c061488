# SPDX-License-Identifier: Apache-2.0
"""When a certificate is renewed, and how an authority takes the place of another, as pure functions.

Invariant: a step of a rotation is named only when nobody can be shut out by it: whoever has to trust, or to show
something else, has done so, and what was begun before the last step has ended. Who is waited for is said by name.

What an amphora trusts is one text (`amphora.trusts`): the ids of the controllers' authorities it was given, or, where
these are files, ``files-`` and a digest of them; then, where the authority that signs amphorae's certificates is a
file too, ``/`` and a digest of that one. So a file that was exchanged is noticed as well.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.store.ca_records import AmphoraCertificate, CaKind, CaRecord, CaState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DAY = 86400.0
_DIGITS = 12
# Certificates that were issued together are renewed over this part of the time before, and after, their moment.
_SPREAD = 0.1


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What every amphora is to have: who issued its certificate (None: the one of the files), and what it trusts."""

    authority: int | None
    trusts: str


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How long certificates live.

    Attributes:
        validity: seconds, where nobody wrote down when one was issued.
        renew_at: the part of its life after which one is renewed.
    """

    validity: float
    renew_at: float


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rotation of one kind of authority is.

    Attributes:
        moves: the next step, if it may be taken now.
        until: before that moment (seconds since 1970) it is not taken.
        waits_for: the amphorae without which it is not taken.
        reason: what is waited for, in words; empty where nothing is rotated.
    """

    moves: dict[CaRecord, CaState] = {}
    until: float = 0.0
    waits_for: tuple[str, ...] = ()
    reason: str = ""


def digest(content: bytes) -> str:
    """What a file is called that may have been exchanged."""
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def trusts(controllers: Iterable[int], client_ca: bytes, signer: bytes | None) -> str:
    """What an amphora trusts, as it is written down.

    Args:
        controllers: the ids of the controllers' authorities; empty where there are only files.
        client_ca: those files.
        signer: the file of the authority that signs amphorae's certificates; None where that one is recorded.
    """
    named = ",".join(str(one) for one in sorted(controllers)) or f"files-{digest(client_ca)}"
    return named if signer is None else f"{named}/{digest(signer)}"


def controllers_in(text: str | None) -> frozenset[int]:
    """The ids of the controllers' authorities that an amphora trusts for sure."""
    named = (text or "").partition("/")[0]
    return frozenset(int(one) for one in named.split(",") if one.isdecimal())


def common(first: str | None, second: str) -> str:
    """What an amphora trusts that was given one of the two, and nobody knows which."""
    if first is None or first == second:
        return second
    both = controllers_in(first) & controllers_in(second)
    return ",".join(str(one) for one in sorted(both)) or "unknown"


def why(one: AmphoraCertificate, wanted: Wanted, terms: Terms, now: float) -> str:
    """Why an amphora is to be given another certificate now; empty if it is not."""
    if one.authority != wanted.authority:
        return "another authority signs now"
    if differs(one.trusts, wanted):
        return "other authorities are to be trusted now"
    due = due_at(one, terms)
    if due is None:
        return "nobody knows until when its certificate is valid"
    if one.expires_at is not None and one.expires_at <= now:
        return "its certificate has expired"
    return "its certificate has lived for long enough" if due <= now else ""


def differs(text: str | None, wanted: Wanted) -> bool:
    """Whether an amphora trusts something else than it is to."""
    if text is None:
        # It is older than this text. Where there are files only it was given them, as far as anybody knows.
        return not wanted.trusts.startswith("files-")
    named, _, signer = text.partition("/")
    to_name, _, to_sign = wanted.trusts.partition("/")
    return named != to_name or bool(to_sign and signer and signer != to_sign)


def due_at(one: AmphoraCertificate, terms: Terms) -> float | None:
    """When its certificate is renewed, if nothing comes before; None if nobody knows.

    Those that were issued together are renewed one after the other, over a fifth of the time until then.
    """
    if one.expires_at is None:
        return None
    issued = one.expires_at - terms.validity if one.issued_at is None else one.issued_at
    fraction = int(hashlib.sha256(one.amphora_id.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    return issued + (one.expires_at - issued) * min(terms.renew_at * (1 - _SPREAD + 2 * _SPREAD * fraction), 0.99)


def condition(one: AmphoraCertificate, wanted: Wanted, terms: Terms, now: float) -> str:
    """How an amphora's certificate is, in one word: fine, due, overdue or expired."""
    if one.expires_at is not None and one.expires_at <= now:
        return "expired"
    due = due_at(one, terms)
    if due is not None and one.expires_at is not None and now > due + (one.expires_at - due) / 2:
        return "overdue"
    return "due" if why(one, wanted, terms, now) else "fine"


def goes_on(kind: CaKind, recorded: Sequence[CaRecord]) -> bool:
    """Whether an authority of this kind is being replaced."""
    return any(one.kind is kind and one.state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING) for one in recorded)


def phase(
    kind: CaKind, recorded: Sequence[CaRecord], held: Sequence[AmphoraCertificate], now: float, settle: float
) -> Phase:
    """The next step of the rotation of one kind of authority, or what it waits for.

    Args:
        kind: which kind.
        recorded: the authorities that are not gone; those of other kinds do not matter.
        held: what amphorae have.
        now: seconds since 1970, by the database's clock.
        settle: how many seconds every step lasts at the least: longer than anybody works with what was there before.
    """
    by_state = {one.state: one for one in recorded if one.kind is kind}
    current = by_state.get(CaState.CURRENT)
    if current is None:
        return Phase()
    if coming := by_state.get(CaState.NEXT):
        without = _not_trusting(held, coming) if kind is CaKind.CONTROLLER else ()
        moves = {coming: CaState.CURRENT, current: CaState.FORMER}
        return _step(moves, coming, without, "everybody is to trust the new one", now, settle)
    if former := by_state.get(CaState.FORMER):
        by_others = _not_signed_by(held, current) if kind is CaKind.AMPHORA else ()
        return _step({former: CaState.LEAVING}, former, by_others, "the new one is to sign everything", now, settle)
    if leaving := by_state.get(CaState.LEAVING):
        still = _trusting_others(held, current) if kind is CaKind.CONTROLLER else _not_signed_by(held, current)
        return _step({leaving: CaState.GONE}, leaving, still, "nobody is to trust the old one any more", now, settle)
    return Phase()


def _step(
    moves: dict[CaRecord, CaState], since: CaRecord, waits_for: tuple[str, ...], reason: str, now: float, settle: float
) -> Phase:
    until = since.changed_at + settle
    if now < until or waits_for:
        return Phase(until=until, waits_for=waits_for, reason=reason)
    return Phase(moves=moves, until=until, reason=reason)


def _not_trusting(held: Sequence[AmphoraCertificate], one: CaRecord) -> tuple[str, ...]:
    return tuple(each.amphora_id for each in held if one.id not in controllers_in(each.trusts))


def _trusting_others(held: Sequence[AmphoraCertificate], current: CaRecord) -> tuple[str, ...]:
    return tuple(each.amphora_id for each in held if controllers_in(each.trusts) != {current.id})


def _not_signed_by(held: Sequence[AmphoraCertificate], current: CaRecord) -> tuple[str, ...]:
    return tuple(each.amphora_id for each in held if each.authority != current.id)
