# SPDX-License-Identifier: Apache-2.0
"""Making one load balancer as recorded.

Invariant: `reconcile` asks the plan again after every round of steps, from what the store says then, until there is
nothing left to do. It ends by giving the lease back: finished, waiting for somebody, or to be tried again after a
pause that grows.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver.controller import plan as planning
from amphora_driver.controller.steps import Backends, Steps
from amphora_driver.errors import (
    AgentRefused,
    AmphoraDriverError,
    ConfigurationError,
    LeaseLost,
    ModelError,
    RequestError,
    UnsupportedOption,
)
from amphora_driver.model.secrets import used_in
from amphora_driver.queue.jobs import Jobs, Lease, guard, note_outcome
from amphora_driver.store import amphorae, secrets, statuses, wanted
from amphora_driver.store.intents import Op
from amphora_driver.store.tables import work

if TYPE_CHECKING:
    from collections.abc import Callable

    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.network.interface import Network

LOG = logging.getLogger(__name__)
# Seconds between two looks at what goes on by itself, at the least.
_REST = 1.0
# After so many an amphora is not waited for before its partner is served.
_MISSED_HEARTBEATS = 3


class Reconciler:
    """Works off leases.

    Args:
        backends: compute, network, agents and so on.
        jobs: where leases are given back to.
        reported: called when there is something for Octavia.
    """

    def __init__(self, backends: Backends, jobs: Jobs, reported: Callable[[], None]) -> None:
        self._backends = backends
        self._database = backends.database
        self._jobs = jobs
        self._reported = reported

    def reconcile(self, lease: Lease) -> None:
        """Make the lease's load balancer as recorded; never raises."""
        try:
            self._jobs.finish(lease, *self._converge(lease))
        except LeaseLost as error:
            LOG.warning("load balancer %s: %s", lease.load_balancer_id, error)
        except AmphoraDriverError as error:
            self._failed(lease, error)
        except Exception as error:
            LOG.exception("load balancer %s: unexpected failure", lease.load_balancer_id)
            self._failed(lease, error)

    def _converge(self, lease: Lease) -> tuple[int, float | None]:
        """Take steps until none is left; returns the generation that was worked on last, and when to look again."""
        steps = Steps(self._backends, lease)
        while True:
            seen, observed = self._database.read(lambda connection: self._observe(connection, lease))
            if seen is None:
                raise LeaseLost(f"work on load balancer {lease.load_balancer_id}", "it is not recorded any more")
            todo = planning.plan(seen, observed)
            for step in todo:
                if isinstance(step, planning.Await):
                    # The steps before it may have taken longer than that: others have their turn first.
                    again_at = None if step.until is None else max(step.until, time.time() + _REST)
                    return int(seen.generation), again_at
                steps.take(step, seen, observed)
            if not todo:
                return int(seen.generation), None
            self._reported()

    def _observe(
        self, connection: sa.Connection, lease: Lease
    ) -> tuple[planning.Wanted | None, tuple[amphorae.Amphora, ...]]:
        load_balancer_id = lease.load_balancer_id
        row = connection.execute(sa.select(work).where(work.c.load_balancer_id == load_balancer_id)).first()
        if row is None:
            return None, ()
        observed = amphorae.of_load_balancer(connection, load_balancer_id)
        gone = row.op == Op.DELETE
        tree = None if gone else wanted.load_tree(connection, load_balancer_id)
        catalogue = self._backends.catalogue
        needed, failed = ({}, {}) if tree is None else networks(tree, observed, catalogue.network(row.network))
        # Only in a snapshot of one moment do references and contents belong together.
        uses_some = tree is not None and next(used_in(tree), None) is not None
        kept = secrets.of_load_balancer(connection, load_balancer_id) if uses_some else {}
        if kept and _generation(connection, load_balancer_id) != row.generation:
            return self._observe(connection, lease)
        topology = catalogue.topology(row.topology)
        return planning.Wanted(
            load_balancer_id=load_balancer_id,
            generation=row.generation,
            applied=row.applied,
            gone=gone,
            readable=not row.read_back,
            tree=tree,
            networks=needed,
            failed=failed,
            secrets=kept,
            roles=topology.roles,
            priorities=dict(topology.priorities),
            attempts=lease.attempts,
            patience=_MISSED_HEARTBEATS * self._backends.conf.health.interval,
            tickets=row.tickets,
            now=time.time(),
            compute=row.compute,
            network=row.network,
        ), observed

    def _failed(self, lease: Lease, error: Exception) -> None:
        """Try again later; tell the user at once what will not mend itself, and in the end everything else too."""
        conf = self._backends.conf.controller
        # An agent whose machine failed (5xx) may do better next time; one that understood and refused will not.
        # A backend that is not enabled stays so until an operator does something.
        hopeless = isinstance(error, (ModelError, RequestError, ConfigurationError)) or (
            isinstance(error, AgentRefused) and 400 <= error.status < 500
        )
        pause = conf.retry_most if hopeless else min(conf.retry_first * 2**lease.attempts, conf.retry_most)
        pause *= random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
        LOG.warning("load balancer %s: %s; again in %.1f s", lease.load_balancer_id, error, pause)
        try:
            if hopeless or lease.attempts + 1 == conf.give_up_after:
                self._database.write(lambda connection: _give_up(connection, lease, str(error)))
                self._reported()
            self._jobs.postpone(lease, pause, str(error))
        except AmphoraDriverError as trouble:
            # The lease runs out by itself, and somebody takes the load balancer up again.
            LOG.warning("load balancer %s: could not give the lease back: %s", lease.load_balancer_id, trouble)


def networks(
    tree: LoadBalancer, observed: tuple[amphorae.Amphora, ...], network: Network
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


def _give_up(connection: sa.Connection, lease: Lease, reason: str) -> None:
    guard(connection, lease)
    generation = _generation(connection, lease.load_balancer_id)
    statuses.fail(connection, lease.load_balancer_id, generation, reason)
    note_outcome(connection, lease.load_balancer_id, generation, f"failed: {reason}")


def _generation(connection: sa.Connection, load_balancer_id: str) -> int:
    found: Any = connection.execute(
        sa.select(work.c.generation).where(work.c.load_balancer_id == load_balancer_id)
    ).scalar_one()
    return int(found)
