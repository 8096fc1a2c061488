# SPDX-License-Identifier: Apache-2.0
"""The controller process.

Invariant: a thread claims due load balancers while there are hands free, others make them as recorded. All that is
lost when the process dies is time: its leases are free as soon as another one of this host notices, or when they run
out, and that one, or this one started anew, finds the same rows.
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
from amphora_driver.certificates.renewal import Certificates
from amphora_driver.certificates.trust_store import Trust
from amphora_driver.controller.liveness import Attendance
from amphora_driver.controller.worker_slots import Hands
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.failover.failure_detector import FailureDetector
from amphora_driver.maintenance.drift_audit import Auditing
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.maintenance.image_rotation import Rotator
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket, notifier
from amphora_driver.queue.jobs import Jobs, process_name
from amphora_driver.queue.process_locks import Presence
from amphora_driver.reconcile import defaults
from amphora_driver.reconcile.boot_wait import WaitingRoom
from amphora_driver.reconcile.executor import Backends
from amphora_driver.reconcile.job import Turn, goes_first
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import process_registry
from amphora_driver.telemetry.http_server import Telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.queue.jobs import Lease

LOG = logging.getLogger(__name__)
# Seconds an ending process waits for the jobs it has begun.
_PATIENCE = 20.0
# Seconds for which a hint waits for a free hand.
_LOOK_SECONDS = 5.0
# Seconds a job that gives way to the end of its process has for what it asks others just now.
_LAST_WORDS = 3.0
# Seconds between two looks at jobs that take longer than a moment: whether something goes before them, or somebody else
# may begin in their place; and between two looks who of this host has died.
_WATCHED_EVERY = 0.25
_BURIED_EVERY = 1.0
# No pause is longer than so many times the longest between two attempts, or than these seconds.
_PAUSES, _LEAST_PAUSE = 2, 30.0
# Seconds between two looks at what is due while nothing that failed before is taken up.
_BETWEEN_FRESH = 0.1
# Seconds after something went wrong that nobody thought of, and after leases could not be renewed.
_TROUBLE = 1.0
# Seconds without a look for work after which this process is said not to do its duty.
_IDLE = 15.0


def backends(conf: ConfigOpts, database: Database) -> Backends:
    """Everything a controller works through, as configured.

    Raises:
        ConfigurationError, CertificateError: a file is missing or wrong.
    """
    defaults.check(conf)
    vault = Vault.load(conf.store.encryption_key_file)
    trust = Trust(conf, database, vault)
    try:
        # What is wrong with files and keys is to be known now.
        trust.papers()
    except StoreError as error:
        LOG.warning("the authorities are not known yet: %s", error)
    return Backends(
        conf=conf,
        database=database,
        catalogue=Catalogue(conf, database),
        agents=AgentClient(conf, trust),
        authority=None,
        vault=vault,
        trust=trust,
    )


class Controller:
    """Claims leases and has them worked off, until told to stop."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.store.connection, durable=False)
        name = process_name()
        self._jobs = Jobs(self._database, name, conf.controller.lease)
        everything = backends(conf, self._database)
        self._name = name
        self._housekeeping = Housekeeping(
            conf,
            self._database,
            everything.catalogue,
            name,
            everything.vault,
            Certificates(conf, self._database, everything.trust),
        )
        self._reconciler = Reconciler(
            everything,
            self._jobs,
            lambda: notifier.tell(conf, local_socket.REPORTER),
            room := WaitingRoom(conf.agent.port, self._hasten),
        )
        self._room = room
        self._stopping = threading.Event()
        self._ended = threading.Event()
        # Jobs that have outlived their time by a lease.
        self._hung: set[Turn] = set()
        self._hands = Hands(conf.controller.threads)
        self._attendance = Attendance(self._database, name, lambda: len(self._hands.turns()))
        self._draining = self._attendance.draining
        self._auditing = Auditing(everything, name, lambda: notifier.tell(conf, local_socket.CONTROLLER))
        self._rotator = Rotator(
            conf, self._database, everything.catalogue, name, lambda: notifier.tell(conf, local_socket.CONTROLLER)
        )
        self._detector = FailureDetector(
            conf, self._database, everything.agents, name, lambda role: notifier.tell(conf, role)
        )
        self._bell = local_socket.Doorbell(conf.queue.doorbell_dir, local_socket.CONTROLLER)
        self._telemetry = Telemetry(conf, process_registry.ProcessKind.CONTROLLER, name, self._does_its_duty)
        self._looked_at = time.monotonic()

    def run(self) -> None:
        """Work until `stop`; returns when the last job has ended."""
        conf = self._conf
        waiting = threading.Thread(target=self._room.run, name="waiting")
        others = [
            threading.Thread(target=self._renew, name="renew", daemon=True),
            threading.Thread(target=self._watch, name="watch", daemon=True),
            threading.Thread(target=self._housekeeping.run, args=(self._stopping, self._draining), name="housekeeping"),
            threading.Thread(target=self._auditing.run, args=(self._stopping, self._draining), name="audit"),
            threading.Thread(target=self._rotator.run, args=(self._stopping, self._draining), name="rotation"),
            threading.Thread(target=self._detector.run, args=(self._stopping, self._draining), name="detection"),
        ]
        # Nobody waits for this one: it may stand for as long as the database does not answer.
        signing = threading.Thread(target=self._attendance.run, args=(self._stopping,), name="attendance", daemon=True)
        with Presence(f"{conf.queue.doorbell_dir}/alive", self._name) as presence:
            self._presence = presence
            for thread in (waiting, *others, signing):
                thread.start()
            with (
                self._telemetry,
                self._bell,
                ThreadPoolExecutor(self._hands.most, "work") as pool,
                notifier.taken(conf, lambda one: self._look(pool, one)),
            ):
                while not self._stopping.is_set():
                    try:
                        pause = self._dispatch(pool)
                        self._looked_at = time.monotonic()
                    except (StoreError, OSError) as error:
                        LOG.warning("the database is away, trying again: %s", error)
                        pause = conf.queue.poll_interval
                    except Exception:
                        # Without this thread nothing is taken up any more, and the process looks alive.
                        LOG.exception("looking for work failed, and goes on")
                        pause = _TROUBLE
                    self._bell.wait(pause)
            for thread in others:
                thread.join()
            self._room.stop()
            waiting.join()
            self._jobs.release_all()
            signing.join(_LAST_WORDS)
            self._attendance.leave()
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait until `run` has ended; False if it has not in that time."""
        return self._ended.wait(seconds)

    def _does_its_duty(self) -> bool:
        """Whether it has looked for work a moment ago, and the database let it."""
        return time.monotonic() - self._looked_at < _IDLE + float(self._conf.queue.poll_interval)

    def stop(self) -> None:
        """Take no new job; `run` returns when those begun have ended."""
        self._stopping.set()
        self._bell.press()

    def _look(self, pool: ThreadPoolExecutor, load_balancer_id: str | None) -> None:
        """Somebody of another host says that there is something to do; returns when the next hint may come.

        Whoever has no hand free takes no hint: others do. Only for so long that the broker does not take us for dead.
        One that is draining does nothing about it: who polls finds the work.
        """
        until = time.monotonic() + _LOOK_SECONDS
        while not self._hands.free():
            if time.monotonic() > until or self._stopping.wait(0.01):
                return
        if load_balancer_id is None:
            self._bell.press()
            return
        # It may have been told to end while this one waited for a hand.
        if self._stopping.is_set() or self._draining.is_set():
            return
        try:
            lease = self._jobs.claim(load_balancer_id)
        except (StoreError, OSError) as error:
            LOG.warning("the database is away, a hint is dropped: %s", error)
            return
        if lease is not None:
            self._begin(pool, lease)

    def _begin(self, pool: ThreadPoolExecutor, lease: Lease) -> None:
        """Have a hand work under a lease; if there are none any more, somebody else takes it up."""
        turn = self._reconciler.begin(lease)
        self._hands.take(turn)
        try:
            pool.submit(self._work, turn)
        except RuntimeError as error:
            # All hands are being laid down: whose turn stays taken would be waited for without end.
            self._hands.lay_down(turn)
            LOG.info("load balancer %s is left to others: %s", lease.load_balancer_id, error)
            try:
                self._jobs.give_way(lease)
            except (AmphoraDriverError, OSError) as trouble:
                LOG.warning("load balancer %s: could not give the lease back: %s", lease.load_balancer_id, trouble)

    def _dispatch(self, pool: ThreadPoolExecutor) -> float:
        """Claim what is due, as far as there are hands; returns after how many seconds to look again."""
        poll = float(self._conf.queue.poll_interval)
        fresh = False
        if self._draining.is_set():
            return poll
        while self._hands.free():
            fresh = self._hands.only_fresh()
            lease = self._jobs.claim(fresh=fresh)
            if lease is None:
                break
            self._begin(pool, lease)
        else:
            # Whoever lays down his work rings.
            return poll
        due = self._jobs.next_due()
        soonest = _BETWEEN_FRESH if fresh else 0.02
        return poll if due is None else min(max(due - self._database.now(), soonest), poll)

    def _work(self, turn: Turn) -> None:
        # It waits here no longer than a moment: its time begins now.
        turn.begin_step()
        try:
            self._room.forget(turn.lease.load_balancer_id)
            self._reconciler.reconcile(turn.lease, turn)
        finally:
            self._hands.lay_down(turn)
            self._bell.press()

    def _hasten(self, load_balancer_ids: Sequence[str]) -> None:
        """Agents of these listen."""
        self._jobs.hasten(load_balancer_ids)
        self._bell.press()

    def _renew(self) -> None:
        """Keep the leases of running jobs; a job outlives its lease only if this process could not run at all."""
        every = self._conf.controller.lease / 3
        pause = every
        while not self._stopping.wait(pause) or self._hands.turns():
            if self._stopping.is_set():
                time.sleep(0.05)
            pause = every
            try:
                if running := {turn.lease.load_balancer_id for turn in self._alive()}:
                    self._jobs.renew(running)
            except (StoreError, OSError) as error:
                LOG.warning("could not renew leases: %s", error)
                pause = min(_TROUBLE, every)
            except Exception:
                # Without this thread every lease runs out under whoever works.
                LOG.exception("renewing leases failed, and goes on")
                pause = min(_TROUBLE, every)

    def _alive(self) -> list[Turn]:
        """Jobs that have not hung for a whole lease after their time; the leases of those run out."""
        turns = self._hands.turns()
        hung = {turn for turn in turns if turn.deadline.left() < -self._conf.controller.lease}
        for turn in hung - self._hung:
            LOG.error("load balancer %s: a call hangs, it is left to others", turn.lease.load_balancer_id)
        self._hung = hung
        return [turn for turn in turns if turn not in hung]

    def _watch(self) -> None:
        """Have jobs end that are to give way, give hands to others where somebody waits, and free what the dead had."""
        buried_at = 0.0
        longest = max(_PAUSES * self._conf.controller.retry_most, _LEAST_PAUSE)
        while not self._stopping.wait(_WATCHED_EVERY) or self._hands.turns():
            if self._stopping.is_set():
                for turn in self._hands.turns():
                    turn.give_way("this controller ends", _LAST_WORDS)
                time.sleep(0.05)
                continue
            try:
                self._interrupt()
                if time.monotonic() - buried_at >= _BURIED_EVERY:
                    buried_at = time.monotonic()
                    self._bury()
                    if self._jobs.cut_short(longest):
                        LOG.warning("the clock was set back: what waited for it is due at once")
                        self._bell.press()
            except (StoreError, OSError) as error:
                LOG.warning("could not look whether something goes first: %s", error)
            except Exception:
                LOG.exception("looking whether something goes first failed, and goes on")

    def _interrupt(self) -> None:
        slow = [turn for turn in self._hands.turns() if time.monotonic() - turn.since >= _WATCHED_EVERY]
        if not slow:
            return
        for turn, reason in self._database.read(lambda connection: goes_first(connection, slow)).items():
            turn.give_way(reason)
        if self._hands.free():
            self._bell.press()

    def _bury(self) -> None:
        """Leases of processes of this host that died need not run out: nobody is there to write under them."""
        if buried := self._presence.bury(self._free):
            LOG.warning("dead, their load balancers are taken up: %s", ", ".join(buried))
            notifier.tell(self._conf, local_socket.CONTROLLER)

    def _free(self, name: str) -> None:
        self._jobs.release_all(name)
        self._database.write(lambda connection: process_registry.remove_dead_process(connection, name))


class ControllerService(cotyledon.Service):
    """One controller as a process of cotyledon's, restarted when it dies."""

    name = "amphora-controller"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._controller = Controller(conf)

    def run(self) -> None:
        self._controller.run()

    def terminate(self) -> None:
        self._controller.stop()
        # The process ends when this returns; what is still running then is taken up by another controller.
        if not self._controller.wait(_PATIENCE):
            LOG.warning("ending although jobs are still running: their leases run out")


def main() -> int:
    """Console entry: run controllers until told to end; 1 if the database is not one for this version."""
    conf = config.load()
    log_context.setup(conf, ControllerService.name)
    if not schema_check.is_usable(Database(conf.store.connection)):
        return 1
    manager = cotyledon.ServiceManager()
    manager.add(ControllerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
