# SPDX-License-Identifier: Apache-2.0
"""Image rotation: replaces the amphorae of a rotation, a few load balancers at a time.

Invariant: one controller at a time holds the duty `rotation`. The controller decides on locked rows: the row of the
rotation, and the rows of each load balancer whose replacement starts. Durations include only the time that the
controller observed. After a restart or a pause of the process the settle times start again, and no load balancer fails
because of the pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver import failpoints
from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import plain_columns
from amphora_driver.database.tables import amphora, job, object_status
from amphora_driver.maintenance import image_rotation_plan as plan
from amphora_driver.maintenance.duty_loop import run_duty
from amphora_driver.maintenance.image_rotation_plan import AnyMove, FinishItem, LoadBalancerFacts, StartItem
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.store import amphorae, circuit_breaker, failovers, rotations
from amphora_driver.store.generations import Op
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState

if TYPE_CHECKING:
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
DUTY = "rotation"
# Seconds between two rounds.
_EVERY = 1.0
# Seconds after which the lease of the image rotation expires without a renewal. One controller at a time holds this
# lease.
_DUTY_SECONDS = 10.0
# Maximum seconds that one round adds to a measured duration. A longer gap between two rounds is a pause of the process
# or database and must not count.
_LONGEST_GAP = 3.0
# Maximum number of waiting load balancers that a round considers. Some of them may be busy, so a round needs several
# candidates.
_CANDIDATES = 100
# Number of missed heartbeats after which an amphora counts as silent.
_MISSED = 3
# Maximum seconds between the arrival of a heartbeat and its write to the database.
_WRITING = 2.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the active rotation."""

    rotation: Rotation
    items: list[RotationItem]
    facts: dict[str, LoadBalancerFacts]
    breaker: str | None


class RotationWatch:
    """State of load balancers and amphorae over several rounds.

    An amphora counts as silent after `silence` seconds without a new heartbeat.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        # For each amphora: epoch and sequence number of the newest heartbeat, whether the observation included a new
        # heartbeat, and the seconds since the newest heartbeat.
        self._heartbeats: dict[str, tuple[tuple[int, int], bool, float]] = {}
        self._watched: dict[str, float] = {}
        self._well: dict[str, float] = {}
        # For each load balancer in replacement: the number of failed attempts of its job, and whether its status was
        # ERROR, both at the first observation.
        self._first: dict[str, tuple[int, bool]] = {}

    def reset(self) -> None:
        for memory in (self._heartbeats, self._watched, self._well, self._first):
            memory.clear()

    def observe_heartbeats(self, positions: dict[str, tuple[int, int]], gap: float) -> None:
        """Record the last heartbeat of each amphora as (epoch, sequence), `gap` seconds after the last call."""
        heartbeats = {}
        for one, position in positions.items():
            before, moved, still = self._heartbeats.get(one, (position, False, -gap))
            heartbeats[one] = (position, moved, still + gap) if before == position else (position, True, 0.0)
        self._heartbeats = heartbeats

    def is_heard(self, amphora_id: str) -> bool | None:
        """Return whether heartbeats of an amphora arrive; None if the observation was too short."""
        _position, moved, still = self._heartbeats.get(amphora_id, ((0, 0), False, 0.0))
        if still > self._silence:
            return False
        return True if moved else None

    def observe_rows(self, snapshot: Snapshot, gap: float) -> Snapshot:
        """Record the rows, `gap` seconds after the last call; return them with the durations."""
        watched, well, first = {}, {}, {}
        may_start = snapshot.breaker is None and snapshot.rotation.state is RotationState.RUNNING
        for item in snapshot.items:
            of, facts = item.load_balancer_id, snapshot.facts[item.load_balancer_id]
            if item.state is ItemState.RUNNING:
                watched[of] = self._watched.get(of, 0.0) + gap
                before = self._first.get(of, (facts.attempts, facts.provisioning == "ERROR"))
                # A later check compares the number of failed attempts with the recorded number. A successful job resets
                # the present number to zero, so the smaller number is recorded.
                first[of] = (min(before[0], facts.attempts), before[1] and facts.provisioning == "ERROR")
                if plan.missing_condition(snapshot.rotation, item, facts) is None:
                    well[of] = self._well[of] + gap if of in self._well else 0.0
            elif may_start and plan.blocking_reason(facts):
                watched[of] = self._watched.get(of, 0.0) + gap
        self._watched, self._well, self._first = watched, well, first
        return self.add_durations(snapshot)

    def forget(self, load_balancer_id: str) -> None:
        for memory in (self._watched, self._well, self._first):
            memory.pop(load_balancer_id, None)

    def add_durations(self, snapshot: Snapshot) -> Snapshot:

        def complete(of: str, facts: LoadBalancerFacts) -> LoadBalancerFacts:
            attempts, in_error = self._first.get(of, (facts.attempts, False))
            tried = max(facts.attempts - attempts, 0)
            watched, well = self._watched.get(of, 0.0), self._well.get(of, 0.0)
            return msgspec.structs.replace(facts, watched=watched, well=well, tried=tried, was_in_error=in_error)

        return msgspec.structs.replace(snapshot, facts={of: complete(of, one) for of, one in snapshot.facts.items()})


class ImageRotator:
    """Replaces the amphorae of a rotation; calls `on_due` when load balancers become due."""

    def __init__(
        self, conf: ConfigOpts, database: Database, catalogue: Catalogue, owner: str, on_due: Callable[[], None]
    ) -> None:
        self._limits = plan.RotationLimits(
            settle=conf.amp_rotation.settle,
            timeout=conf.amp_rotation.replacement_timeout,
            give_up_after=conf.amp_controller.give_up_after,
        )
        self._database = database
        self._catalogue = catalogue
        self._owner = owner
        self._on_due = on_due
        self._watch = RotationWatch(_MISSED * conf.amp_health.interval + _WRITING)
        # Time of the last round; None while another controller holds the lease.
        self._last_round_at: float | None = None

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        run_duty(DUTY, _EVERY, stopping, draining, work=self.advance, release=self.release)

    def release(self) -> None:
        if self._last_round_at is not None:
            self._last_round_at = None
            self._watch.reset()
            release_duty(self._database, DUTY, self._owner)

    def advance(self) -> list[AnyMove]:
        """Execute the next moves of the active rotation; return them."""
        if self._database.read(rotations.get_active_rotation) is None:
            self.release()
            return []
        if not acquire_duty(self._database, DUTY, self._owner, _DUTY_SECONDS):
            self._last_round_at = None
            self._watch.reset()
            return []
        now = time.monotonic()
        gap = 0.0 if self._last_round_at is None else min(now - self._last_round_at, _LONGEST_GAP)
        self._last_round_at = now
        snapshot, positions = self._database.read(self._read_active)
        if snapshot is None:
            return []
        self._watch.observe_heartbeats(positions, gap)
        snapshot = self._watch.observe_rows(self._add_heard(snapshot), gap)
        moves = self._next_moves(snapshot)
        if not moves:
            return []
        done = self._database.write(lambda c: self._execute(c, snapshot.rotation.id, moves))
        failpoints.reach(failpoints.Point.ROTATION_MOVED)
        for move in done:
            LOG.info("the controller changed the state of image rotation %d: %s", snapshot.rotation.id, _describe(move))
            if isinstance(move, StartItem | FinishItem):
                self._watch.forget(move.item.load_balancer_id)
        if any(isinstance(move, StartItem) for move in done):
            self._on_due()
        return done

    def _next_moves(self, snapshot: Snapshot) -> list[AnyMove]:
        return plan.next_moves(snapshot.rotation, snapshot.items, snapshot.facts, self._limits, snapshot.breaker)

    def _execute(self, connection: sa.Connection, rotation_id: int, planned: Sequence[AnyMove]) -> list[AnyMove]:
        """Decide again on locked rows and write the moves; return them."""
        found = rotations.get_rotation(connection, rotation_id, lock=True)
        if found.ended_at is not None:
            return []
        locked = {move.item.load_balancer_id for move in planned if isinstance(move, StartItem)}
        rotations.lock_work(connection, locked)
        snapshot = self._watch.add_durations(self._add_heard(self._read(connection, found)))
        now = connection.execute(sa.select(clock.now(connection))).scalar_one()
        # A load balancer may have become ready after the locks were taken. Its row is not locked, so its replacement
        # starts in the next round.
        moves = []
        for move in self._next_moves(snapshot):
            if not isinstance(move, StartItem) or move.item.load_balancer_id in locked:
                self._write(connection, found, move, now)
                moves.append(move)
        failpoints.reach(failpoints.Point.ROTATION_WRITTEN)
        return moves

    def _write(self, connection: sa.Connection, found: Rotation, move: AnyMove, now: float) -> None:
        if isinstance(move, StartItem):
            rotations.begin_item(connection, found.id, move.item, move.operating)
            cause, reason = failovers.Cause.ROTATION, f"rotation {found.id} replaces it"
            why = failovers.FailoverTrigger(cause=cause, reason=reason, asked_by=found.asked_by, rotation_id=found.id)
            failovers.open_failovers(connection, move.item.load_balancer_id, move.amphorae, why, now)
        elif isinstance(move, FinishItem):
            rotations.finish_item(connection, found.id, move.item, move.state, move.reason)
        elif isinstance(move, plan.PauseRotation):
            rotations.set_rotation_state(connection, found.id, RotationState.PAUSED, move.reason)
        elif isinstance(move, plan.SetReason):
            rotations.set_rotation_reason(connection, found.id, move.reason)
        else:
            rotations.finish_rotation(connection, found.id, move.state)

    def _read_active(self, connection: sa.Connection) -> tuple[Snapshot | None, dict[str, tuple[int, int]]]:
        found = rotations.get_active_rotation(connection)
        if found is None:
            return None, {}
        snapshot = self._read(connection, found)
        ids = [each.id for one in snapshot.facts.values() for each in one.live]
        return snapshot, amphorae.last_heartbeats(connection, ids)

    def _read(self, connection: sa.Connection, found: Rotation) -> Snapshot:
        begun = [ItemState.RUNNING] if found.state is RotationState.ABORTED else [ItemState.RUNNING, ItemState.FAILED]
        items = rotations.list_items(connection, found.id, begun)
        items += rotations.list_items(connection, found.id, [ItemState.WAITING], _CANDIDATES)
        facts = self._read_facts(connection, [one.load_balancer_id for one in items])
        return Snapshot(rotation=found, items=items, facts=facts, breaker=_breaker_reason(connection))

    def _add_heard(self, snapshot: Snapshot) -> Snapshot:
        def complete(facts: LoadBalancerFacts) -> LoadBalancerFacts:
            live = tuple(msgspec.structs.replace(one, heard=self._watch.is_heard(one.id)) for one in facts.live)
            return msgspec.structs.replace(facts, live=live)

        return msgspec.structs.replace(snapshot, facts={of: complete(facts) for of, facts in snapshot.facts.items()})

    def _read_facts(self, connection: sa.Connection, load_balancer_ids: Sequence[str]) -> dict[str, LoadBalancerFacts]:
        works = connection.execute(
            sa.select(*plain_columns(job)).where(job.c.load_balancer_id.in_(load_balancer_ids))
        ).all()
        live: defaultdict[str, list[plan.AmphoraFacts]] = defaultdict(list)
        # For each load balancer and retiring amphora: whether the amphora drains.
        retiring: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        query = sa.select(*plain_columns(amphora)).where(amphora.c.load_balancer_id.in_(load_balancer_ids))
        for row in connection.execute(query.order_by(amphora.c.created_at, amphora.c.id)):
            if row.state == AmphoraState.RETIRING.value:
                retiring[row.load_balancer_id][row.id] = row.drains_until is not None
                continue
            ready = row.state == AmphoraState.READY.value
            machine = {"image": row.image, "host": row.host, "zone": row.zone}
            facts = plan.AmphoraFacts(id=row.id, ready=ready, confirmed=row.confirmed, heard=None, **machine)
            live[row.load_balancer_id].append(facts)
        columns = object_status.c.object_id, object_status.c.provisioning, object_status.c.operating
        query = sa.select(*columns).where(object_status.c.object_id.in_(load_balancer_ids))
        statuses = {row.object_id: row for row in connection.execute(query)}
        found = dict.fromkeys(load_balancer_ids, LoadBalancerFacts(recorded=False))
        for row in works:
            if row.op != Op.APPLY:
                continue
            of = row.load_balancer_id
            reported = statuses.get(of)
            found[of] = LoadBalancerFacts(
                generation=row.generation,
                applied=row.applied,
                settled=row.committed >= row.generation and not row.read_back,
                provisioning=None if reported is None else reported.provisioning,
                operating=None if reported is None else reported.operating,
                number=len(self._catalogue.topology(row.topology).roles),
                live=tuple(live[of]),
                retiring=frozenset(retiring[of]),
                draining=frozenset(one for one, drains in retiring[of].items() if drains),
                attempts=row.attempts,
                error=row.error,
            )
        return found


def _breaker_reason(connection: sa.Connection) -> str | None:
    """Return why no fail-over may start now; None if fail-overs may start."""
    rows = circuit_breaker.read_breaker_rows(connection)
    sight = rows.get(circuit_breaker.SIGHT)
    if sight is not None and sight.state == circuit_breaker.BLIND:
        return f"the failure detector is blind ({sight.reason or 'no reason is known'})"
    for name in (circuit_breaker.OPERATOR, circuit_breaker.AUTOMATIC):
        row = rows.get(name)
        if row is not None and row.state != circuit_breaker.CLOSED:
            return f"the circuit breaker is {row.state} ({row.reason or 'no reason is known'})"
    return None


def _describe(move: AnyMove) -> str:
    if isinstance(move, StartItem):
        return f"replacing amphorae {', '.join(move.amphorae)} of load balancer {move.item.load_balancer_id}"
    if isinstance(move, FinishItem):
        return f"load balancer {move.item.load_balancer_id} is {move.state.value}: {move.reason or 'healthy as before'}"
    if isinstance(move, plan.PauseRotation):
        return f"paused: {move.reason}"
    if isinstance(move, plan.FinishRotation):
        return f"ended: {move.state.value}"
    return move.reason or "continues"
