# SPDX-License-Identifier: Apache-2.0
"""Making one load balancer as recorded.

Invariant: `reconcile` asks the plan again after every round of steps, from what the store says then, until there is
nothing left to do. It ends by giving the lease back: finished, waiting for somebody, giving way to what goes first, or
to be tried again after a pause that grows. Whatever takes time by itself is waited for without a lease.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver import failpoints, log_context, metrics
from amphora_driver.database.tables import work
from amphora_driver.errors import (
    AgentError,
    AmphoraDriverError,
    ComputeError,
    CrashLoop,
    LeaseLost,
    NetworkError,
    Superseded,
    UnsupportedOption,
)
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.model.secret_refs import secrets_of_tree
from amphora_driver.queue.jobs import Jobs, Lease, guard_lease, has_open_request, record_outcome
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vip_allocation
from amphora_driver.reconcile.boot_wait import Awaited, WaitingRoom
from amphora_driver.reconcile.defaults import advert_interval
from amphora_driver.reconcile.executor import Backends, Steps
from amphora_driver.reconcile.job import Turn
from amphora_driver.reconcile.omitted_objects import left_out_of
from amphora_driver.reconcile.tree_cache import Trees
from amphora_driver.store import amphorae, failovers, sealed_secrets, status_outbox
from amphora_driver.store.requests import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amphora_driver.database.engine import Database
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.network.interface import Network

LOG = logging.getLogger(__name__)
# Seconds between two looks at what goes on by itself, at the least: others have their turn first. Where a user waits
# for it the plan may ask for less.
_REST = 1.0
# The same at the most, where attempts come sooner.
_MOST_REST = 25.0
# Seconds for each amphora that boots at the same time: looking at their machines is not to keep them from booting.
_CROWD = 0.05
# Two that begin listen for three advertisements and a fraction before one of them takes the VIPs (RFC 9568, 6.1).
# Nobody waits longer than for four of them, and these seconds on top for machines that are busy.
_ADVERTS, _MOST_ADVERTS, _VIP_PATIENCE = 3, 4, 3.0
# After so many an amphora is not waited for before its partner is served.
_MISSED_HEARTBEATS = 3
# Steps that have to do with one amphora's machine and ports, and with nobody else.
_EACH_ON_ITS_OWN = (planning.Boot, planning.Plug, planning.AwaitAgent, planning.Release)


class Reconciler:
    """Works off leases.

    Args:
        backends: compute, network, agents and so on.
        jobs: where leases are given back to.
        reported: called when there is something for Octavia.
        room: where amphorae that boot are waited for; without it they are looked at now and then.
    """

    def __init__(
        self,
        backends: Backends,
        jobs: Jobs,
        reported: Callable[[], None],
        room: WaitingRoom | None = None,
    ) -> None:
        self._backends = backends
        self._database: Database = backends.database
        self._jobs = jobs
        self._reported = reported
        self._room = room
        self._trees = Trees()

    def begin(self, lease: Lease) -> Turn:
        """A turn at the lease's load balancer, with the time an operation has."""
        return Turn(lease, self._database, self._backends.conf.controller.operation_timeout)

    def reconcile(self, lease: Lease, turn: Turn | None = None) -> None:
        """Make the lease's load balancer as recorded; never raises."""
        turn = turn or self.begin(lease)
        with log_context.about(load_balancer=lease.load_balancer_id), metrics.job() as job:
            job.outcome = self._attempt(lease, turn)

    def _attempt(self, lease: Lease, turn: Turn) -> str:
        """The same; returns how it ended, in the words of the metrics."""
        try:
            failpoints.reach(failpoints.Point.CLAIMED)
            self._dare(lease)
            found = self._converge(turn)
            failpoints.reach(failpoints.Point.FINISHING)
            self._give_back(turn, *found)
            failpoints.reach(failpoints.Point.FINISHED)
        except LeaseLost as error:
            if not turn.over:
                LOG.warning("load balancer %s: %s", lease.load_balancer_id, error)
            return "lost"
        except AmphoraDriverError as error:
            self._failed(turn, error)
        except Exception as error:
            LOG.exception("load balancer %s: unexpected failure", lease.load_balancer_id)
            self._failed(turn, error)
        else:
            return "finished" if found[2] is None else "waiting"
        return "gave_way" if turn.gives_way else "failed"

    def _dare(self, lease: Lease) -> None:
        """Work on nothing of which others have died, but now and then.

        Raises:
            CrashLoop: it is not to be worked on for now, and its user is told.
        """
        if lease.deaths >= self._backends.conf.controller.give_up_after:
            raise CrashLoop(
                f"work on load balancer {lease.load_balancer_id}",
                f"{lease.deaths} controllers in a row ended, or stood still, before anything had come of it",
                "Their logs say what they did last. It is tried again, now and then.",
            )

    def _converge(self, turn: Turn) -> tuple[planning.Wanted, tuple[Amphora, ...], planning.Await | None]:
        """Take steps until none is left; returns what was seen last, and what it waits for."""
        steps = Steps(self._backends, turn)
        while True:
            seen, observed = self._look(turn, steps)
            if seen is None:
                raise LeaseLost(f"work on load balancer {turn.lease.load_balancer_id}", "it is not recorded any more")
            todo = planning.plan(seen, observed)
            awaited = _round(steps, todo, seen, observed)
            if awaited is not None or not todo:
                return seen, observed, awaited
            self._reported()

    def _give_back(
        self, turn: Turn, seen: planning.Wanted, observed: tuple[Amphora, ...], step: planning.Await | None
    ) -> None:
        if step is None and seen.replacing:
            now = self._database.now()
            self._database.write(lambda connection: _note_end(connection, turn, now))
        until = None if step is None else step.until
        if step is None or until is None:
            self._jobs.complete(turn.lease, seen.generation)
            return
        # The steps before it may have taken longer than that.
        pause = max(until - self._database.now(), min(_REST, until - seen.now))
        if step.amphorae and self._room is not None:
            pause = max(pause, _CROWD * len(self._room))
        # Looking once more costs little; nothing waits longer than for the next attempt (`Jobs.clamp_due_times`).
        pause = min(pause, max(self._backends.conf.controller.retry_most, _MOST_REST))
        if seen.applied >= seen.generation:
            self._jobs.complete(turn.lease, seen.generation, self._database.now() + pause)
        else:
            self._jobs.defer(turn.lease, seen.generation, pause, readable=seen.readable)
        # Only now: before, whoever listens already would be told of in vain.
        awaited = [
            Awaited(one.id, one.management_address, turn.lease.load_balancer_id, pause)
            for one in observed
            if one.id in step.amphorae and one.management_address is not None
        ]
        if awaited and self._room is not None:
            self._room.wait_for(awaited)

    def _look(self, turn: Turn, steps: Steps) -> tuple[planning.Wanted | None, tuple[Amphora, ...]]:
        """What is wanted and what there is, of one moment."""
        now = self._database.now()
        seen, observed = self._database.read(lambda connection: self._observe(connection, turn, steps, now))
        return (None if seen is None else steps.sparing.judged(seen)), steps.leaving.as_told(observed)

    def _observe(
        self, connection: sa.Connection, turn: Turn, steps: Steps, now: float
    ) -> tuple[planning.Wanted | None, tuple[Amphora, ...]]:
        lease, load_balancer_id = turn.lease, turn.lease.load_balancer_id
        row, observed = amphorae.load_with_work(connection, load_balancer_id)
        if row is None:
            return None, ()
        # At once: what comes between this look and the next one is newer than what was seen.
        turn.saw(row.generation, row.op)
        log_context.set_generation(row.generation)
        turn.replacing = bool(row.replacing)
        turn.staying = frozenset(one.id for one in observed if one.state is not AmphoraState.RETIRING)
        if row.op == Op.SPARES:
            return self._pool(connection, row, observed, turn, steps, now), observed
        gone = row.op == Op.DELETE
        tree = None if gone else self._trees.load(connection, row, lease.epoch)
        catalogue = self._backends.catalogue
        given, addressed = vip_allocation.given_of(row), vip_allocation.known(tree)
        needed, failed = (
            ({}, {}) if tree is None or not addressed else networks(tree, observed, catalogue.network(row.network))
        )
        failed |= vip_allocation.refusals(connection, load_balancer_id, given)
        # Only in a snapshot of one moment do references and contents belong together.
        uses_some = tree is not None and next(secrets_of_tree(tree), None) is not None
        kept = sealed_secrets.load_secrets(connection, load_balancer_id) if uses_some else {}
        if kept and _generation(connection, load_balancer_id) != row.generation:
            return self._observe(connection, turn, steps, now)
        topology = catalogue.topology(row.topology)
        spec = steps.sparing.spec(row, tree)
        takes = turn.replacing and spec is not None and spec.id == row.spare_pool
        advert = 0.0 if tree is None else advert_interval(tree, self._backends.conf)
        return planning.Wanted(
            load_balancer_id=load_balancer_id,
            generation=row.generation,
            applied=row.applied,
            gone=gone,
            readable=not row.read_back,
            tree=tree,
            networks=needed,
            failed=failed,
            left_out=left_out_of(row),
            secrets=kept,
            roles=topology.roles,
            priorities=dict(topology.priorities),
            attempts=lease.attempts,
            patience=_MISSED_HEARTBEATS * self._backends.conf.health.interval,
            tickets=row.tickets,
            now=now,
            clock_set=self._database.seconds_since_clock_jump() < self._backends.conf.controller.drain_timeout,
            taking_vips=(_ADVERTS * advert, _MOST_ADVERTS * advert + _VIP_PATIENCE),
            absent=steps.absent,
            vips_taken=steps.vips_taken,
            holder_asked=steps.leaving.asked,
            compute=row.compute,
            network=row.network,
            vip_given=given,
            allocate_at=0.0 if addressed else vip_allocation.again_at(connection, load_balancer_id, now),
            replacing=turn.replacing,
            pool=row.spare_pool,
            spec=spec,
            spares=steps.sparing.to_take(connection, row.spare_pool) if takes else (),
            renewals=steps.renewal.due(observed, now),
        ), observed

    def _pool(
        self,
        connection: sa.Connection,
        row: Any,
        observed: tuple[Amphora, ...],
        turn: Turn,
        steps: Steps,
        now: float,
    ) -> planning.Wanted:
        """What is wanted of a pool of warm spares."""
        return planning.Wanted(
            load_balancer_id=turn.lease.load_balancer_id,
            generation=row.generation,
            applied=row.applied,
            gone=False,
            readable=True,
            tree=None,
            networks={},
            roles=(),
            attempts=turn.lease.attempts,
            patience=_MISSED_HEARTBEATS * self._backends.conf.health.interval,
            now=now,
            absent=steps.absent | steps.sparing.absent,
            asked=steps.sparing.asked,
            compute=row.compute,
            network=row.network,
            renewals=steps.renewal.due(observed, now),
            stock=steps.sparing.stock(connection, row),
        )

    def _failed(self, turn: Turn, error: Exception) -> None:
        """Try again later; tell the user at once what will not mend itself, and in the end everything else too."""
        lease, conf = turn.lease, self._backends.conf.controller
        try:
            now = self._database.now()
            if isinstance(error, Superseded) or turn.gives_way:
                # What else went wrong is because of that.
                LOG.info("load balancer %s: %s", lease.load_balancer_id, turn.superseded())
                self._jobs.yield_lease(lease)
                return
            final = isinstance(error, AmphoraDriverError) and error.final
            pause = conf.retry_most if final else min(conf.retry_first * 2**lease.attempts, conf.retry_most)
            pause *= random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
            LOG.warning("load balancer %s: %s; again in %.1f s", lease.load_balancer_id, error, pause)
            if turn.replacing:
                self._database.write(lambda connection: _note_failure(connection, turn, str(error), now))
            tried = lease.attempts + 1
            if final or tried >= conf.give_up_after:
                first = final or tried == conf.give_up_after
                if self._database.write(lambda connection: _give_up(connection, turn, str(error), always=first)):
                    self._reported()
            # Whoever lives to say so has not died of it; but of what others have died, one more is enough to tell.
            deaths = lease.deaths - 1 if isinstance(error, CrashLoop) else 0
            self._jobs.retry_later(lease, pause, str(error), turn.generation or None, deaths=deaths)
        except (AmphoraDriverError, OSError) as trouble:
            # The lease runs out by itself, and somebody takes the load balancer up again.
            LOG.warning("load balancer %s: could not give the lease back: %s", lease.load_balancer_id, trouble)


def _round(
    steps: Steps, todo: Sequence[planning.AnyStep], seen: planning.Wanted, observed: tuple[Amphora, ...]
) -> planning.Await | None:
    """Take these steps; returns what is to be waited for before it is looked again.

    What goes wrong with one machine keeps no other one from coming or going: what has to do with it alone is still
    done for the others, and only then the round ends with the first error, or with one that is final.

    Raises:
        AmphoraDriverError: a step failed.
    """
    troubles: dict[str, AmphoraDriverError] = {}
    for step in todo:
        alone = step.amphora_id if isinstance(step, _EACH_ON_ITS_OWN) else None
        if troubles and (alone is None or alone in troubles):
            continue
        if isinstance(step, planning.Await):
            return step
        try:
            steps.take(step, seen, observed)
        except (AgentError, ComputeError, NetworkError) as error:
            if alone is None:
                raise
            LOG.warning("load balancer %s: amphora %s: %s", seen.load_balancer_id, alone, error)
            troubles[alone] = error
    if troubles:
        raise next((one for one in troubles.values() if one.final), next(iter(troubles.values())))
    return None


def networks(
    tree: LoadBalancer, observed: tuple[Amphora, ...], network: Network
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The networks an amphora of this load balancer needs, with their subnets: the VIP's first.

    Returns:
        The networks, and reasons by id for the members whose subnet does not exist (any more).
    """
    known: dict[str, str] = {vip.subnet_id: vip.network_id for vip in tree.vips}
    known |= {subnet.id: subnet.network_id for one in observed for port in one.plugged for subnet in port.subnets}
    found: dict[str, dict[str, None]] = {tree.vip.network_id: {vip.subnet_id: None for vip in tree.vips}}
    failed: dict[str, str] = {}
    by_subnet: dict[str, list[str]] = {}
    for pool in tree.pools:
        for member in pool.members:
            if member.subnet_id:
                by_subnet.setdefault(member.subnet_id, []).append(member.id)
    for subnet_id, members in sorted(by_subnet.items()):
        if subnet_id not in known:
            try:
                known[subnet_id] = network.subnet(subnet_id).network_id
            except UnsupportedOption as error:
                failed |= dict.fromkeys(members, str(error))
                continue
        found.setdefault(known[subnet_id], {})[subnet_id] = None
    return {network_id: tuple(subnets) for network_id, subnets in found.items()}, failed


def _note_failure(connection: sa.Connection, turn: Turn, reason: str, now: float) -> None:
    """Write into the time lines of fail-overs that one of their steps failed."""
    guard_lease(connection, turn.lease)
    failovers.record_failure(connection, turn.lease.load_balancer_id, now, reason)


def _note_end(connection: sa.Connection, turn: Turn, now: float) -> None:
    """Nothing is left to do, so nothing is left to do of fail-overs either, whatever became of their events."""
    guard_lease(connection, turn.lease)
    failovers.finish_settled_failovers(connection, turn.lease.load_balancer_id, now)


def _give_up(connection: sa.Connection, turn: Turn, reason: str, *, always: bool) -> bool:
    """Say that what was looked at failed; what was asked for since then was not tried yet.

    Args:
        connection: of a writing transaction.
        turn: whose.
        reason: for the user.
        always: also if nobody waits to hear of it; a number of attempts may have been left out.

    Returns:
        Whether it was said.
    """
    of = turn.lease.load_balancer_id
    guard_lease(connection, turn.lease)
    generation = turn.generation or _generation(connection, of)
    if not always and not has_open_request(connection, of, generation):
        return False
    status_outbox.fail_generation(connection, of, generation, reason)
    record_outcome(connection, of, generation, f"failed: {reason}")
    return True


def _generation(connection: sa.Connection, load_balancer_id: str) -> int:
    found: Any = connection.execute(
        sa.select(work.c.generation).where(work.c.load_balancer_id == load_balancer_id)
    ).scalar_one()
    return int(found)
