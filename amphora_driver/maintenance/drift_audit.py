# SPDX-License-Identifier: Apache-2.0
"""Comparing what amphorae say they confirmed with what they would be given now.

Invariant: one controller at a time does it, and it changes rows only: a confirmation is taken back if it still is the
one that was looked at, and the plan does the rest. An amphora that has another generation than it confirmed is due at
once. One that has the right generation with another content was rendered by another version of us, or with other
options: of these load balancers one after the other is due, with pauses, so that an upgrade of the controllers pushes
nothing but one load balancer at a time; and none twice for the same reason.

Whatever is wrong with one load balancer, or one amphora says, costs the others nothing: it is put off, and they go on.
A round ends after its time, whoever does not answer, and at once when this controller stops or drains.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import status
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.model.enums import Provisioning
from amphora_driver.model.secret_refs import secrets_of_tree
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.reconcile import vip_allocation
from amphora_driver.reconcile.desired_bundle import Recorded, bodies
from amphora_driver.reconcile.omitted_objects import left_out_of
from amphora_driver.reconcile.reconciler import networks
from amphora_driver.store import amphorae, config_drift, desired_objects, sealed_secrets

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from amphora_driver.agent.client import BundleState
    from amphora_driver.database.engine import Database
    from amphora_driver.reconcile.executor import Backends
    from amphora_driver.store.amphorae import Amphora
    from amphora_driver.store.config_drift import AuditCandidate

LOG = logging.getLogger(__name__)
DUTY = "audit"
# Seconds between two rounds: at the most, and at the least.
_LONGEST_ROUND, _SHORTEST_ROUND = 5.0, 0.2
_ROUNDS = 10
# So many times quicker than needed, for those that could not be asked.
_SPARE = 1.5
# Seconds an agent may take to say what it confirmed; and until one that did not answer is asked again.
_PATIENCE = 5.0
_AGAIN = 60.0
_MOST_REMEMBERED = 10_000
# Seconds for which a round begins with further amphorae, and between two looks whether it is to end; and how long the
# duty is ours without being renewed, and when it is.
_LONGEST, _SLICE = 20.0, 0.2
_HELD, _RENEWED = 60.0, 10.0
# Amphorae of a round that wait for a thread, for each thread.
_QUEUED = 2
# What no amphora comes to have: generations beyond ours. Who says so is not believed, and nothing counts from there.
_FAR = 2**31


class Verdict(str, Enum):
    """What follows from what an agent says."""

    SAME = "same"
    BEHIND = "behind"
    AHEAD = "ahead"
    FAR = "far"
    RENDERER = "renderer"


def judge(generation: int, digest: str, said: BundleState) -> Verdict:
    """Compare.

    Args:
        generation: the load balancer's newest one, which the amphora has confirmed.
        digest: of the document it would be given now.
        said: what its agent says of what it confirmed last.
    """
    if (said.generation or 0) < generation:
        return Verdict.BEHIND
    if said.generation is not None and said.generation > generation:
        return Verdict.FAR if said.generation - generation > _FAR else Verdict.AHEAD
    return Verdict.SAME if said.digest == digest else Verdict.RENDERER


def record_of(connection: sa.Connection, load_balancer_id: str, catalogue: Any) -> Recorded | None:
    """Everything that decides what the amphorae of a load balancer are given; None if it is not wanted, or not ready.

    Args:
        connection: of one reading transaction.
        load_balancer_id: which one.
        catalogue: knows topologies and network backends by name.
    """
    row, everyone = amphorae.load_with_work(connection, load_balancer_id)
    if row is None or row.op != "apply" or row.read_back:
        return None
    tree = desired_objects.load_tree(connection, load_balancer_id)
    if not vip_allocation.known(tree):
        return None
    needed, failed = networks(tree, everyone, catalogue.network(row.network))
    uses_some = next(secrets_of_tree(tree), None) is not None
    return Recorded(
        tree=tree,
        generation=row.generation,
        amphorae=everyone,
        networks=frozenset(needed),
        failed={
            **_in_error(connection, load_balancer_id),
            **failed,
            **vip_allocation.refusals(connection, load_balancer_id, vip_allocation.given_of(row)),
            **left_out_of(row),
        },
        secrets=sealed_secrets.load_secrets(connection, load_balancer_id) if uses_some else {},
        tickets=row.tickets,
        priorities=dict(catalogue.topology(row.topology).priorities),
    )


def _in_error(connection: sa.Connection, load_balancer_id: str) -> dict[str, str]:
    """What the generation that is served was served without: HAProxy may have found it, and nobody else can tell."""
    rows = connection.execute(
        sa.select(status.c.object_id, status.c.reason).where(
            status.c.load_balancer_id == load_balancer_id,
            status.c.provisioning == Provisioning.ERROR.value,
            status.c.pending.is_(None),
            status.c.object_id != load_balancer_id,
        )
    )
    return {row.object_id: row.reason or "" for row in rows}


class _Target(msgspec.Struct, frozen=True):
    """An amphora that is compared: with what is recorded, and the digest of what it would be given now."""

    recorded: Recorded
    amphora: Amphora
    digest: str


class _End(Enum):
    END = "end"


_END = _End.END


class Auditing:
    """Looks at some amphorae now and then, so that each has its turn once in an interval.

    Args:
        backends: agents, vault and so on.
        owner: name of this process.
        due: called when a load balancer has become due.
    """

    def __init__(self, backends: Backends, owner: str, due: Callable[[], None]) -> None:
        self._backends = backends
        self._database: Database = backends.database
        self._owner = owner
        self._due = due
        audit = backends.conf.audit
        self._interval: float = audit.interval
        self._most: int = audit.most_at_once
        self._pause: float = audit.renderer_pause
        self._round = min(max(self._interval / _ROUNDS, _SHORTEST_ROUND), _LONGEST_ROUND)
        # Amphorae that did not answer: when they are asked again, on `time.monotonic()`'s clock.
        self._later: dict[str, float] = {}
        # Load balancers that are rendered in another way now, in the order in which they were found.
        self._waiting: dict[str, None] = {}
        self._pushed_at = time.monotonic()
        # What they would have been given when they were pushed because of that.
        self._pushed: dict[str, str] = {}
        # When the duty was renewed last.
        self._held_at = 0.0

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Look until told to stop; while `draining` is set another controller does."""
        pool = ThreadPoolExecutor(self._most, "audit")
        try:
            while not stopping.wait(self._round):
                try:
                    if draining.is_set():
                        release_duty(self._database, DUTY, self._owner)
                    elif self._holds(at_once=True):
                        self.audit(pool, self._while(stopping, draining))
                except AmphoraDriverError as error:
                    LOG.warning("audit: %s", error)
                except Exception:
                    # Without this thread nothing would be compared any more, and nobody would notice.
                    LOG.exception("audit failed, and goes on")
        finally:
            pool.shutdown(cancel_futures=True)
        try:
            release_duty(self._database, DUTY, self._owner)
        except AmphoraDriverError as error:
            LOG.info("the duty of auditing runs out: %s", error)

    def _while(self, stopping: threading.Event, draining: threading.Event) -> Callable[[], bool]:
        """Says whether a round that begins now goes on."""
        ends = time.monotonic() + _LONGEST

        def goes_on() -> bool:
            ended = stopping.is_set() or draining.is_set() or time.monotonic() >= ends
            return not ended and self._holds()

        return goes_on

    def _holds(self, *, at_once: bool = False) -> bool:
        """Whether the duty is ours; it is renewed now and then."""
        begun = time.monotonic()
        if at_once or begun >= self._held_at + _RENEWED:
            if not acquire_duty(self._database, DUTY, self._owner, _HELD):
                return False
            self._held_at = begun
        return True

    def audit(self, pool: ThreadPoolExecutor, goes_on: Callable[[], bool] = lambda: True) -> int:
        """One round; returns how many amphorae were compared.

        Args:
            pool: asks agents.
            goes_on: asked between two amphorae.
        """
        now, moment = self._database.now(), time.monotonic()
        self._later = {one: at for one, at in self._later.items() if at > moment}

        def read(connection: sa.Connection) -> list[AuditCandidate]:
            many = math.ceil(config_drift.count_auditable(connection) * _SPARE * self._round / self._interval)
            limit = max(many, self._most) + len(self._later)
            return config_drift.list_audit_candidates(connection, now - self._interval, limit)

        due = [one for one in self._database.read(read) if one.amphora_id not in self._later]
        by_balancer: dict[str, list[AuditCandidate]] = {}
        for one in due:
            by_balancer.setdefault(one.load_balancer_id, []).append(one)
        done = self._compare(pool, self._targets(by_balancer.values()), goes_on)
        if goes_on():
            self._rerender(pool)
        return done

    def _compare(self, pool: ThreadPoolExecutor, targets: Iterator[_Target | None], goes_on: Callable[[], bool]) -> int:
        """Have amphorae asked side by side, whosoever they are, and write down what they say."""
        asked: dict[Future[BundleState | AmphoraDriverError], _Target] = {}
        done, more = 0, True
        try:
            while goes_on() and (asked or more):
                if more and len(asked) < _QUEUED * self._most:
                    target = next(targets, _END)
                    more = target is not _END
                    if isinstance(target, _Target):
                        asked[pool.submit(self._ask, target.amphora)] = target
                    if more:
                        continue
                for answer in wait(asked, _SLICE, FIRST_COMPLETED).done:
                    done += self._heard(asked.pop(answer), answer)
        finally:
            for answer, target in asked.items():
                # Who is being asked has not answered in a while, perhaps; the others come first in the next round.
                if answer.done():
                    done += self._heard(target, answer)
                elif not answer.cancel():
                    self._put_off([target.amphora.id])
        return done

    def _targets(self, due: Iterable[list[AuditCandidate]]) -> Iterator[_Target | None]:
        """What to ask, of one load balancer after the other; None where there is nothing, so that others may go on."""
        for found in due:
            try:
                yield from self._of_one(found)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one, the others are compared
                _complain(f"load balancer {found[0].load_balancer_id}", error)
                self._put_off(one.amphora_id for one in found)
            yield None

    def _of_one(self, due: list[AuditCandidate]) -> Iterator[_Target]:
        load_balancer_id, ids = due[0].load_balancer_id, {one.amphora_id for one in due}
        recorded = self._database.read(
            lambda connection: record_of(connection, load_balancer_id, self._backends.catalogue)
        )
        if recorded is None or recorded.generation != due[0].generation:
            # It is changed just now, or its addresses are not known yet.
            self._put_off(ids)
            return
        expected = self._expected(recorded)
        for one in recorded.amphorae:
            if one.id in ids:
                yield _Target(recorded=recorded, amphora=one, digest=expected[one.id])

    def _expected(self, recorded: Recorded) -> dict[str, str]:
        made = bodies(recorded, self._backends.conf, self._backends.vault)
        return {one: _digest(body) for one, body in made.items()}

    def _heard(self, target: _Target, answer: Future[BundleState | AmphoraDriverError]) -> int:
        """Write down what an amphora said; returns how many were compared."""
        try:
            said = answer.result()
            if isinstance(said, AmphoraDriverError):
                return self._unheard(target, said)
            verdict = judge(target.recorded.generation, target.digest, said)
            self._note(target.recorded, target.amphora, verdict, said)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - as above
            return self._unheard(target, error)
        return 1

    def _unheard(self, target: _Target, error: BaseException) -> int:
        _complain(f"amphora {target.amphora.id}", error)
        self._put_off([target.amphora.id])
        return 0

    def _put_off(self, amphora_ids: Iterable[str]) -> None:
        at = time.monotonic() + min(_AGAIN, self._interval)
        self._later |= dict.fromkeys(amphora_ids, at)

    def _ask(self, amphora: Amphora) -> BundleState | AmphoraDriverError:
        try:
            deadline = Deadline(_PATIENCE, f"compare amphora {amphora.id}")
            found: BundleState = self._backends.agents.bundle_state(
                amphora.id, str(amphora.management_address), deadline=deadline
            )
        except AmphoraDriverError as error:
            return error
        return found

    def _note(self, recorded: Recorded, amphora: Amphora, verdict: Verdict, said: BundleState) -> None:
        """Write down what was found, and what follows from it."""
        of, generation = recorded.tree.id, recorded.generation
        now = self._database.now()
        if verdict is Verdict.SAME:
            self._waiting.pop(of, None)
            self._database.write(lambda connection: config_drift.record_audit(connection, [amphora.id], now))
            return
        if verdict is Verdict.RENDERER:
            why = "renderer: it was given what another version, or other options, made of the same generation"
            in_vain = self._pushed.get(of) == _fingerprint(recorded)
            if in_vain:
                why = f"{why}; pushed once, and not again"
            else:
                self._waiting.setdefault(of)
            self._database.write(lambda connection: config_drift.record_audit(connection, [amphora.id], now, why))
            return
        why = f"generation: it confirmed {generation} and says that it has {said.generation}"
        if verdict is Verdict.FAR:
            why = (
                f"{why}, which nobody has given it; it takes nothing any more, and is to be replaced (amphora failover)"
            )
            self._database.write(lambda connection: config_drift.record_audit(connection, [amphora.id], now, why))
            LOG.warning("load balancer %s, amphora %s: %s", of, amphora.id, why)
            return

        def write(connection: sa.Connection) -> bool:
            config_drift.lock_work_of_amphorae(connection, [amphora.id])
            config_drift.record_audit(connection, [amphora.id], now, why)
            if verdict is Verdict.AHEAD:
                return config_drift.advance_generation_beyond(connection, of, generation, said.generation or 0)
            return config_drift.revoke_confirmation(connection, amphora.id, generation, why)

        if self._database.write(write):
            LOG.warning("load balancer %s, amphora %s: %s; it is given its configuration again", of, amphora.id, why)
            self._due()

    def _rerender(self, pool: ThreadPoolExecutor) -> None:
        """Have the next load balancer pushed that is rendered in another way now, if it is time for one."""
        if not self._waiting or time.monotonic() < self._pushed_at + self._pause:
            return
        of = next(iter(self._waiting))
        del self._waiting[of]
        try:
            self._rerender_one(pool, of)
        except Exception as error:  # noqa: BLE001 - as above: it is found again
            _complain(f"load balancer {of}", error)

    def _rerender_one(self, pool: ThreadPoolExecutor, of: str) -> None:
        recorded = self._database.read(lambda connection: record_of(connection, of, self._backends.catalogue))
        if recorded is None:
            return
        # A change that came meanwhile has brought what differed: ask again before anything is pushed.
        expected = self._expected(recorded)
        ready = [one for one in recorded.amphorae if one.confirmed == recorded.generation]
        different = [
            one
            for one, said in zip(ready, pool.map(self._ask, ready), strict=True)
            if not isinstance(said, AmphoraDriverError)
            and judge(recorded.generation, expected[one.id], said) is Verdict.RENDERER
        ]
        if not different:
            return
        self._pushed_at = time.monotonic()
        if len(self._pushed) >= _MOST_REMEMBERED:
            self._pushed.clear()
        self._pushed[of] = _fingerprint(recorded)
        # One taken back is enough: what it is given takes the next generation, for all of them.
        first = different[0]
        why = "renderer: it is given what this version makes of its load balancer"
        if self._database.write(
            lambda connection: config_drift.revoke_confirmation(connection, first.id, recorded.generation, why)
        ):
            LOG.info("load balancer %s is rendered in another way now, and is pushed", of)
            self._due()


def _complain(what: str, error: BaseException) -> None:
    if isinstance(error, AmphoraDriverError):
        LOG.info("%s is not compared: %s", what, error)
    else:
        LOG.error("%s is not compared", what, exc_info=error)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _fingerprint(recorded: Recorded) -> str:
    """What is wanted, whatever its generation: changed by users, not by pushes."""
    parts = (
        recorded.tree,
        recorded.tickets,
        tuple(sorted(recorded.failed)),
        tuple(sorted(one.id for one in recorded.amphorae)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
