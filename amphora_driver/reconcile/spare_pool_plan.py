# SPDX-License-Identifier: Apache-2.0
"""The next steps of a pool of warm spares.

Invariant: pure, like `plan`. A pool keeps the configured number of amphorae, and each of them can be adopted at any
time. An unfit, surplus or lost spare is marked as retiring before its removal, so that no load balancer adopts it. A
pool without users is emptied and deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.reconcile.steps import (
    AnyStep,
    Await,
    AwaitAgent,
    Boot,
    DeletePool,
    QuerySpares,
    Record,
    Release,
    RetireSpare,
    SparePoolView,
)
from amphora_driver.store.spare_pools import ROLE

if TYPE_CHECKING:
    from collections.abc import Sequence


# Seconds between two checks of an idle pool. Seconds without heartbeats and answers until a spare is replaced, while
# others send heartbeats. No job depends on this time: a job queries a spare before it adopts it.
LOOK_PAUSE = 30.0
_LOST_AFTER = 60.0
# Seconds after its boot in which a spare is not replaced as unfit.
_FITNESS_GRACE = 60.0
# Seconds between two checks of booting machines; an agent that listens ends the wait earlier.
_BOOT_PAUSE = 2.0


def plan_pool(view: SparePoolView, amphorae: Sequence[Amphora]) -> list[AnyStep]:
    """Return the next steps of a pool, in order; the caller performs them and then plans again."""
    live = [one for one in amphorae if one.state is not AmphoraState.RETIRING]
    if retirements := _retirements(view, live):
        return retirements
    missing = view.stock.number - len(live)
    if missing > 0:
        return [Record(role=ROLE, reason=f"{missing} of {view.stock.number} spares are missing")] * missing
    boots: list[AnyStep] = [step for one in live if (step := _boot_step(view, one)) is not None]
    awaited: list[AnyStep] = [one for one in (_await_step(view, each) for each in live) if one is not None]
    gone = [Release(amphora_id=one.id, reason="the spare is retiring") for one in amphorae if one not in live]
    if boots or awaited or gone:
        # After a failure, finish earlier boots first: the failed step may be the boot of another spare.
        return [*awaited, *gone, *boots] if view.attempts else [*boots, *awaited, *gone]
    if not live and not view.stock.users:
        return [DeletePool(reason="no load balancer uses this pool")]
    if silent := _silent_spares(view, live):
        return [QuerySpares(amphora_ids=silent, reason="they send no heartbeats")]
    booting = tuple(one.id for one in live if one.state is AmphoraState.BOOTING)
    if booting:
        return [Await(until=view.now + _BOOT_PAUSE, amphorae=booting, reason="machines boot")]
    return [Await(until=view.now + LOOK_PAUSE, reason="all spares are ready")]


def _retirements(view: SparePoolView, live: Sequence[Amphora]) -> list[AnyStep]:
    """Return the retirement of unfit, lost and surplus spares; of the surplus, booting and new ones first."""
    why = {one.id: view.stock.unfit[one.id] for one in live if one.id in view.stock.unfit and not _is_new(view, one)}
    if not why and (lost := _find_lost(view, live)) is not None:
        why[lost] = "it sends no heartbeats and does not answer"
    staying = [one for one in live if one.id not in why]
    staying.sort(key=lambda one: one.state is AmphoraState.BOOTING)
    why |= {one.id: f"{view.stock.number} spares are configured" for one in staying[view.stock.number :]}
    return [RetireSpare(amphora_id=amphora_id, reason=reason) for amphora_id, reason in why.items()]


def _find_lost(view: SparePoolView, live: Sequence[Amphora]) -> str | None:
    """Return the lost spare that has been silent for the longest time, if there is one.

    Lost spares are replaced one at a time. No spare counts as lost while the heartbeat receiver fails or many amphorae
    are silent at once.
    """
    if (
        not view.stock.detection_works
        or len(live) < view.stock.number
        or any(one.state is AmphoraState.BOOTING for one in live)
    ):
        return None
    found = [one for one in live if one.id in view.absent and _silent_for(view, one) > _LOST_AFTER]
    return max(found, key=lambda one: _silent_for(view, one)).id if found else None


def _silent_for(view: SparePoolView, one: Amphora) -> float:
    """Return the seconds since the last heartbeat, or since the boot if there was none.

    The reference is the newest heartbeat of any amphora: the receivers' clocks differ from the database's clock.
    """
    if one.heard_at is not None:
        return (view.stock.last_heartbeat_at or 0.0) - one.heard_at
    return 0.0 if one.booted_at is None else view.now - one.booted_at


def _is_new(view: SparePoolView, one: Amphora) -> bool:
    """Return whether a spare has just booted: an image that is always unfit must not cause a boot loop."""
    return one.booted_at is not None and one.booted_at > view.now - _FITNESS_GRACE


def _boot_step(view: SparePoolView, one: Amphora) -> Boot | None:
    if one.management_address is not None or one.id in view.absent:
        return None
    return Boot(amphora_id=one.id, reason="it is recorded but not booted")


def _await_step(view: SparePoolView, one: Amphora) -> AwaitAgent | None:
    if one.state is not AmphoraState.BOOTING or one.id in view.absent:
        return None
    return AwaitAgent(amphora_id=one.id, reason="its agent has not answered yet")


def _silent_spares(view: SparePoolView, live: Sequence[Amphora]) -> tuple[str, ...]:
    """Return the ready spares without a recent heartbeat that this job has not queried."""
    return tuple(
        one.id
        for one in live
        if one.state is AmphoraState.READY
        and one.id not in view.asked
        and (one.heard_at is None or _silent_for(view, one) > view.silence_limit)
    )
