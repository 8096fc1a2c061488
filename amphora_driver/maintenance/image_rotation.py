# SPDX-License-Identifier: Apache-2.0
"""Moving a rotation on.

Invariant: one controller at a time does it, and what it decides it decides about rows that it holds: those of the
rotation, and of each load balancer whose turn comes. Time counts only while somebody watches: after a restart, or a
stop, amphorae settle anew, and nothing has failed because nobody looked.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints
from amphora_driver.database import clock
from amphora_driver.database.tables import amphora, status, work
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.maintenance import image_rotation_plan as deciding
from amphora_driver.maintenance.image_rotation_plan import AnyMove, Begin, End, Facts, Finish, Limits, Pause, Say, Seen
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.store import amphorae, circuit_breaker, failovers, rotations
from amphora_driver.store.requests import Op
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
DUTY = "rotation"
# Seconds between two looks, and for which the duty is kept.
_EVERY = 1.0
_DUTY_SECONDS = 10.0
# So much of the time between two looks counts: more was a stop of this process, or the database's.
_LONGEST_GAP = 3.0
# Load balancers that are looked at for the next turn, in their order: some of them may be busy.
_CANDIDATES = 100
# Heartbeats in a row that may be missing, and seconds that writing them down may take.
_MISSED, _WRITING = 3, 2.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows say of the rotation that has not ended."""

    rotation: Rotation
    items: list[RotationItem]
    facts: dict[str, Facts]
    breaker: str | None


class Watch:
    """What somebody who looks again and again remembers of load balancers and amphorae.

    Args:
        silence: seconds without a new heartbeat after which an amphora is not heard any more.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        # For each amphora the place of its last heartbeat, whether it was seen to change, and for how long it has not.
        self._heard: dict[str, tuple[tuple[int, int], bool, float]] = {}
        self._watched: dict[str, float] = {}
        self._well: dict[str, float] = {}
        # Of load balancers whose turn it is: attempts, and whether they were in ERROR, when they were seen first.
        self._first: dict[str, tuple[int, bool]] = {}

    def forget(self) -> None:
        """Everything begins anew."""
        self.__init__(self._silence)  # type: ignore[misc]

    def look(self, places: dict[str, tuple[int, int]], gap: float) -> None:
        """Take in the places of last heartbeats, `gap` seconds after those before."""
        heard = {}
        for one, place in places.items():
            before = self._heard.get(one)
            if before is None:
                heard[one] = (place, False, 0.0)
            elif before[0] != place:
                heard[one] = (place, True, 0.0)
            else:
                heard[one] = (place, before[1], before[2] + gap)
        self._heard = heard

    def heard(self, amphora_id: str) -> bool | None:
        """Whether heartbeats of an amphora arrive; None if it was not watched for long enough."""
        _place, moved, still = self._heard.get(amphora_id, ((0, 0), False, 0.0))
        if still > self._silence:
            return False
        return True if moved else None

    def judge(self, seen: Snapshot, gap: float) -> Snapshot:
        """The same with what is remembered, `gap` seconds after the last look."""
        watched, well, first = {}, {}, {}
        for item in seen.items:
            of, facts = item.load_balancer_id, seen.facts[item.load_balancer_id]
            if item.state is ItemState.RUNNING:
                watched[of] = self._watched.get(of, 0.0) + gap
                before = self._first.get(of, (facts.attempts, facts.provisioning == "ERROR"))
                # One success, and attempts are counted from the beginning.
                first[of] = (min(before[0], facts.attempts), before[1] and facts.provisioning == "ERROR")
                if deciding.lacks(seen.rotation, item, facts) is None:
                    well[of] = self._well[of] + gap if of in self._well else 0.0
            elif seen.breaker is None and seen.rotation.state is RotationState.RUNNING and deciding.blocks(facts):
                watched[of] = self._watched.get(of, 0.0) + gap
        self._watched, self._well, self._first = watched, well, first
        return self.known(seen)

    def over(self, load_balancer_id: str) -> None:
        """Its turn is over: should it have another one, that begins anew."""
        for memory in (self._watched, self._well, self._first):
            memory.pop(load_balancer_id, None)

    def known(self, seen: Snapshot) -> Snapshot:
        """The same with what is remembered now."""

        def knowing(of: str, facts: Facts) -> Facts:
            attempts, in_error = self._first.get(of, (facts.attempts, False))
            return msgspec.structs.replace(
                facts,
                watched=self._watched.get(of, 0.0),
                well=self._well.get(of, 0.0),
                tried=max(facts.attempts - attempts, 0),
                was_in_error=in_error,
            )

        return msgspec.structs.replace(seen, facts={of: knowing(of, one) for of, one in seen.facts.items()})


class Rotator:
    """Replaces the amphorae of a rotation, a few load balancers at a time.

    Args:
        conf: our options.
        database: where rotations are.
        catalogue: knows how many amphorae a topology wants.
        owner: name of this process.
        tell: called when load balancers have become due.
    """

    def __init__(
        self, conf: ConfigOpts, database: Database, catalogue: Catalogue, owner: str, tell: Callable[[], None]
    ) -> None:
        self._limits = Limits(
            settle=conf.rotation.settle,
            patience=conf.rotation.patience,
            give_up_after=conf.controller.give_up_after,
        )
        self._database = database
        self._catalogue = catalogue
        self._owner = owner
        self._tell = tell
        self._watch = Watch(_MISSED * conf.health.interval + _WRITING)
        self._looked_at: float | None = None

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Move on whatever rotation there is, until told to stop; gives the duty up while `draining` is set."""
        while not stopping.wait(_EVERY):
            try:
                if draining.is_set():
                    self.rest()
                else:
                    self.look()
            except AmphoraDriverError as error:
                LOG.warning("the rotation waits: %s", error)
            except Exception:
                LOG.exception("moving the rotation on failed, and is tried again")
        try:
            self.rest()
        except AmphoraDriverError as error:
            LOG.info("the duty of the rotation runs out: %s", error)

    def rest(self) -> None:
        """Let another controller do it."""
        if self._looked_at is not None:
            self._looked_at = None
            self._watch.forget()
            release_duty(self._database, DUTY, self._owner)

    def look(self) -> list[AnyMove]:
        """Have a look at the rotation that has not ended, if there is one, and do what is next; returns what."""
        if self._database.read(rotations.get_active_rotation) is None:
            self.rest()
            return []
        if not acquire_duty(self._database, DUTY, self._owner, _DUTY_SECONDS):
            self._looked_at = None
            self._watch.forget()
            return []
        now = time.monotonic()
        gap = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_GAP)
        self._looked_at = now
        seen, places = self._database.read(self._see_and_hear)
        if seen is None:
            return []
        self._watch.look(places, gap)
        seen = self._watch.judge(self._with_ears(seen), gap)
        moves = self._moves(seen)
        if not moves:
            return []
        done = self._database.write(lambda connection: self._act(connection, seen.rotation.id, moves))
        failpoints.reach(failpoints.Point.ROTATION_MOVED)
        for move in done:
            LOG.info("rotation %d: %s", seen.rotation.id, _sentence(move))
            if isinstance(move, Begin | Finish):
                self._watch.over(move.item.load_balancer_id)
        if any(isinstance(move, Begin) for move in done):
            self._tell()
        return done

    def _moves(self, seen: Snapshot) -> list[AnyMove]:
        return deciding.next_moves(seen.rotation, seen.items, seen.facts, self._limits, seen.breaker)

    def _act(self, connection: sa.Connection, rotation_id: int, meant: Sequence[AnyMove]) -> list[AnyMove]:
        """Decide again, about rows that nobody else changes meanwhile, and write that down."""
        found = rotations.get_rotation(connection, rotation_id, lock=True)
        if found.ended_at is not None:
            return []
        held = {move.item.load_balancer_id for move in meant if isinstance(move, Begin)}
        rotations.lock_work(connection, held)
        seen = self._watch.known(self._with_ears(self._see(connection, found)))
        now = connection.execute(sa.select(clock.now(connection))).scalar_one()
        # Those that became free in between come next time: nobody holds them.
        moves = [
            move for move in self._moves(seen) if not isinstance(move, Begin) or move.item.load_balancer_id in held
        ]
        for move in moves:
            self._write(connection, found, move, now)
        failpoints.reach(failpoints.Point.ROTATION_WRITTEN)
        return moves

    def _write(self, connection: sa.Connection, found: Rotation, move: AnyMove, now: float) -> None:
        if isinstance(move, Begin):
            rotations.begin_item(connection, found.id, move.item, move.operating)
            why = failovers.FailoverTrigger(
                cause=failovers.Cause.ROTATION,
                reason=f"rotation {found.id} replaces it",
                asked_by=found.asked_by,
                rotation_id=found.id,
            )
            failovers.open_failovers(connection, move.item.load_balancer_id, move.amphorae, why, now)
        elif isinstance(move, Finish):
            rotations.finish_item(connection, found.id, move.item, move.state, move.reason)
        elif isinstance(move, Pause):
            rotations.set_rotation_state(connection, found.id, RotationState.PAUSED, move.reason)
        elif isinstance(move, Say):
            rotations.set_rotation_reason(connection, found.id, move.reason)
        else:
            rotations.finish_rotation(connection, found.id, move.state)

    # --- what the rows say --------------------------------------------------------------------------------------------

    def _see_and_hear(self, connection: sa.Connection) -> tuple[Snapshot | None, dict[str, tuple[int, int]]]:
        found = rotations.get_active_rotation(connection)
        if found is None:
            return None, {}
        seen = self._see(connection, found)
        return seen, amphorae.last_heartbeats(connection, [each.id for one in seen.facts.values() for each in one.live])

    def _see(self, connection: sa.Connection, found: Rotation) -> Snapshot:
        begun = [ItemState.RUNNING] if found.state is RotationState.ABORTED else [ItemState.RUNNING, ItemState.FAILED]
        items = rotations.list_items(connection, found.id, begun)
        items += rotations.list_items(connection, found.id, [ItemState.WAITING], _CANDIDATES)
        return Snapshot(
            rotation=found,
            items=items,
            facts=self._facts(connection, [one.load_balancer_id for one in items]),
            breaker=_breaker(connection),
        )

    def _with_ears(self, seen: Snapshot) -> Snapshot:
        def hearing(facts: Facts) -> Facts:
            live = tuple(msgspec.structs.replace(one, heard=self._watch.heard(one.id)) for one in facts.live)
            return msgspec.structs.replace(facts, live=live)

        return msgspec.structs.replace(seen, facts={of: hearing(facts) for of, facts in seen.facts.items()})

    def _facts(self, connection: sa.Connection, load_balancer_ids: Sequence[str]) -> dict[str, Facts]:
        works = connection.execute(sa.select(work).where(work.c.load_balancer_id.in_(load_balancer_ids))).all()
        machines: dict[str, list[sa.Row[tuple[object, ...]]]] = {}
        query = sa.select(amphora).where(amphora.c.load_balancer_id.in_(load_balancer_ids))
        for row in connection.execute(query.order_by(amphora.c.created_at, amphora.c.id)):
            machines.setdefault(row.load_balancer_id, []).append(row)
        told = {
            row.object_id: row
            for row in connection.execute(sa.select(status).where(status.c.object_id.in_(load_balancer_ids)))
        }
        found = dict.fromkeys(load_balancer_ids, Facts(recorded=False))
        for row in works:
            if row.op != Op.APPLY:
                continue
            of = row.load_balancer_id
            said = told.get(of)
            gone = [one for one in machines.get(of, []) if one.state == amphorae.AmphoraState.RETIRING.value]
            found[of] = Facts(
                generation=row.generation,
                applied=row.applied,
                settled=row.committed >= row.generation and not row.read_back,
                provisioning=None if said is None else said.provisioning,
                operating=None if said is None else said.operating,
                number=len(self._catalogue.topology(row.topology).roles),
                live=tuple(_seen(one) for one in machines.get(of, []) if one not in gone),
                retiring=frozenset(one.id for one in gone),
                draining=frozenset(one.id for one in gone if one.drains_until is not None),
                attempts=row.attempts,
                error=row.error,
            )
        return found


def _seen(row: sa.Row[tuple[object, ...]]) -> Seen:
    ready = row.state == amphorae.AmphoraState.READY.value
    return Seen(id=row.id, ready=ready, confirmed=row.confirmed, heard=None, image=row.image)


def _breaker(connection: sa.Connection) -> str | None:
    """Why no fail-over is to be begun now, in words."""
    rows = circuit_breaker.read_breaker_rows(connection)
    sight = rows.get(circuit_breaker.SIGHT)
    if sight is not None and sight.state == circuit_breaker.BLIND:
        return f"nobody can tell which amphorae live ({sight.reason or 'no reason is known'})"
    for name in (circuit_breaker.OPERATOR, circuit_breaker.AUTOMATIC):
        row = rows.get(name)
        if row is not None and row.state != circuit_breaker.CLOSED:
            return f"the breaker of fail-overs is {row.state} ({row.reason or 'no reason is known'})"
    return None


def _sentence(move: AnyMove) -> str:
    if isinstance(move, Begin):
        return f"amphorae {', '.join(move.amphorae)} of load balancer {move.item.load_balancer_id} are replaced"
    if isinstance(move, Finish):
        return f"load balancer {move.item.load_balancer_id} is {move.state.value}: {move.reason or 'as well as before'}"
    if isinstance(move, Pause):
        return f"it is paused: {move.reason}"
    if isinstance(move, End):
        return f"it has ended: {move.state.value}"
    return move.reason or "it goes on"
