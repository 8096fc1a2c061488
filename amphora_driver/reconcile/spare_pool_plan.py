# SPDX-License-Identifier: Apache-2.0
"""The next steps of a pool of warm spares.

Invariant: pure, like `plan`. A pool keeps the configured number of amphorae, and each of them can be adopted at any
time. An unfit, surplus or lost spare is marked as retiring before its removal, so that no load balancer adopts it. A
pool without users is emptied and deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.reconcile import steps
from amphora_driver.store.spare_pools import ROLE

# Seconds between two checks of a pool whose amphorae are all ready.
LOOK_PAUSE = 30.0
# A spare amphora is replaced after this number of seconds without heartbeats and without an answer, if other amphorae
# send heartbeats. If no amphora sends heartbeats, the network may have failed.
_LOST_AFTER = 60.0
# An unfit spare amphora is kept for this number of seconds after its boot. Otherwise, an image whose amphorae are
# always unfit would cause boots without a pause.
_FITNESS_GRACE = 60.0
# Maximum number of seconds between two checks of booting spare amphorae. An answer of an agent causes an earlier check.
_BOOT_PAUSE = 2.0


def plan_pool(view: steps.SparePoolView, amphorae: Sequence[Amphora]) -> list[steps.Step]:
    """Return the next steps of a pool, in order; the caller performs them and then plans again."""
    live = [one for one in amphorae if one.state is not AmphoraState.RETIRING]
    if retirements := _retirements(view, live):
        return retirements
    missing = view.stock.number - len(live)
    if missing > 0:
        return [steps.Record(role=ROLE, reason=f"{missing} of {view.stock.number} spares are missing")] * missing
    present = [one for one in live if one.id not in view.absent]
    boots = [
        steps.Boot(amphora_id=one.id, reason="it is recorded but not booted")
        for one in present
        if one.management_address is None
    ]
    awaited = [
        steps.AwaitAgent(amphora_id=one.id, reason="its agent has not answered yet")
        for one in present
        if one.state is AmphoraState.BOOTING
    ]
    gone = [steps.Release(amphora_id=one.id, reason="the spare is retiring") for one in amphorae if one not in live]
    if boots or awaited or gone:
        # A spare amphora that does not boot may have caused the last failure. So after a failure, the plan first
        # finishes the amphorae that already boot or must go, and then boots new ones.
        return [*awaited, *gone, *boots] if view.attempts else [*boots, *awaited, *gone]
    if not live and not view.stock.users:
        return [steps.DeletePool(reason="no load balancer uses this pool")]
    silent = tuple(
        one.id
        for one in live
        if one.state is AmphoraState.READY
        and one.id not in view.asked
        and (one.heard_at is None or _silent_for(view, one) > view.silence_limit)
    )
    if silent:
        return [steps.QuerySpares(amphora_ids=silent, reason="they send no heartbeats")]
    booting = tuple(one.id for one in live if one.state is AmphoraState.BOOTING)
    if booting:
        return [steps.Await(until=view.now + _BOOT_PAUSE, amphorae=booting, reason="machines boot")]
    return [steps.Await(until=view.now + LOOK_PAUSE, reason="all spares are ready")]


def _retirements(view: steps.SparePoolView, live: Sequence[Amphora]) -> list[steps.Step]:
    """Return the retirement of unfit, lost and surplus spares; of the surplus, booting and new ones first."""
    old = [one for one in live if one.booted_at is None or one.booted_at <= view.now - _FITNESS_GRACE]
    why = {one.id: view.stock.unfit[one.id] for one in old if one.id in view.stock.unfit}
    if not why and (lost := _find_lost(view, live)) is not None:
        why[lost] = "it sends no heartbeats and does not answer"
    staying = [one for one in live if one.id not in why]
    staying.sort(key=lambda one: one.state is AmphoraState.BOOTING)
    why |= {one.id: f"{view.stock.number} spares are configured" for one in staying[view.stock.number :]}
    return [steps.RetireSpare(amphora_id=amphora_id, reason=reason) for amphora_id, reason in why.items()]


def _find_lost(view: steps.SparePoolView, live: Sequence[Amphora]) -> str | None:
    """Return the lost spare that has been silent for the longest time; None without a lost spare.

    Lost spares are replaced one at a time. No spare counts as lost while the heartbeat receiver fails or many amphorae
    are silent at once.
    """
    booting = any(one.state is AmphoraState.BOOTING for one in live)
    if booting or not view.stock.detection_works or len(live) < view.stock.number:
        return None
    found = [one for one in live if one.id in view.absent and _silent_for(view, one) > _LOST_AFTER]
    return max(found, key=lambda one: _silent_for(view, one)).id if found else None


def _silent_for(view: steps.SparePoolView, one: Amphora) -> float:
    """Return the seconds since the last heartbeat, or since the boot, by the receivers' newest heartbeat."""
    # Health managers and the database have different clocks. So the age of a heartbeat is its distance from the newest
    # heartbeat of all amphorae.
    if one.heard_at is not None:
        return (view.stock.last_heartbeat_at or 0.0) - one.heard_at
    return 0.0 if one.booted_at is None else view.now - one.booted_at
