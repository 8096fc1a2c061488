# SPDX-License-Identifier: Apache-2.0
"""The controller process: claims due jobs and runs them in a worker pool.

Invariant: one thread claims jobs while worker slots are free, and the threads of a pool run the jobs. A crash of the
process loses only time. Another controller of the host notices the crash and releases the leases, or they expire. The
next owner continues from the recorded rows.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cotyledon
from oslo_config.cfg import ConfigOpts

from amphora_driver import config, log_context
from amphora_driver.adoption import duties as adoption_duties
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.renewal import CertificateMaintenance
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.compute.boot_rate import BootRate
from amphora_driver.controller.liveness import ControllerLiveness
from amphora_driver.controller.worker_slots import WorkerSlots
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.failover.failure_detector import FailureDetector
from amphora_driver.maintenance import notification_sender
from amphora_driver.maintenance.drift_audit import DriftAuditor
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.maintenance.image_rotation import ImageRotator
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket, notifier
from amphora_driver.queue.jobs import Jobs, Lease, process_name
from amphora_driver.queue.process_locks import ProcessLock
from amphora_driver.reconcile import defaults
from amphora_driver.reconcile.boot_wait import BootWait
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.job import Job, find_preempted_jobs
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import process_registry
from amphora_driver.telemetry.http_server import Telemetry

LOG = logging.getLogger(__name__)
# Seconds to wait for running jobs when the controller stops.
_STOP_TIMEOUT = 20.0
# Seconds to wait for a free worker slot after a hint (a message that a job is due). Without a free slot, the next poll
# finds the job.
_HINT_TIMEOUT = 5.0
# Seconds that a stopping controller grants the running calls of its jobs and its liveness thread.
_STOP_GRACE = 3.0
# Seconds between two checks whether a running job must end early, for example because of a more urgent request.
_CHECK_JOBS_EVERY = 0.25
# Seconds between two searches for dead controllers on the same host.
_REAP_EVERY = 1.0
# A job that is due later than this multiple of the longest retry back-off shows that the database clock was set back.
_PAUSE_FACTOR = 2
# Due times that are less than this number of seconds ahead are never corrected.
_LEAST_PAUSE = 30.0
# Minimum seconds between two searches for jobs that have not failed. While many retries run, the controller starts no
# further retries and searches only for such jobs.
_CLAIM_FRESH_EVERY = 0.1
# Seconds for which a thread pauses after an unexpected error.
_ERROR_BACKOFF = 1.0
# Seconds without a successful search for due jobs, after which the controller reports itself as unhealthy.
_UNHEALTHY_AFTER = 15.0


class Controller:
    """Claims leases and runs their jobs until `stop`."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.amp_database.connection, durable=False)
        name = process_name()
        self._jobs = Jobs(self._database, name, conf.amp_controller.lease)
        defaults.validate_defaults(conf)
        vault = Vault.load(conf.amp_database.encryption_key_file)
        trust = TrustStore(conf, self._database, vault)
        try:
            # A controller with unusable CA files must not start, because each of its jobs would fail.
            trust.credentials()
        except StoreError as error:
            LOG.warning(
                "the controller starts although it cannot read the certificate authorities; each job tries to read "
                "them again: %s",
                error,
            )
        context = ReconcileContext(
            conf=conf,
            database=self._database,
            catalogue=Catalogue(conf, self._database),
            agents=AgentClient(conf, trust),
            authority=None,
            vault=vault,
            trust=trust,
            boot_rate=BootRate(conf.amp_compute.boot_rate, conf.amp_compute.boot_burst),
        )
        self._name = name
        certificates = CertificateMaintenance(conf, self._database, trust)
        self._boot_wait = BootWait(conf.amp_agent.port, self._make_due)
        on_status = partial(notifier.notify, conf, local_socket.REPORTER)
        on_due = partial(notifier.notify, conf, local_socket.CONTROLLER)
        self._reconciler = Reconciler(context, self._jobs, on_status, self._boot_wait)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        # Jobs that have exceeded their deadline by more than the duration of a lease. The controller does not renew the
        # leases of these jobs.
        self._hung: set[Job] = set()
        self._slots = WorkerSlots(conf.amp_controller.threads)
        self._liveness = ControllerLiveness(self._database, name, lambda: len(self._slots.jobs()))
        self._draining = self._liveness.draining
        notify = partial(notifier.notify, conf)
        self._duties = {
            "housekeeping": Housekeeping(conf, self._database, context.catalogue, name, vault, certificates).run,
            "audit": DriftAuditor(context, name, on_due).run,
            "rotation": ImageRotator(conf, self._database, context.catalogue, name, on_due).run,
            "detection": FailureDetector(conf, self._database, context.agents, name, notify).run,
            **notification_sender.create_duties(conf, self._database, name),
            **adoption_duties.create_duties(context, name, on_due),
        }
        self._wakeup = local_socket.WakeupSocket(conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        self._telemetry = Telemetry(conf, process_registry.ProcessKind.CONTROLLER, name, self._is_healthy)
        self._claimed_at = time.monotonic()

    def run(self) -> None:
        conf = self._conf
        waiting = threading.Thread(target=self._boot_wait.run, name="waiting")
        events = (self._stopping, self._draining)
        others = [
            threading.Thread(target=self._renew_leases, name="renew", daemon=True),
            threading.Thread(target=self._check_jobs, name="watch", daemon=True),
            *(threading.Thread(target=run, args=events, name=name) for name, run in self._duties.items()),
        ]
        # The liveness thread may block while the database does not answer. As a daemon thread, it does not delay the
        # end of the process.
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
        return self._ended.wait(seconds)

    def _is_healthy(self) -> bool:
        return time.monotonic() - self._claimed_at < _UNHEALTHY_AFTER + float(self._conf.amp_queue.poll_interval)

    def stop(self) -> None:
        """Start no new job; `run` returns after the end of the running jobs."""
        self._stopping.set()
        self._wakeup.wake()

    def _claim_or_back_off(self, pool: ThreadPoolExecutor) -> float:
        try:
            pause = self._claim_jobs(pool)
            self._claimed_at = time.monotonic()
        except (StoreError, OSError) as error:
            pause = float(self._conf.amp_queue.poll_interval)
            LOG.warning("the controller cannot claim jobs and tries again in %g s: %s", pause, error)
        except Exception:
            # An error must not end the thread that claims jobs. Otherwise, the controller would continue to run but
            # start no jobs.
            LOG.exception(
                "the controller cannot claim jobs because of an unexpected error and tries again in %g s",
                _ERROR_BACKOFF,
            )
            return _ERROR_BACKOFF
        return pause

    def _handle_hint(self, pool: ThreadPoolExecutor, load_balancer_id: str | None) -> None:
        """Claim the job of a hint from another host; returns when the next hint may be consumed.

        A controller without a free slot consumes no hint, so that another controller does. The wait is shorter than the
        broker's time-out. A draining controller ignores the hint: the other controllers find the job when they poll.
        """
        until = time.monotonic() + _HINT_TIMEOUT
        while not self._slots.has_free():
            if time.monotonic() > until or self._stopping.wait(0.01):
                return
        if load_balancer_id is None:
            self._wakeup.wake()
            return
        # The controller may have begun to stop or to drain while this thread waited for a worker slot. Then it starts
        # no job.
        if self._stopping.is_set() or self._draining.is_set():
            return
        try:
            lease = self._jobs.claim(load_balancer_id)
        except (StoreError, OSError) as error:
            LOG.warning(
                "the controller cannot claim the job of load balancer %s and tries again at a later poll: %s",
                load_balancer_id,
                error,
            )
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
            # The thread pool is shutting down and never runs this job. The slot is freed, because the shutdown waits
            # for all slots.
            self._slots.release(job)
            LOG.info(
                "load balancer %s: the stopping controller returns the lease of a job that it has not started: %s",
                lease.load_balancer_id,
                error,
            )
            try:
                self._jobs.yield_lease(lease)
            except (AmphoraDriverError, OSError) as failure:
                of = lease.load_balancer_id
                LOG.warning(
                    "load balancer %s: the stopping controller could not return the lease of its job; another "
                    "controller starts the job after the lease expires: %s",
                    of,
                    failure,
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
            return poll
        due = self._jobs.next_due()
        soonest = _CLAIM_FRESH_EVERY if fresh else 0.02
        return poll if due is None else min(max(due - self._database.now(), soonest), poll)

    def _run_job(self, job: Job) -> None:
        # The job may have waited in the queue of the thread pool. So its first step begins only now, without the time
        # in the queue.
        job.begin_step()
        try:
            self._boot_wait.remove_load_balancer(job.lease.load_balancer_id)
            self._reconciler.reconcile(job.lease, job)
        finally:
            self._slots.release(job)
            self._wakeup.wake()

    def _make_due(self, load_balancer_ids: Sequence[str]) -> None:
        """Make load balancers due whose booting amphorae listen now."""
        self._jobs.make_due(load_balancer_ids)
        self._wakeup.wake()

    def _repeat(self, task: str, every: float, work: Callable[[], None]) -> None:
        """Call `work` every few seconds, until this controller stops and its last job has ended."""
        pause = every
        while not self._stopping.wait(pause) or self._slots.jobs():
            if self._stopping.is_set():
                time.sleep(0.05)
            pause = every
            try:
                work()
            except (StoreError, OSError) as error:
                pause = min(_ERROR_BACKOFF, every)
                LOG.warning("the controller could not %s and tries again in %g s: %s", task, pause, error)
            except Exception:
                # An error must not end the thread of a repeated task. For example, without the thread that renews
                # leases, the leases would expire.
                pause = min(_ERROR_BACKOFF, every)
                LOG.exception(
                    "the controller could not %s because of an unexpected error and tries again in %g s", task, pause
                )

    def _renew_leases(self) -> None:
        """Renew the leases of running jobs, so that a lease expires only if this process cannot run."""

        def renew() -> None:
            if running := {job.lease.load_balancer_id for job in self._responsive_jobs()}:
                self._jobs.renew_leases(running)

        self._repeat("renew the leases of running jobs", self._conf.amp_controller.lease / 3, renew)

    def _responsive_jobs(self) -> list[Job]:
        """Return the jobs that have not exceeded their deadline by a lease; other leases expire."""
        jobs = self._slots.jobs()
        hung = {job for job in jobs if job.deadline.left() < -self._conf.amp_controller.lease}
        for job in hung - self._hung:
            LOG.error(
                "load balancer %s: the job has exceeded its deadline, so the controller lets the lease expire, and "
                "any controller may take over the job",
                job.lease.load_balancer_id,
            )
        self._hung = hung
        return [job for job in jobs if job not in hung]

    def _check_jobs(self) -> None:
        """Preempt jobs and release the leases of dead processes, until the last job has ended."""
        reaped_at = 0.0
        longest = max(_PAUSE_FACTOR * self._conf.amp_controller.retry_most, _LEAST_PAUSE)

        def check() -> None:
            nonlocal reaped_at
            if self._stopping.is_set():
                for job in self._slots.jobs():
                    job.preempt("this controller stops", _STOP_GRACE)
                return
            self._preempt_jobs()
            if time.monotonic() - reaped_at >= _REAP_EVERY:
                reaped_at = time.monotonic()
                self._reap_dead_processes()
                if self._jobs.clamp_due_times(longest):
                    LOG.warning(
                        "the database clock was set back, so the controller corrects the due times and leases of jobs "
                        "that are too far in the future"
                    )
                    self._wakeup.wake()

        self._repeat("check running jobs", _CHECK_JOBS_EVERY, check)

    def _preempt_jobs(self) -> None:
        slow = [job for job in self._slots.jobs() if time.monotonic() - job.step_started_at >= _CHECK_JOBS_EVERY]
        if not slow:
            return
        for job, reason in self._database.read(lambda c: find_preempted_jobs(c, slow)).items():
            job.preempt(reason)
        if self._slots.has_free():
            self._wakeup.wake()

    def _reap_dead_processes(self) -> None:
        if reaped := self._process_lock.reap_dead(self._release_leases_of):
            LOG.warning(
                "the controller released the leases of dead controllers on this host, so their jobs are due now: %s",
                ", ".join(reaped),
            )
            notifier.notify(self._conf, local_socket.CONTROLLER)

    def _release_leases_of(self, name: str) -> None:
        self._jobs.release_leases(name)
        self._database.write(lambda c: process_registry.remove_dead_process(c, name))


class ControllerService(cotyledon.Service):
    """One controller as a process of cotyledon, which restarts the process after a crash."""

    name = "amphora-controller"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._controller = Controller(conf)

    def run(self) -> None:
        self._controller.run()

    def terminate(self) -> None:
        self._controller.stop()
        # The process ends when `terminate` returns. After the leases expire, other controllers continue the running
        # jobs of this controller.
        if not self._controller.wait(_STOP_TIMEOUT):
            LOG.warning(
                "controller %s stops although some of its jobs still run; other controllers continue these jobs after "
                "the leases expire",
                self.name,
            )


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
