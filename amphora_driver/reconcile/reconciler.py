# SPDX-License-Identifier: Apache-2.0
"""Reconciliation of one load balancer with its recorded state.

Invariant: `reconcile` reads the store and plans again after every round of steps, until the plan is empty. The job then
releases the lease: it is finished, waits for an event, is preempted, or is retried after a growing back-off. A job
never holds its lease while it waits for a slow event such as a boot.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints, log_context, metrics
from amphora_driver.database.tables import job as job_table
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
from amphora_driver.model.amphora import Amphora
from amphora_driver.model.loadbalancer import LoadBalancer, Member
from amphora_driver.model.secret_refs import secrets_of_tree
from amphora_driver.network.interface import Network
from amphora_driver.queue.jobs import Jobs, Lease, guard_lease, has_open_request, record_outcome
from amphora_driver.reconcile import steps, vip_allocation, vrrp_peers
from amphora_driver.reconcile.boot_wait import AwaitedAgent, BootWait
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.defaults import advert_interval
from amphora_driver.reconcile.desired_bundle import read_omitted_objects
from amphora_driver.reconcile.executor import StepExecutor
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.plan import plan
from amphora_driver.reconcile.tree_cache import TreeCache
from amphora_driver.store import failovers, sealed_secrets, status_outbox
from amphora_driver.store.generations import Op

LOG = logging.getLogger(__name__)
# Minimum pause in seconds before the next job of a load balancer, unless the plan asks for a shorter pause. Without a
# minimum, frequent jobs would delay other load balancers.
_MIN_PAUSE = 1.0
# Longest pause in seconds before the next job of a load balancer, unless the longest retry back-off is longer.
_MAX_PAUSE = 25.0
# Seconds of pause for each booting amphora. More frequent checks would slow the boots down.
_PAUSE_PER_BOOT = 0.05
# An amphora of a new pair takes the VIPs after three to four VRRP advertisement intervals (RFC 9568, section 6.1).
_MIN_ADVERTS, _MAX_ADVERTS = 3, 4
# A busy amphora may take the VIPs this number of seconds later than VRRP requires.
_VIP_MARGIN = 3.0
# Missed heartbeats after which an amphora is silent. A silent amphora does not delay the push to its partner.
_MISSED_HEARTBEATS = 3
# A failure of one of these steps concerns one amphora only, and the job continues with the other amphorae.
_SINGLE_AMPHORA_STEPS = (steps.Boot, steps.Plug, steps.AwaitAgent, steps.Release)


class Reconciler:
    """Runs the jobs of leases; calls `on_status` after a change that Octavia may have to receive.

    Without `boot_wait`, jobs check booting amphorae at intervals.
    """

    def __init__(
        self, context: ReconcileContext, jobs: Jobs, on_status: Callable[[], None], boot_wait: BootWait | None = None
    ) -> None:
        self._context = context
        self._database = context.database
        self._jobs = jobs
        self._on_status = on_status
        self._boot_wait = boot_wait
        self._tree_cache = TreeCache()

    def create_job(self, lease: Lease) -> Job:
        return Job(lease, self._database, self._context.conf.amp_controller.operation_timeout)

    def reconcile(self, lease: Lease, job: Job | None = None) -> None:
        """Make the lease's load balancer match its recorded state; never raises."""
        job = job or self.create_job(lease)
        with log_context.about(load_balancer=lease.load_balancer_id), metrics.job() as measured:
            measured.outcome = self._attempt(lease, job)

    def _attempt(self, lease: Lease, job: Job) -> str:
        """Run the job and return its outcome, as a value of the metric's label."""
        try:
            failpoints.reach(failpoints.Point.CLAIMED)
            self._refuse_crash_loop(lease)
            found = self._converge(job)
            failpoints.reach(failpoints.Point.FINISHING)
            self._release_lease(job, *found)
            failpoints.reach(failpoints.Point.FINISHED)
        except LeaseLost as error:
            if not job.row_deleted:
                LOG.warning(
                    "load balancer %s: the controller stops its job, because the lease of the job is lost: %s",
                    lease.load_balancer_id,
                    error,
                )
            return "lost"
        except AmphoraDriverError as error:
            self._handle_failure(job, error)
        except Exception as error:
            LOG.exception(
                "load balancer %s: the controller's job failed with an unexpected error, and the controller repeats "
                "the job later",
                lease.load_balancer_id,
            )
            self._handle_failure(job, error)
        else:
            return "finished" if found[2] is None else "waiting"
        return "preempted" if job.is_preempted else "failed"

    def _refuse_crash_loop(self, lease: Lease) -> None:
        """Refuse load balancers that crashed several controllers, except for occasional retries."""
        if lease.crashes >= self._context.conf.amp_controller.give_up_after:
            happened = f"{lease.crashes} controllers in a row crashed or stalled while they worked on it"
            remedy = "Check their logs for the last step. It is retried occasionally."
            raise CrashLoop(f"work on load balancer {lease.load_balancer_id}", happened, remedy)

    def _converge(self, job: Job) -> tuple[steps.AnyView, tuple[Amphora, ...], steps.Await | None]:
        executor = StepExecutor(self._context, job)
        while True:
            now = self._database.now()
            view, observed = self._database.read(partial(self._read_view, job=job, executor=executor, now=now))
            view, observed = executor.spares.without_unfit(view, observed), executor.removal.with_answers(observed)
            planned = plan(view, observed)
            awaited = _perform_steps(executor, planned, view, observed)
            if isinstance(view, steps.LoadBalancerView) and planned and isinstance(planned[0], steps.QueryVips):
                # The step QueryVips changes no row, so the next plan needs no new read of the database.
                view = msgspec.structs.replace(view, vips_taken=executor.vips_taken, now=self._database.now())
                planned = plan(view, observed)
                awaited = _perform_steps(executor, planned, view, observed)
            if awaited is not None or not planned:
                return view, observed, awaited
            self._on_status()

    def _release_lease(
        self, job: Job, view: steps.AnyView, observed: tuple[Amphora, ...], step: steps.Await | None
    ) -> None:
        if step is None and isinstance(view, steps.LoadBalancerView) and view.replacing:
            # No step is left, so all replacements are complete. This write also ends fail-overs whose amphorae no
            # longer exist, even if a part of their history is missing.
            of, now = job.lease.load_balancer_id, self._database.now()
            self._write(job, lambda c: failovers.finish_settled_failovers(c, of, now))
        until = None if step is None else step.until
        if step is None or until is None:
            self._jobs.complete(job.lease, view.generation)
            return
        # While the job ran, the planned end of the wait may have passed. So the pause lasts at least _MIN_PAUSE
        # seconds, or the planned wait if that is shorter.
        pause = max(until - self._database.now(), min(_MIN_PAUSE, until - view.now))
        if step.amphorae and self._boot_wait is not None:
            pause = max(pause, _PAUSE_PER_BOOT * len(self._boot_wait))
        # `Jobs.clamp_due_times` would regard a longer pause as a jump of the database clock, and would end the pause.
        pause = min(pause, max(self._context.conf.amp_controller.retry_most, _MAX_PAUSE))
        if view.applied >= view.generation:
            self._jobs.complete(job.lease, view.generation, self._database.now() + pause)
        else:
            readable = view.readable if isinstance(view, steps.LoadBalancerView) else True
            self._jobs.defer(job.lease, view.generation, pause, readable=readable)
        # The wait for the agents begins after the release of the lease. Otherwise, an answer of an agent could start a
        # job while the lease is still held.
        awaited = [
            AwaitedAgent(one.id, one.management_address, job.lease.load_balancer_id, pause)
            for one in observed
            if one.id in step.amphorae and one.management_address is not None
        ]
        if awaited and self._boot_wait is not None:
            self._boot_wait.add(awaited)

    def _read_view(
        self, connection: sa.Connection, job: Job, executor: StepExecutor, now: float
    ) -> tuple[steps.AnyView, tuple[Amphora, ...]]:
        lease, load_balancer_id = job.lease, job.lease.load_balancer_id
        # The generation is read before the objects. A request during the read then has a newer generation, and the load
        # balancer stays due.
        row, observed = job.read_state(connection)
        log_context.set_generation(row.generation)
        renewals = executor.renewal.due(observed, now)
        if row.op == Op.SPARES:
            return steps.SparePoolView(
                load_balancer_id=load_balancer_id,
                generation=row.generation,
                applied=row.applied,
                attempts=lease.attempts,
                silence_limit=_MISSED_HEARTBEATS * self._context.conf.amp_health.interval,
                now=now,
                absent=executor.absent | executor.spares.absent,
                boots_at=dict(executor.boots_at),
                asked=executor.spares.queried,
                compute=row.compute,
                network=row.network,
                renewals=renewals,
                stock=executor.spares.read_pool_state(connection, row),
            ), observed
        gone = row.op == Op.DELETE
        tree = None if gone else self._tree_cache.load(connection, row, lease.epoch)
        catalogue = self._context.catalogue
        given, addressed = vip_allocation.read_applied_options(row), vip_allocation.addresses_known(tree)
        needed = NeededNetworks()
        if tree is not None and addressed:
            needed = needed_networks(tree, observed, catalogue.network(row.network))
        failed = needed.failed | vip_allocation.read_refusal(connection, load_balancer_id, given)
        # The objects and their secrets must belong to one generation. If the generation changes between the two reads,
        # the controller reads both again.
        uses_some = tree is not None and next(secrets_of_tree(tree), None) is not None
        kept = sealed_secrets.load_secrets(connection, load_balancer_id) if uses_some else {}
        if kept and _generation(connection, load_balancer_id) != row.generation:
            return self._read_view(connection, job, executor, now)
        topology = catalogue.topology(row.topology)
        spec = executor.spares.find_spec(row, tree)
        takes = job.replacing and spec is not None and spec.id == row.spare_pool
        advert = 0.0 if tree is None else advert_interval(tree, self._context.conf)
        return steps.LoadBalancerView(
            load_balancer_id=load_balancer_id,
            generation=row.generation,
            applied=row.applied,
            gone=gone,
            readable=not row.read_back,
            tree=tree,
            networks=needed.ordinary,
            sr_iov_networks=needed.sr_iov,
            failed=failed,
            omitted=read_omitted_objects(row),
            secrets=kept,
            roles=topology.roles,
            priorities=vrrp_peers.find_priorities(catalogue, row.topology, observed),
            attempts=lease.attempts,
            silence_limit=_MISSED_HEARTBEATS * self._context.conf.amp_health.interval,
            tickets=row.tickets,
            now=now,
            clock_set=self._database.seconds_since_clock_jump() < self._context.conf.amp_controller.drain_timeout,
            taking_vips=(_MIN_ADVERTS * advert, _MAX_ADVERTS * advert + _VIP_MARGIN),
            absent=executor.absent,
            boots_at=dict(executor.boots_at),
            plugs_while_booting=catalogue.compute(row.compute, row.network).plugs_while_booting,
            vips_taken=executor.vips_taken,
            vips_held=row.vips_held,
            takes_vips=row.takes_vips,
            holder_asked=executor.removal.holder_queried,
            compute=row.compute,
            network=row.network,
            vip_given=given,
            listener_rules=catalogue.network(row.network).listener_rules,
            allocate_at=0.0 if addressed else vip_allocation.next_request_at(connection, load_balancer_id, now),
            replacing=job.replacing,
            pool=row.spare_pool,
            spec=spec,
            spares=executor.spares.list_adoptable(connection, row.spare_pool) if takes else (),
            renewals=renewals,
        ), observed

    def _write(self, job: Job, change: Callable[[sa.Connection], object]) -> None:
        def write(connection: sa.Connection) -> None:
            guard_lease(connection, job.lease)
            change(connection)

        self._database.write(write)

    def _handle_failure(self, job: Job, error: Exception) -> None:
        """Schedule a retry; report ERROR at once for a final error, and after several attempts for others."""
        lease, conf, of = job.lease, self._context.conf.amp_controller, job.lease.load_balancer_id
        try:
            now = self._database.now()
            if isinstance(error, Superseded) or job.is_preempted:
                # A newer request has interrupted the job and may have caused this error. So the job counts as
                # interrupted, not as failed.
                LOG.info(
                    "load balancer %s: the controller interrupts its running job and starts the job again: %s",
                    of,
                    job.preemption_error(),
                )
                self._jobs.yield_lease(lease)
                return
            final = isinstance(error, AmphoraDriverError) and error.final
            pause = conf.retry_most if final else min(conf.retry_first * 2**lease.attempts, conf.retry_most)
            pause *= random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
            LOG.warning(
                "load balancer %s: the controller's job failed: %s; the controller tries again in %.1f s",
                of,
                error,
                pause,
            )
            if job.replacing:
                self._write(job, lambda c: failovers.record_failure(c, of, now, str(error)))
            tried = lease.attempts + 1
            if final or tried >= conf.give_up_after:
                first = final or tried == conf.give_up_after
                if self._database.write(lambda c: _report_error(c, job, str(error), always=first)):
                    self._on_status()
            # The job ended without a crash of the controller, so the count of crashes becomes zero. CrashLoop means
            # that the controller did not attempt the job, so the count decreases by one and permits one attempt.
            crashes = lease.crashes - 1 if isinstance(error, CrashLoop) else 0
            self._jobs.retry_later(lease, pause, str(error), job.generation or None, crashes=crashes)
        except (AmphoraDriverError, OSError) as failure:
            LOG.warning(
                "load balancer %s: the controller could not release the lease of the failed job, and repeats the "
                "job after the lease expires: %s",
                of,
                failure,
            )


def _perform_steps(
    executor: StepExecutor, planned: Sequence[steps.Step], view: steps.AnyView, observed: tuple[Amphora, ...]
) -> steps.Await | None:
    """Perform the steps; return the wait among them, if there is one.

    After an error of one amphora, the single-amphora steps of the others continue. The round then ends with the first
    error, or with a final one.
    """
    errors: dict[str, AmphoraDriverError] = {}
    for step in planned:
        amphora_id = step.amphora_id if isinstance(step, _SINGLE_AMPHORA_STEPS) else None
        if errors and (amphora_id is None or amphora_id in errors):
            continue
        if amphora_id in executor.boots_at:
            # The boot of this amphora is delayed, so its other steps are skipped.
            continue
        if isinstance(step, steps.Await):
            return step
        try:
            executor.execute(step, view, observed)
        except (AgentError, ComputeError, NetworkError) as error:
            if amphora_id is None:
                raise
            of = view.load_balancer_id
            LOG.warning(
                "load balancer %s: a step for amphora %s failed; the controller continues with the other amphorae: %s",
                of,
                amphora_id,
                error,
            )
            errors[amphora_id] = error
    if errors:
        raise next((one for one in errors.values() if one.final), next(iter(errors.values())))
    return None


class NeededNetworks(msgspec.Struct, frozen=True, kw_only=True):
    """The networks that an amphora needs, with their subnets.

    Attributes:
        ordinary: networks of ordinary ports; the network of the VIP is the first.
        sr_iov: networks of the additional ports for members that request SR-IOV.
        failed: reasons by id for members whose subnet does not exist.
    """

    ordinary: dict[str, tuple[str, ...]] = {}
    sr_iov: dict[str, tuple[str, ...]] = {}
    failed: dict[str, str] = {}


def needed_networks(tree: LoadBalancer, observed: tuple[Amphora, ...], network: Network) -> NeededNetworks:
    """Return the networks that an amphora needs.

    Each member has a port of its type. The type of an attached port cannot change, and its replacement would end the
    connections of other members. The port of a VIP with SR-IOV serves both types on its network.
    """
    known: dict[str, str] = {vip.subnet_id: vip.network_id for vip in tree.vips}
    known |= {subnet.id: subnet.network_id for one in observed for port in one.plugged for subnet in port.subnets}
    ordinary: dict[str, dict[str, None]] = {tree.vip.network_id: {vip.subnet_id: None for vip in tree.vips}}
    sr_iov: dict[str, dict[str, None]] = {}
    failed: dict[str, str] = {}
    by_subnet: dict[str, list[Member]] = {}
    for pool in tree.pools:
        for member in pool.members:
            if member.subnet_id:
                by_subnet.setdefault(member.subnet_id, []).append(member)
    for subnet_id, members in sorted(by_subnet.items()):
        if subnet_id not in known:
            try:
                known[subnet_id] = network.subnet(subnet_id, tree.project_id).network_id
            except UnsupportedOption as error:
                failed |= dict.fromkeys((one.id for one in members), str(error))
                continue
        network_id = known[subnet_id]
        is_shared = network_id == tree.vip.network_id and tree.profile.sriov_vip is True
        for uses_sr_iov in {tree.uses_sr_iov(one) and not is_shared for one in members}:
            (sr_iov if uses_sr_iov else ordinary).setdefault(network_id, {})[subnet_id] = None
    return NeededNetworks(ordinary=_with_subnets(ordinary), sr_iov=_with_subnets(sr_iov), failed=failed)


def _with_subnets(found: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    return {network_id: tuple(subnets) for network_id, subnets in found.items()}


def _report_error(connection: sa.Connection, job: Job, reason: str, *, always: bool) -> bool:
    """Report ERROR for the observed generation, or without `always` only for an open request."""
    of = job.lease.load_balancer_id
    guard_lease(connection, job.lease)
    generation = job.generation or _generation(connection, of)
    if not always and not has_open_request(connection, of, generation):
        return False
    status_outbox.fail_generation(connection, of, generation, reason)
    record_outcome(connection, of, generation, f"failed: {reason}")
    return True


def _generation(connection: sa.Connection, load_balancer_id: str) -> int:
    query = sa.select(job_table.c.generation).where(job_table.c.load_balancer_id == load_balancer_id)
    return int(connection.execute(query).scalar_one())
