# SPDX-License-Identifier: Apache-2.0
"""What a pool of warm spares needs next: its own small plan.

Invariant: pure, like `plan`. A pool keeps as many amphorae as are wanted, all of which could be taken in this moment:
one that is unfit, too many, or gone is marked before it is removed, so that nobody takes what is about to go. Where
nobody uses the pool, it is emptied and forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.reconcile.steps import (
    AnyStep,
    AskSpares,
    Await,
    AwaitAgent,
    Boot,
    Disband,
    Record,
    Release,
    Retire,
    Wanted,
)
from amphora_driver.store.spare_pools import ROLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.store.spare_pools import SparePoolState

# Seconds between two looks at a pool in which nothing happens; and after which a spare that is neither heard nor
# answers, while others are heard, is given up. Nobody waits for it: whoever takes a spare asks it first.
LOOK_PAUSE = 30.0
_LOST = 60.0
# Seconds for which nobody asks whether one that was just booted is what is wanted.
_NEW = 60.0
# Seconds between two looks at machines that boot; an agent that listens is heard of before that.
_BOOT_PAUSE = 2.0


def plan_pool(wanted: Wanted, stock: SparePoolState, amphorae: Sequence[Amphora]) -> list[AnyStep]:
    """The next steps of a pool, in order; the same question is asked again after they were taken."""
    live = [one for one in amphorae if one.state is not AmphoraState.RETIRING]
    if marks := _marks(wanted, stock, live):
        return marks
    missing = stock.number - len(live)
    if missing > 0:
        return [Record(role=ROLE, reason=f"{missing} of {stock.number} spares are missing")] * missing
    boots: list[AnyStep] = [step for one in live if (step := _boot(wanted, one)) is not None]
    awaited: list[AnyStep] = [one for one in (_await(wanted, each) for each in live) if one is not None]
    gone = [Release(amphora_id=one.id, reason="it is a spare no more") for one in amphorae if one not in live]
    if boots or awaited or gone:
        # What was ordered already first, once something failed: it may have been the boot of another one.
        return [*awaited, *gone, *boots] if wanted.attempts else [*boots, *awaited, *gone]
    if not live and not stock.users:
        return [Disband(reason="nobody takes spares from this pool")]
    if quiet := _quiet(wanted, stock, live):
        return [AskSpares(amphora_ids=quiet, reason="they are not heard")]
    booting = tuple(one.id for one in live if one.state is AmphoraState.BOOTING)
    if booting:
        return [Await(until=wanted.now + _BOOT_PAUSE, amphorae=booting, reason="machines boot")]
    return [Await(until=wanted.now + LOOK_PAUSE, reason="spares wait to be taken")]


def _marks(wanted: Wanted, stock: SparePoolState, live: Sequence[Amphora]) -> list[AnyStep]:
    """Those that are to go: unfit, lost, or too many. Of too many, those that still boot go first, then the newest."""
    why = {one.id: stock.unfit[one.id] for one in live if one.id in stock.unfit and not _is_new(wanted, one)}
    if not why and (lost := _lost(wanted, stock, live)) is not None:
        why[lost] = "it is neither heard nor answers"
    staying = [one for one in live if one.id not in why]
    staying.sort(key=lambda one: one.state is AmphoraState.BOOTING)
    why |= {one.id: f"{stock.number} spares are wanted" for one in staying[stock.number :]}
    return [Retire(amphora_id=amphora_id, reason=reason) for amphora_id, reason in why.items()]


def _lost(wanted: Wanted, stock: SparePoolState, live: Sequence[Amphora]) -> str | None:
    """The one that is given up, if any: the longest silent.

    They are given up one by one, each when the one before has been replaced. Where we are the ones who are deaf, or
    many fall silent at once, nobody is.
    """
    if not stock.detection_works or len(live) < stock.number or any(one.state is AmphoraState.BOOTING for one in live):
        return None
    found = [one for one in live if one.id in wanted.absent and _silent_for(wanted, stock, one) > _LOST]
    return max(found, key=lambda one: _silent_for(wanted, stock, one)).id if found else None


def _silent_for(wanted: Wanted, stock: SparePoolState, one: Amphora) -> float:
    """Seconds since it was heard, or since it was booted if it never was.

    It is compared with when anybody was heard last: the clocks of those who listen are not the database's.
    """
    if one.heard_at is not None:
        return (stock.last_heartbeat_at or 0.0) - one.heard_at
    return 0.0 if one.booted_at is None else wanted.now - one.booted_at


def _is_new(wanted: Wanted, one: Amphora) -> bool:
    """Whether it was booted a moment ago: what is unfit from the first is not replaced without a pause."""
    return one.booted_at is not None and one.booted_at > wanted.now - _NEW


def _boot(wanted: Wanted, one: Amphora) -> Boot | None:
    if one.management_address is not None or one.id in wanted.absent:
        return None
    return Boot(amphora_id=one.id, reason="it is recorded but not booted")


def _await(wanted: Wanted, one: Amphora) -> AwaitAgent | None:
    if one.state is not AmphoraState.BOOTING or one.id in wanted.absent:
        return None
    return AwaitAgent(amphora_id=one.id, reason="its agent has not answered yet")


def _quiet(wanted: Wanted, stock: SparePoolState, live: Sequence[Amphora]) -> tuple[str, ...]:
    """Those that wait to be taken and have not been heard lately."""
    return tuple(
        one.id
        for one in live
        if one.state is AmphoraState.READY
        and one.id not in wanted.asked
        and (one.heard_at is None or _silent_for(wanted, stock, one) > wanted.patience)
    )
