# SPDX-License-Identifier: Apache-2.0
"""What a rotation does next, as a pure function.

Invariant: amphorae of no more than `max_unavailable` load balancers are being replaced at once, and a load balancer
counts until all its new amphorae are proven to serve what is wanted, for as long as they have to settle. The first one
that is not as well as before stops everything: a rotation never goes on blindly, and only somebody who has looked has
it go on. What has begun is always watched to its end, whatever becomes of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState

# How bad an operating status is; OFFLINE is what an administrator wanted.
_BADNESS = {"DRAINING": 1, "DEGRADED": 2, "ERROR": 3}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora that is not about to go.

    Attributes:
        ready: its agent has answered.
        confirmed: the newest generation it said it serves.
        heard: whether heartbeats of it arrive; None if it was not watched for long enough to tell.
        image: what it was booted from.
    """

    id: str
    ready: bool
    confirmed: int
    heard: bool | None
    image: str | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A load balancer as it is now.

    Attributes:
        recorded: it is there, and nobody deletes it.
        generation: what is wanted.
        applied: what every amphora serves.
        settled: Octavia has committed what is wanted, and all of it is known.
        provisioning: its provisioning status, as it was told to Octavia last.
        operating: its operating status.
        number: how many amphorae it is to have.
        live: those that stay.
        retiring: those that are about to go.
        draining: those of them whose VIPs have gone: they only wait for connections to end.
        attempts: how often its controller has failed in a row.
        error: with what.
        tried: how many of these attempts were made since its turn came, or its rotation was resumed.
        was_in_error: its provisioning status was ERROR then already.
        watched: for how many seconds it was looked at since its turn came, or, before that, could not have its turn.
        well: for how many of them in a row nothing was lacking.
    """

    recorded: bool = True
    generation: int = 0
    applied: int = 0
    settled: bool = True
    provisioning: str | None = None
    operating: str | None = None
    number: int = 1
    live: tuple[Seen, ...] = ()
    retiring: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    attempts: int = 0
    error: str | None = None
    tried: int = 0
    was_in_error: bool = False
    watched: float = 0.0
    well: float = 0.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator has configured: seconds, and attempts."""

    settle: float
    patience: float
    give_up_after: int


class Move(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One thing to write down."""


class Begin(Move, frozen=True, kw_only=True):
    """Have these amphorae of a load balancer replaced."""

    item: RotationItem
    amphorae: tuple[str, ...]
    operating: str | None


class Finish(Move, frozen=True, kw_only=True):
    """A load balancer's turn is over: done, failed or skipped."""

    item: RotationItem
    state: ItemState
    reason: str | None = None


class Pause(Move, frozen=True, kw_only=True):
    """Begin nothing until an operator says so."""

    reason: str


class Say(Move, frozen=True, kw_only=True):
    """What the rotation waits for; None if for nothing."""

    reason: str | None


class End(Move, frozen=True, kw_only=True):
    """Nothing of it is left to do."""

    state: RotationState


AnyMove = Begin | Finish | Pause | Say | End


def next_moves(
    rotation: Rotation,
    items: Sequence[RotationItem],
    facts: Mapping[str, Facts],
    limits: Limits,
    breaker: str | None = None,
) -> list[AnyMove]:
    """What is to be written down now; the same question is asked again after that.

    Args:
        rotation: how it is recorded.
        items: its load balancers that are not done with, in their order; of those that wait the first ones are enough.
            Those that failed count until it is resumed or aborted.
        facts: what is known of them.
        limits: as configured.
        breaker: why no fail-over is to be begun now, if that is so.
    """
    moves: list[AnyMove] = []
    running = [one for one in items if one.state is ItemState.RUNNING]
    waiting = [one for one in items if one.state is ItemState.WAITING]
    over = [move for one in running if (move := _judge(rotation, one, facts[one.load_balancer_id], limits))]
    moves += over
    failed = [move for move in over if move.state is ItemState.FAILED]
    busy = len(running) - len(over)
    if rotation.state is RotationState.RUNNING and failed:
        first = failed[0]
        return [*moves, Pause(reason=f"load balancer {first.item.load_balancer_id}: {first.reason}")]
    if rotation.state is RotationState.RUNNING:
        found = _beginnings(rotation, waiting, facts, limits, rotation.max_unavailable - busy, breaker)
        moves += found
    if not items:
        # What is over now may have been but the first of many.
        moves.append(
            End(state=RotationState.ABORTED if rotation.state is RotationState.ABORTED else RotationState.DONE)
        )
    return moves


def lacks(rotation: Rotation, item: RotationItem, facts: Facts) -> str | None:
    """What a load balancer whose turn it is does not have yet, in words; None if it is as well as before."""
    leaving = [*sorted(facts.retiring - facts.draining), *(one.id for one in facts.live if one.id in item.amphorae)]
    if leaving:
        return f"amphora {leaving[0]} is not replaced yet"
    if len(facts.live) < facts.number or not all(one.ready for one in facts.live):
        return "a new amphora is not ready yet"
    if facts.applied < facts.generation:
        return f"generation {facts.generation} is not served by all yet"
    for one in facts.live:
        if one.confirmed < facts.generation:
            return f"amphora {one.id} has not confirmed generation {facts.generation} yet"
        if one.heard is not True:
            return f"amphora {one.id} is not heard"
        if rotation.wanted.image not in (None, one.image):
            return f"amphora {one.id} was booted from {one.image}"
    if _badness(facts.operating) > _badness(item.operating):
        return f"its operating status is {facts.operating}, and was {item.operating} before"
    return None


def blocks(facts: Facts) -> str | None:
    """Why a load balancer cannot have its turn now, in words; None if it can."""
    if not facts.settled or facts.applied < facts.generation:
        return "it is being changed"
    if facts.retiring or len(facts.live) < facts.number or not all(one.ready for one in facts.live):
        return "an amphora of it is being replaced"
    silent = [one.id for one in facts.live if one.heard is False]
    return f"amphora {silent[0]} is not heard" if silent else None


def _judge(rotation: Rotation, item: RotationItem, facts: Facts, limits: Limits) -> Finish | None:
    """What has become of a load balancer whose turn it is; None if that is not known yet."""
    if not facts.recorded:
        return Finish(item=item, state=ItemState.SKIPPED, reason="it was deleted")
    lack = lacks(rotation, item, facts)
    if lack is None:
        return Finish(item=item, state=ItemState.DONE) if facts.well >= limits.settle else None
    reason = _failure(rotation, item, facts, limits, lack)
    return None if reason is None else Finish(item=item, state=ItemState.FAILED, reason=reason)


def _failure(rotation: Rotation, item: RotationItem, facts: Facts, limits: Limits, lack: str) -> str | None:
    """Why it is not expected to end well, if that is so."""
    if facts.provisioning == "ERROR" and not facts.was_in_error:
        return f"it is in ERROR: {facts.error or lack}"
    if facts.tried >= limits.give_up_after:
        return f"it was tried {facts.tried} times: {facts.error or lack}"
    new = [one for one in facts.live if one.id not in item.amphorae and one.ready]
    wrong = [one for one in new if rotation.wanted.image not in (None, one.image)]
    if wrong:
        return f"amphora {wrong[0].id} was booted from {wrong[0].image}, and not from {rotation.wanted.image}"
    if facts.watched >= limits.patience:
        return f"not done in {limits.patience:g} s: {lack}" + (f" ({facts.error})" if facts.error else "")
    return None


def _beginnings(
    rotation: Rotation,
    waiting: Sequence[RotationItem],
    facts: Mapping[str, Facts],
    limits: Limits,
    room: int,
    breaker: str | None,
) -> list[AnyMove]:
    """Whose turn it is, and what the rotation waits for if it is nobody's."""
    moves: list[AnyMove] = []
    held: str | None = None
    for item in waiting:
        if room <= 0:
            break
        seen = facts[item.load_balancer_id]
        passed = _passed_over(item, seen, limits)
        why = blocks(seen)
        if passed is not None:
            moves.append(passed)
        elif breaker is not None:
            held = held or f"nothing is begun: {breaker}"
        elif why is not None:
            held = held or f"load balancer {item.load_balancer_id} is waited for: {why}"
        else:
            old = tuple(one.id for one in seen.live if one.id in item.amphorae)
            moves.append(Begin(item=item, amphorae=old, operating=seen.operating))
            room -= 1
    said = None if any(isinstance(move, Begin) for move in moves) or room <= 0 else held
    return moves if said == rotation.reason else [*moves, Say(reason=said)]


def _passed_over(item: RotationItem, facts: Facts, limits: Limits) -> Finish | None:
    """What becomes of a load balancer that has no turn at all."""
    if not facts.recorded:
        return Finish(item=item, state=ItemState.SKIPPED, reason="it was deleted")
    if not facts.retiring and not any(one.id in item.amphorae for one in facts.live):
        return Finish(item=item, state=ItemState.DONE, reason="its amphorae had been replaced already")
    if facts.provisioning == "ERROR":
        return Finish(
            item=item, state=ItemState.SKIPPED, reason=f"it is in ERROR: {facts.error or 'no reason is known'}"
        )
    why = blocks(facts)
    if why is not None and facts.watched >= limits.patience:
        return Finish(item=item, state=ItemState.SKIPPED, reason=f"it was waited for in vain: {why}")
    return None


def _badness(operating: str | None) -> int:
    return _BADNESS.get(operating or "", 0)
