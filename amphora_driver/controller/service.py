# SPDX-License-Identifier: Apache-2.0
"""The controller process: claims due jobs and runs them in a worker pool.

Invariant: one thread claims jobs while worker slots are free; pool threads run them. A crash of the process loses only
time. Its leases are released when another controller of this host notices the crash, or they expire. The next owner
continues from the recorded rows.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cotyledon

from amphora_driver import config, log_context
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.renewal import CertificateMaintenance
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.controller.liveness import ControllerLiveness
from amphora_driver.controller.worker_slots import WorkerSlots
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.failover.failure_detector import FailureDetector
from amphora_driver.maintenance.drift_audit import DriftAuditor
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.maintenance.image_rotation import ImageRotator
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket, notifier
from amphora_driver.queue.jobs import Jobs, process_name
from amphora_driver.queue.process_locks import ProcessLock
from amphora_driver.reconcile import defaults
from amphora_driver.reconcile.boot_wait import BootWait
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.job import Job, find_preempted_jobs
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import process_registry
from amphora_driver.telemetry.http_server import Telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.queue.jobs import Lease

LOG = logging.getLogger(__name__)
# Seconds a stopping process waits for its running jobs.
_STOP_TIMEOUT = 20.0
# Seconds for which a hint waits for a free worker slot.
_HINT_TIMEOUT = 5.0
# Seconds a job has for its pending calls after the process began to stop.
_STOP_GRACE = 3.0
# Seconds between two checks of running jobs for preemption and stalls, and between two searches for dead processes of
# this host.
_CHECK_JOBS_EVERY = 0.25
_REAP_EVERY = 1.0
# The longest plausible pause: a multiple of the longest retry back-off, and at least these seconds.
_PAUSE_FACTOR, _LEAST_PAUSE = 2, 30.0
# Seconds between two claims while only jobs without a failed attempt are allowed.
_CLAIM_FRESH_EVERY = 0.1
# Seconds of back-off after an unexpected error, and after a failed renewal of leases.
_ERROR_BACKOFF = 1.0
# Seconds without a claim after which the process reports itself as unhealthy.
_UNHEALTHY_AFTER = 15.0


def open_trust_store(conf: ConfigOpts, database: Database, vault: Vault) -> TrustStore:
    """Create the trust store and report wrong files and keys at the start.

    Raises:
        ConfigurationError, CertificateError: a file is missing or wrong.
    """
    trust = TrustStore(conf, database, vault)
    try:
        trust.credentials()
    except StoreError as error:
        LOG.warning("cannot read the certificate authorities yet: %s", error)
    return trust


def create_context(conf: ConfigOpts, database: Database, vault: Vault, trust: TrustStore) -> ReconcileContext:
    """Create the clients and backends that jobs use, as configured."""
    return ReconcileContext(
        conf=conf,
        database=database,
        catalogue=Catalogue(conf, database),
        agents=AgentClient(conf, trust),
        authority=None,
        vault=vault,
        trust=trust,
    )


class Controller:
    """Claims leases and runs their jobs until `stop`."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.amp_database.connection, durable=False)
        name = process_name()
        self._jobs = Jobs(self._database, name, conf.amp_controller.lease)
        defaults.validate_defaults(conf)
        vault = Vault.load(conf.amp_database.encryption_key_file)
        trust = open_trust_store(conf, self._database, vault)
        context = create_context(conf, self._database, vault, trust)
        self._name = name
        self._housekeeping = Housekeeping(
            conf,
            self._database,
            context.catalogue,
            name,
            context.vault,
            CertificateMaintenance(conf, self._database, trust),
        )
        self._reconciler = Reconciler(
            context,
            self._jobs,
            lambda: notifier.notify(conf, local_socket.REPORTER),
            boot_wait := BootWait(conf.amp_agent.port, self._make_due),
        )
        self._boot_wait = boot_wait
        self._stopping = threading.Event()
        self._ended = threading.Event()
        # Jobs that have exceeded their deadline by the length of a lease.
        self._hung: set[Job] = set()
        self._slots = WorkerSlots(conf.amp_controller.threads)
        self._liveness = ControllerLiveness(self._database, name, lambda: len(self._slots.jobs()))
        self._draining = self._liveness.draining
        self._auditor = DriftAuditor(context, name, lambda: notifier.notify(conf, local_socket.CONTROLLER))
        self._rotator = ImageRotator(
            conf, self._database, context.catalogue, name, lambda: notifier.notify(conf, local_socket.CONTROLLER)
        )
        self._detector = FailureDetector(
            conf, self._database, context.agents, name, lambda role: notifier.notify(conf, role)
        )
        self._wakeup = local_socket.WakeupSocket(conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        self._telemetry = Telemetry(conf, process_registry.ProcessKind.CONTROLLER, name, self._is_healthy)
        self._claimed_at = time.monotonic()

    def run(self) -> None:
        """Run until `stop`; returns when the last job has ended."""
        conf = self._conf
        waiting = threading.Thread(target=self._boot_wait.run, name="waiting")
        others = [
            threading.Thread(target=self._renew_leases, name="renew", daemon=True),
            threading.Thread(target=self._check_jobs, name="watch", daemon=True),
            threading.Thread(target=self._housekeeping.run, args=(self._stopping, self._draining), name="housekeeping"),
            threading.Thread(target=self._auditor.run, args=(self._stopping, self._draining), name="audit"),
            threading.Thread(target=self._rotator.run, args=(self._stopping, self._draining), name="rotation"),
            threading.Thread(target=self._detector.run, args=(self._stopping, self._draining), name="detection"),
        ]
        # A daemon thread: it may block for as long as the database does not answer.
        liveness = threading.Thread(target=self._liveness.run, args=(self._stopping,), name="liveness", daemon=True)
        with ProcessLock(f"{conf.amp_queue.socket_dir}/alive", self._name) as process_lock:
            self._process_lock = process_lock
            for thread in (waiting, *others, liveness):
                thread.start()
            with (
                self._telemetry,
                self._wakeup,
                ThreadPoolExecutor(self._slots.most, "work") as pool,
                notifier.controller_hints(conf, lambda one: self._handle_hint(pool, one)),
            ):
                while not self._stopping.is_set():
                    self._wakeup.wait(self._claim_or_back_off(pool))
            for thread in others:
                thread.join()
            self._boot_wait.stop()
            waiting.join()
            self._jobs.release_leases()
            liveness.join(_STOP_GRACE)
            self._liveness.unregister()
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait until `run` has ended; False if it has not in that time."""
        return self._ended.wait(seconds)

    def _is_healthy(self) -> bool:
        """Whether the last successful search for due jobs is recent."""
        return time.monotonic() - self._claimed_at < _UNHEALTHY_AFTER + float(self._conf.amp_queue.poll_interval)

    def stop(self) -> None:
        """Start no new job; `run` returns when the running ones have ended."""
        self._stopping.set()
        self._wakeup.wake()

    def _claim_or_back_off(self, pool: ThreadPoolExecutor) -> float:
        """Claim due jobs; return the seconds until the next attempt."""
        try:
            pause = self._claim_jobs(pool)
            self._claimed_at = time.monotonic()
        except (StoreError, OSError) as error:
            pause = float(self._conf.amp_queue.poll_interval)
            LOG.warning("cannot claim jobs, trying again in %g s: %s", pause, error)
        except Exception:
            # Without this thread no job starts, while the process looks alive.
            LOG.exception("claiming jobs failed, trying again in %g s", _ERROR_BACKOFF)
            return _ERROR_BACKOFF
        return pause

    def _handle_hint(self, pool: ThreadPoolExecutor, load_balancer_id: str | None) -> None:
        """Act on a hint from another host; returns when the next hint may be consumed.

        A controller without a free slot consumes no hint, so that another controller does. The wait is shorter than
        the broker's time-out. A draining controller ignores the hint: the others find the job when they poll.
        """
        until = time.monotonic() + _HINT_TIMEOUT
        while not self._slots.has_free():
            if time.monotonic() > until or self._stopping.wait(0.01):
                return
        if load_balancer_id is None:
            self._wakeup.wake()
            return
        # `stop` may have been called during the wait for a slot.
        if self._stopping.is_set() or self._draining.is_set():
            return
        try:
            lease = self._jobs.claim(load_balancer_id)
        except (StoreError, OSError) as error:
            LOG.warning("load balancer %s: dropping a hint, cannot claim its job: %s", load_balancer_id, error)
            return
        if lease is not None:
            self._start_job(pool, lease)

    def _start_job(self, pool: ThreadPoolExecutor, lease: Lease) -> None:
        """Start the job of a lease; return the lease if the pool is shutting down."""
        job = self._reconciler.create_job(lease)
        self._slots.occupy(job)
        try:
            pool.submit(self._run_job, job)
        except RuntimeError as error:
            # Pool is shutting down: free the slot, or shutdown waits for ever.
            self._slots.release(job)
            LOG.info("load balancer %s: returning the lease, this controller stops: %s", lease.load_balancer_id, error)
            try:
                self._jobs.yield_lease(lease)
            except (AmphoraDriverError, OSError) as failure:
                LOG.warning(
                    "load balancer %s: could not return the lease, it expires: %s", lease.load_balancer_id, failure
                )

    def _claim_jobs(self, pool: ThreadPoolExecutor) -> float:
        """Claim due jobs while slots are free; return the seconds until the next search."""
        poll = float(self._conf.amp_queue.poll_interval)
        fresh = False
        if self._draining.is_set():
            return poll
        while self._slots.has_free():
            fresh = self._slots.excludes_retries()
            lease = self._jobs.claim(fresh=fresh)
            if lease is None:
                break
            self._start_job(pool, lease)
        else:
            # The end of a job wakes this thread.
            return poll
        due = self._jobs.next_due()
        soonest = _CLAIM_FRESH_EVERY if fresh else 0.02
        return poll if due is None else min(max(due - self._database.now(), soonest), poll)

    def _run_job(self, job: Job) -> None:
        # The time that the job waited in the pool's queue does not count.
        job.begin_step()
        try:
            self._boot_wait.remove_load_balancer(job.lease.load_balancer_id)
            self._reconciler.reconcile(job.lease, job)
        finally:
            self._slots.release(job)
            self._wakeup.wake()

    def _make_due(self, load_balancer_ids: Sequence[str]) -> None:
        """Continue load balancers whose booting amphorae listen now."""
        self._jobs.make_due(load_balancer_ids)
        self._wakeup.wake()

    def _renew_leases(self) -> None:
        """Renew the leases of running jobs, so that a lease expires only if this process cannot run."""
        every = self._conf.amp_controller.lease / 3
        pause = every
        while not self._stopping.wait(pause) or self._slots.jobs():
            if self._stopping.is_set():
                time.sleep(0.05)
            pause = every
            try:
                if running := {job.lease.load_balancer_id for job in self._responsive_jobs()}:
                    self._jobs.renew_leases(running)
            except (StoreError, OSError) as error:
                pause = min(_ERROR_BACKOFF, every)
                LOG.warning("could not renew leases, trying again in %g s: %s", pause, error)
            except Exception:
                # Without this thread the leases of all running jobs expire.
                pause = min(_ERROR_BACKOFF, every)
                LOG.exception("renewing leases failed, trying again in %g s", pause)

    def _responsive_jobs(self) -> list[Job]:
        """Return the jobs that have not exceeded their deadline by a lease. The leases of the others expire."""
        jobs = self._slots.jobs()
        hung = {job for job in jobs if job.deadline.left() < -self._conf.amp_controller.lease}
        for job in hung - self._hung:
            LOG.error("load balancer %s: a call hangs, its lease expires", job.lease.load_balancer_id)
        self._hung = hung
        return [job for job in jobs if job not in hung]

    def _check_jobs(self) -> None:
        """Preempt jobs and release the leases of dead processes, until the last job has ended."""
        reaped_at = 0.0
        longest = max(_PAUSE_FACTOR * self._conf.amp_controller.retry_most, _LEAST_PAUSE)
        while not self._stopping.wait(_CHECK_JOBS_EVERY) or self._slots.jobs():
            if self._stopping.is_set():
                for job in self._slots.jobs():
                    job.preempt("this controller stops", _STOP_GRACE)
                time.sleep(0.05)
                continue
            try:
                self._preempt_jobs()
                if time.monotonic() - reaped_at >= _REAP_EVERY:
                    reaped_at = time.monotonic()
                    self._reap_dead_processes()
                    if self._jobs.clamp_due_times(longest):
                        LOG.warning("the database clock was set back: jobs with implausible due times are due now")
                        self._wakeup.wake()
            except (StoreError, OSError) as error:
                LOG.warning("could not check running jobs, trying again: %s", error)
            except Exception:
                # Without this thread no job is preempted and the leases of dead processes last until they expire.
                LOG.exception("checking running jobs failed, trying again")

    def _preempt_jobs(self) -> None:
        slow = [job for job in self._slots.jobs() if time.monotonic() - job.step_started_at >= _CHECK_JOBS_EVERY]
        if not slow:
            return
        for job, reason in self._database.read(lambda connection: find_preempted_jobs(connection, slow)).items():
            job.preempt(reason)
        if self._slots.has_free():
            self._wakeup.wake()

    def _reap_dead_processes(self) -> None:
        """Release the leases of dead processes of this host before they expire."""
        if reaped := self._process_lock.reap_dead(self._release_leases_of):
            LOG.warning("dead processes, their jobs are due now: %s", ", ".join(reaped))
            notifier.notify(self._conf, local_socket.CONTROLLER)

    def _release_leases_of(self, name: str) -> None:
        self._jobs.release_leases(name)
        self._database.write(lambda connection: process_registry.remove_dead_process(connection, name))


class ControllerService(cotyledon.Service):
    """One controller as a cotyledon process, which cotyledon restarts after a crash."""

    name = "amphora-controller"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._controller = Controller(conf)

    def run(self) -> None:
        self._controller.run()

    def terminate(self) -> None:
        self._controller.stop()
        # The process ends after this method; another controller continues the jobs that are running then.
        if not self._controller.wait(_STOP_TIMEOUT):
            LOG.warning("stopping with running jobs: their leases expire")


def main() -> int:
    """Run the controller until a signal; return 1 if the database schema does not fit this version."""
    conf = config.load()
    log_context.setup(conf, ControllerService.name)
    if not schema_check.is_usable(Database(conf.amp_database.connection)):
        return 1
    manager = cotyledon.ServiceManager()
    manager.add(ControllerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
