# SPDX-License-Identifier: Apache-2.0
"""The controller process.

Invariant: a thread claims due load balancers while there are hands free, others make them as recorded. All that is
lost when the process dies is time: leases run out, and another controller, or this one started anew, finds the same
rows.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import cotyledon
from oslo_log import log

from amphora_driver import config
from amphora_driver.agent_client import AgentClient
from amphora_driver.backends import Catalogue
from amphora_driver.certificates.authority import Authority
from amphora_driver.controller import configured
from amphora_driver.controller.housekeeping import Housekeeping
from amphora_driver.controller.reconcile import Reconciler
from amphora_driver.controller.steps import Backends
from amphora_driver.errors import StoreError
from amphora_driver.queue import doorbell
from amphora_driver.queue.jobs import Jobs, Lease, process_name
from amphora_driver.store.engine import Database
from amphora_driver.store.vault import Vault

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
# Seconds an ending process waits for the jobs it has begun.
_PATIENCE = 20.0


def backends(conf: ConfigOpts, database: Database) -> Backends:
    """Everything a controller works through, as configured.

    Raises:
        ConfigurationError, CertificateError: a file is missing or wrong.
    """
    configured.check(conf)
    return Backends(
        conf=conf,
        database=database,
        catalogue=Catalogue(conf, database),
        agents=AgentClient(conf),
        authority=Authority.load(conf.certificates.ca_certificate, conf.certificates.ca_private_key),
        vault=Vault.load(conf.store.encryption_key_file),
    )


class Controller:
    """Claims leases and has them worked off, until told to stop."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.store.connection, durable=False)
        name = process_name()
        self._jobs = Jobs(self._database, name, conf.controller.lease)
        everything = backends(conf, self._database)
        self._housekeeping = Housekeeping(conf, self._database, everything.catalogue, name)
        self._reconciler = Reconciler(
            everything,
            self._jobs,
            lambda: doorbell.ring(conf.queue.doorbell_dir, doorbell.REPORTER),
        )
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._hands = threading.BoundedSemaphore(conf.controller.threads)
        # By lease, not by load balancer: the next job of one may begin before the last one has quite ended.
        self._running: set[Lease] = set()
        self._counting = threading.Lock()
        self._bell = doorbell.Doorbell(conf.queue.doorbell_dir, doorbell.CONTROLLER)

    def run(self) -> None:
        """Work until `stop`; returns when the last job has ended."""
        renewing = threading.Thread(target=self._renew, name="renew", daemon=True)
        renewing.start()
        cleaning = threading.Thread(target=self._housekeeping.run, args=(self._stopping,), name="housekeeping")
        cleaning.start()
        with self._bell, ThreadPoolExecutor(self._conf.controller.threads, "work") as pool:
            while not self._stopping.is_set():
                try:
                    pause = self._dispatch(pool)
                except StoreError as error:
                    LOG.warning("the database is away, trying again: %s", error)
                    pause = self._conf.queue.poll_interval
                self._bell.wait(pause)
        renewing.join()
        cleaning.join()
        self._jobs.release_all()
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait until `run` has ended; False if it has not in that time."""
        return self._ended.wait(seconds)

    def stop(self) -> None:
        """Take no new job; `run` returns when those begun have ended."""
        self._stopping.set()
        self._bell.press()

    def _dispatch(self, pool: ThreadPoolExecutor) -> float:
        """Claim what is due, as far as there are hands; returns after how many seconds to look again."""
        while self._hands.acquire(blocking=False):
            lease = None
            try:
                lease = self._jobs.claim()
            finally:
                if lease is None:
                    self._hands.release()
            if lease is None:
                break
            pool.submit(self._work, lease)
        due = self._jobs.next_due()
        poll = float(self._conf.queue.poll_interval)
        return poll if due is None else min(max(due - time.time(), 0.02), poll)

    def _work(self, lease: Lease) -> None:
        with self._counting:
            self._running.add(lease)
        try:
            self._reconciler.reconcile(lease)
        finally:
            with self._counting:
                self._running.discard(lease)
            self._hands.release()
            self._bell.press()

    def _renew(self) -> None:
        """Keep the leases of running jobs; a job outlives its lease only if this process could not run at all."""
        while not self._stopping.wait(self._conf.controller.lease / 3) or self._running:
            if self._stopping.is_set():
                time.sleep(0.05)
            with self._counting:
                running = {lease.load_balancer_id for lease in self._running}
            if running:
                try:
                    self._jobs.renew(running)
                except StoreError as error:
                    LOG.warning("could not renew leases: %s", error)


class ControllerService(cotyledon.Service):
    """One controller as a process of cotyledon's, restarted when it dies."""

    name = "amphora-controller"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log.setup(conf, self.name)
        self._controller = Controller(conf)

    def run(self) -> None:
        self._controller.run()

    def terminate(self) -> None:
        self._controller.stop()
        # The process ends when this returns; what is still running then is taken up by another controller.
        if not self._controller.wait(_PATIENCE):
            LOG.warning("ending although jobs are still running: their leases run out")


def main() -> int:
    """Console entry: run controllers until told to end."""
    conf = config.load()
    log.setup(conf, ControllerService.name)
    manager = cotyledon.ServiceManager()
    manager.add(ControllerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
