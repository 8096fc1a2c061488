# SPDX-License-Identifier: Apache-2.0
"""Next moves of an image rotation. Pure.

Invariant: at most `max_unavailable` load balancers are in replacement at the same time. A load balancer counts until
all its new amphorae have served the recorded generation for the settle time. The first load balancer that is less
healthy than before pauses the rotation, and only an operator resumes the rotation. Started replacements are observed
until their end, in every state of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState

# OFFLINE has no severity, because an administrator sets this status on purpose.
_SEVERITY = {"DRAINING": 1, "DEGRADED": 2, "ERROR": 3}


class AmphoraFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora that is not retiring.

    `ready` means that its agent has answered. `heard` means that its heartbeats arrive; None after a short observation.
    """

    id: str
    ready: bool
    confirmed: int
    heard: bool | None
    image: str | None = None
    host: str | None = None
    zone: str | None = None


class LoadBalancerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a load balancer.

    Attributes:
        recorded: the load balancer exists and is not being deleted.
        applied: the newest generation that every amphora serves.
        settled: Octavia has committed the generation, and the record is complete.
        number: number of amphorae of the topology.
        live: amphorae that are not retiring.
        draining: retiring amphorae without VIPs, which only wait for connections to end.
        attempts: consecutive failed jobs; `error` is of the last one.
        tried: failed jobs since the start of the replacement or the last resumption of the rotation.
        was_in_error: its provisioning status was ERROR at that time.
        watched: seconds of observation since the start of the replacement, or while it could not start.
        well: last uninterrupted seconds of this time in which no condition was missing.
    """

    recorded: bool = True
    generation: int = 0
    applied: int = 0
    settled: bool = True
    provisioning: str | None = None
    operating: str | None = None
    number: int = 1
    live: tuple[AmphoraFacts, ...] = ()
    retiring: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    attempts: int = 0
    error: str | None = None
    tried: int = 0
    was_in_error: bool = False
    watched: float = 0.0
    well: float = 0.0


class RotationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Configured limits: seconds and attempts; `timeout` is [amp_rotation] replacement_timeout."""

    settle: float
    timeout: float
    give_up_after: int


class StartItem(msgspec.Struct, frozen=True, kw_only=True):
    """Replace these amphorae of a load balancer."""

    item: RotationItem
    amphorae: tuple[str, ...]
    operating: str | None


class FinishItem(msgspec.Struct, frozen=True, kw_only=True):
    """Record that a load balancer is done, failed or skipped."""

    item: RotationItem
    state: ItemState
    reason: str | None = None


class PauseRotation(msgspec.Struct, frozen=True, kw_only=True):
    """Start no replacement until an operator resumes the rotation."""

    reason: str


class SetReason(msgspec.Struct, frozen=True, kw_only=True):
    """Record why the rotation waits; None if the rotation does not wait."""

    reason: str | None


class FinishRotation(msgspec.Struct, frozen=True, kw_only=True):
    """Record that the rotation has ended."""

    state: RotationState


Facts = Mapping[str, LoadBalancerFacts]
AnyMove = StartItem | FinishItem | PauseRotation | SetReason | FinishRotation


def next_moves(
    rotation: Rotation, items: Sequence[RotationItem], facts: Facts, limits: RotationLimits, breaker: str | None = None
) -> list[AnyMove]:
    """Return the next moves. The caller executes them and calls again.

    Args:
        items: unfinished load balancers in their order; of the waiting items, the first are enough. A failed item
            counts until the rotation is resumed or aborted.
        breaker: why no fail-over may start now; None if fail-overs may start.
    """
    moves: list[AnyMove] = []
    running = [one for one in items if one.state is ItemState.RUNNING]
    waiting = [one for one in items if one.state is ItemState.WAITING]
    ended = [move for one in running if (move := _item_result(rotation, one, facts[one.load_balancer_id], limits))]
    moves += ended
    failed = [move for move in ended if move.state is ItemState.FAILED]
    busy = len(running) - len(ended)
    if rotation.state is RotationState.RUNNING and failed:
        first = failed[0]
        return [*moves, PauseRotation(reason=f"load balancer {first.item.load_balancer_id}: {first.reason}")]
    if rotation.state is RotationState.RUNNING:
        moves += _start_items(rotation, waiting, facts, limits, rotation.max_unavailable - busy, breaker)
    if not items:
        # `items` may contain only a part of the waiting load balancers. Without any item, all load balancers are
        # finished, so the rotation ends.
        aborted = rotation.state is RotationState.ABORTED
        moves.append(FinishRotation(state=RotationState.ABORTED if aborted else RotationState.DONE))
    return moves


def missing_condition(rotation: Rotation, item: RotationItem, facts: LoadBalancerFacts) -> str | None:
    """Return the first condition that a load balancer in replacement does not meet; None if all are met."""
    remaining = [*sorted(facts.retiring - facts.draining), *(one.id for one in facts.live if one.id in item.amphorae)]
    if remaining:
        return f"amphora {remaining[0]} is not replaced yet"
    if len(facts.live) < facts.number or not all(one.ready for one in facts.live):
        return "a new amphora is not ready yet"
    if facts.applied < facts.generation:
        return f"not all amphorae serve generation {facts.generation} yet"
    for one in facts.live:
        if one.confirmed < facts.generation:
            return f"amphora {one.id} has not confirmed generation {facts.generation} yet"
        if one.heard is not True:
            return f"amphora {one.id} sends no heartbeats"
        if wrong := _wrong_machine(rotation, one):
            return wrong
    if _SEVERITY.get(facts.operating or "", 0) > _SEVERITY.get(item.operating or "", 0):
        return f"its operating status is {facts.operating}, and was {item.operating} before"
    return None


def blocking_reason(facts: LoadBalancerFacts) -> str | None:
    """Return why the replacement of a load balancer cannot start now; None if the replacement can start."""
    if not facts.settled or facts.applied < facts.generation:
        return "it is being changed"
    if facts.retiring or len(facts.live) < facts.number or not all(one.ready for one in facts.live):
        return "one of its amphorae is being replaced"
    silent = [one.id for one in facts.live if one.heard is False]
    return f"amphora {silent[0]} sends no heartbeats" if silent else None


def _item_result(
    rotation: Rotation, item: RotationItem, facts: LoadBalancerFacts, limits: RotationLimits
) -> FinishItem | None:
    if not facts.recorded:
        return FinishItem(item=item, state=ItemState.SKIPPED, reason="it was deleted")
    missing = missing_condition(rotation, item, facts)
    if missing is None:
        return FinishItem(item=item, state=ItemState.DONE) if facts.well >= limits.settle else None
    reason = _failure_reason(rotation, item, facts, limits, missing)
    return None if reason is None else FinishItem(item=item, state=ItemState.FAILED, reason=reason)


def _failure_reason(
    rotation: Rotation, item: RotationItem, facts: LoadBalancerFacts, limits: RotationLimits, missing: str
) -> str | None:
    """Return why the replacement counts as failed; None if it does not."""
    if facts.provisioning == "ERROR" and not facts.was_in_error:
        return f"it is in ERROR: {facts.error or missing}"
    if facts.tried >= limits.give_up_after:
        return f"{facts.tried} attempts failed: {facts.error or missing}"
    new = [one for one in facts.live if one.id not in item.amphorae and one.ready]
    wrong = [reason for one in new if (reason := _wrong_machine(rotation, one))]
    if wrong:
        return wrong[0]
    if facts.watched >= limits.timeout:
        return f"not done in {limits.timeout:g} s: {missing}" + (f" ({facts.error})" if facts.error else "")
    return None


def _wrong_machine(rotation: Rotation, one: AmphoraFacts) -> str | None:
    """Return why the machine of a new amphora is not the requested one; None if it is."""
    wanted = rotation.wanted
    if wanted.image not in (None, one.image):
        return f"amphora {one.id} was booted from {one.image}, and not from {wanted.image}"
    if wanted.forbids(one.host, one.zone):
        what = f"hypervisor {wanted.host}" if one.host in wanted.hosts else f"availability zone {wanted.zone}"
        return f"amphora {one.id} runs on the evacuated {what}: disable it for the scheduler of the cloud"
    return None


def _start_items(
    rotation: Rotation,
    waiting: Sequence[RotationItem],
    facts: Facts,
    limits: RotationLimits,
    free_slots: int,
    breaker: str | None,
) -> list[AnyMove]:
    moves: list[AnyMove] = []
    held: str | None = None
    for item in waiting:
        if free_slots <= 0:
            break
        seen = facts[item.load_balancer_id]
        skipped = _skip_item(item, seen, limits)
        why = blocking_reason(seen)
        if skipped is not None:
            moves.append(skipped)
        elif breaker is not None:
            held = held or f"no replacement starts: {breaker}"
        elif why is not None:
            held = held or f"waiting for load balancer {item.load_balancer_id}: {why}"
        else:
            old = tuple(one.id for one in seen.live if one.id in item.amphorae)
            moves.append(StartItem(item=item, amphorae=old, operating=seen.operating))
            free_slots -= 1
    reason = None if any(isinstance(move, StartItem) for move in moves) or free_slots <= 0 else held
    return moves if reason == rotation.reason else [*moves, SetReason(reason=reason)]


def _skip_item(item: RotationItem, facts: LoadBalancerFacts, limits: RotationLimits) -> FinishItem | None:
    """Return the result of a load balancer whose replacement must not start; None if it may start."""
    if not facts.recorded:
        return FinishItem(item=item, state=ItemState.SKIPPED, reason="it was deleted")
    if not facts.retiring and not any(one.id in item.amphorae for one in facts.live):
        return FinishItem(item=item, state=ItemState.DONE, reason="its amphorae were replaced already")
    if facts.provisioning == "ERROR":
        reason = f"it is in ERROR: {facts.error or 'no reason is known'}"
        return FinishItem(item=item, state=ItemState.SKIPPED, reason=reason)
    why = blocking_reason(facts)
    if why is not None and facts.watched >= limits.timeout:
        return FinishItem(item=item, state=ItemState.SKIPPED, reason=f"not started in {limits.timeout:g} s: {why}")
    return None
