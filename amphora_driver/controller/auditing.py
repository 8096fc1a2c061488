# SPDX-License-Identifier: Apache-2.0
"""Comparing what amphorae say they confirmed with what they would be given now.

Invariant: one controller at a time does it, and it changes rows only: a confirmation is taken back if it still is the
one that was looked at, and the plan does the rest. An amphora that has another generation than it confirmed is due at
once. One that has the right generation with another content was rendered by another version of us, or with other
options: of these load balancers one after the other is due, with pauses, so that an upgrade of the controllers pushes
nothing but one load balancer at a time; and none twice for the same reason.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver.controller import vips
from amphora_driver.controller.expected import Recorded, bodies
from amphora_driver.controller.left_out import left_out_of
from amphora_driver.controller.reconcile import networks
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentError, AmphoraDriverError
from amphora_driver.model.secrets import used_in
from amphora_driver.model.vocabulary import Provisioning
from amphora_driver.queue.jobs import drop_duty, hold_duty
from amphora_driver.store import amphorae, drifts, secrets, wanted
from amphora_driver.store.tables import status

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from amphora_driver.agent_client import BundleState
    from amphora_driver.controller.steps import Backends
    from amphora_driver.store.amphorae import Amphora
    from amphora_driver.store.drifts import Candidate
    from amphora_driver.store.engine import Database

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


class Verdict(str, Enum):
    """What follows from what an agent says."""

    SAME = "same"
    BEHIND = "behind"
    AHEAD = "ahead"
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
    if said.generation != generation:
        return Verdict.AHEAD
    return Verdict.SAME if said.digest == digest else Verdict.RENDERER


def record_of(connection: sa.Connection, load_balancer_id: str, catalogue: Any) -> Recorded | None:
    """Everything that decides what the amphorae of a load balancer are given; None if it is not wanted, or not ready.

    Args:
        connection: of one reading transaction.
        load_balancer_id: which one.
        catalogue: knows topologies and network backends by name.
    """
    row, everyone = amphorae.with_work(connection, load_balancer_id)
    if row is None or row.op != "apply" or row.read_back:
        return None
    tree = wanted.load_tree(connection, load_balancer_id)
    if not vips.known(tree):
        return None
    needed, failed = networks(tree, everyone, catalogue.network(row.network))
    uses_some = next(used_in(tree), None) is not None
    return Recorded(
        tree=tree,
        generation=row.generation,
        amphorae=everyone,
        networks=frozenset(needed),
        failed={
            **_in_error(connection, load_balancer_id),
            **failed,
            **vips.refusals(connection, load_balancer_id, vips.given_of(row)),
            **left_out_of(row),
        },
        secrets=secrets.of_load_balancer(connection, load_balancer_id) if uses_some else {},
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

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Look until told to stop; while `draining` is set another controller does."""
        with ThreadPoolExecutor(self._most, "audit") as pool:
            while not stopping.wait(self._round):
                try:
                    if draining.is_set():
                        drop_duty(self._database, DUTY, self._owner)
                    elif hold_duty(self._database, DUTY, self._owner, max(10 * self._round, 30.0)):
                        self.audit(pool)
                except AmphoraDriverError as error:
                    LOG.warning("audit: %s", error)
                except Exception:
                    # Without this thread nothing would be compared any more, and nobody would notice.
                    LOG.exception("audit failed, and goes on")
        try:
            drop_duty(self._database, DUTY, self._owner)
        except AmphoraDriverError as error:
            LOG.info("the duty of auditing runs out: %s", error)

    def audit(self, pool: ThreadPoolExecutor) -> int:
        """One round; returns how many amphorae were compared."""
        now, moment = self._database.now(), time.monotonic()
        self._later = {one: at for one, at in self._later.items() if at > moment}

        def read(connection: sa.Connection) -> list[Candidate]:
            many = math.ceil(drifts.count(connection) * _SPARE * self._round / self._interval)
            limit = max(many, self._most) + len(self._later)
            return drifts.candidates(connection, now - self._interval, limit)

        due = [one for one in self._database.read(read) if one.amphora_id not in self._later]
        by_balancer: dict[str, list[Candidate]] = {}
        for one in due:
            by_balancer.setdefault(one.load_balancer_id, []).append(one)
        done = sum(self._compare(pool, of, found) for of, found in by_balancer.items())
        self._rerender(pool)
        return done

    def _compare(self, pool: ThreadPoolExecutor, load_balancer_id: str, due: Sequence[Candidate]) -> int:
        """Compare some amphorae of one load balancer."""
        recorded = self._database.read(
            lambda connection: record_of(connection, load_balancer_id, self._backends.catalogue)
        )
        if recorded is None or recorded.generation != due[0].generation:
            return 0
        wanted_by = {one.amphora_id for one in due}
        targets = [one for one in recorded.amphorae if one.id in wanted_by]
        try:
            expected = {
                one: _digest(body) for one, body in bodies(recorded, self._backends.conf, self._backends.vault).items()
            }
        except AmphoraDriverError as error:
            LOG.info("load balancer %s is not compared: %s", load_balancer_id, error)
            self._put_off(targets)
            return 0
        done = 0
        for one, said in zip(targets, pool.map(self._ask, targets), strict=True):
            if isinstance(said, AgentError):
                LOG.info("amphora %s is not compared: %s", one.id, said)
                self._put_off([one])
                continue
            done += 1
            self._note(recorded, one, judge(recorded.generation, expected[one.id], said), said)
        return done

    def _put_off(self, targets: Sequence[Amphora]) -> None:
        at = time.monotonic() + min(_AGAIN, self._interval)
        self._later |= dict.fromkeys((one.id for one in targets), at)

    def _ask(self, amphora: Amphora) -> BundleState | AgentError:
        try:
            deadline = Deadline(_PATIENCE, f"compare amphora {amphora.id}")
            found: BundleState = self._backends.agents.bundle_state(
                amphora.id, str(amphora.management_address), deadline=deadline
            )
        except AgentError as error:
            return error
        return found

    def _note(self, recorded: Recorded, amphora: Amphora, verdict: Verdict, said: BundleState) -> None:
        """Write down what was found, and what follows from it."""
        of, generation = recorded.tree.id, recorded.generation
        now = self._database.now()
        if verdict is Verdict.SAME:
            self._waiting.pop(of, None)
            self._database.write(lambda connection: drifts.audited(connection, [amphora.id], now))
            return
        if verdict is Verdict.RENDERER:
            why = "renderer: it was given what another version, or other options, made of the same generation"
            in_vain = self._pushed.get(of) == _fingerprint(recorded)
            if in_vain:
                why = f"{why}; pushed once, and not again"
            else:
                self._waiting.setdefault(of)
            self._database.write(lambda connection: drifts.audited(connection, [amphora.id], now, why))
            return
        why = f"generation: it confirmed {generation} and says that it has {said.generation}"

        def write(connection: sa.Connection) -> bool:
            drifts.audited(connection, [amphora.id], now, why)
            if verdict is Verdict.AHEAD:
                return drifts.overtake(connection, of, generation, said.generation or 0)
            return drifts.take_back(connection, amphora.id, generation, why)

        if self._database.write(write):
            LOG.warning("load balancer %s, amphora %s: %s; it is given its configuration again", of, amphora.id, why)
            self._due()

    def _rerender(self, pool: ThreadPoolExecutor) -> None:
        """Have the next load balancer pushed that is rendered in another way now, if it is time for one."""
        if not self._waiting or time.monotonic() < self._pushed_at + self._pause:
            return
        of = next(iter(self._waiting))
        del self._waiting[of]
        recorded = self._database.read(lambda connection: record_of(connection, of, self._backends.catalogue))
        if recorded is None:
            return
        # A change that came meanwhile has brought what differed: ask again before anything is pushed.
        expected = {
            one: _digest(body) for one, body in bodies(recorded, self._backends.conf, self._backends.vault).items()
        }
        ready = [one for one in recorded.amphorae if one.confirmed == recorded.generation]
        different = [
            one
            for one, said in zip(ready, pool.map(self._ask, ready), strict=True)
            if not isinstance(said, AgentError)
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
        if self._database.write(lambda connection: drifts.take_back(connection, first.id, recorded.generation, why)):
            LOG.info("load balancer %s is rendered in another way now, and is pushed", of)
            self._due()


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
