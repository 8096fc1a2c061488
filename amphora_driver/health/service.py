# SPDX-License-Identifier: Apache-2.0
"""The health manager process: hears heartbeats, and writes down what they change.

Invariant: hearing never waits for the database. One thread receives and remembers, another writes down, so that a
slow or absent database costs nothing but freshness.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

import cotyledon
from oslo_log import log

from amphora_driver import config
from amphora_driver.errors import StoreError
from amphora_driver.health.bookkeeper import Bookkeeper
from amphora_driver.health.ledger import Ledger
from amphora_driver.health.receiver import Receiver
from amphora_driver.queue import doorbell
from amphora_driver.store import amphorae
from amphora_driver.store.engine import Database
from amphora_driver.store.vault import Vault

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.health.heartbeat import Heartbeat
    from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

# What was not repeated for so many intervals is no longer believed.
_BELIEVED_FOR = 5


class HealthManager:
    """Receiver, ledger and bookkeeper of one process."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.store.connection, durable=False)
        self._vault = Vault.load(conf.store.encryption_key_file)
        self._ledger = Ledger(expiry=_BELIEVED_FOR * conf.health.interval)
        self._bookkeeper = Bookkeeper(self._database, self._ledger)
        self._receiver = Receiver(conf.health.bind_address, conf.health.bind_port, self._key, self._heard)
        self._news = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Receive until `stop`."""
        try:
            self._receiver.preload(
                self._database.read(lambda connection: amphorae.heartbeat_keys(connection, self._vault))
            )
        except StoreError as error:
            LOG.warning("starting without keys, each is looked up when its amphora speaks: %s", error)
        writing = threading.Thread(target=self._write, name="bookkeeper")
        writing.start()
        try:
            self._receiver.run()
        finally:
            self.stop()
            writing.join()

    def stop(self) -> None:
        """End; what was heard and not written yet is said again to the next one."""
        self._stopping.set()
        self._news.set()
        self._receiver.stop()

    def _key(self, amphora_id: str) -> Secret | None:
        return self._database.read(lambda connection: amphorae.heartbeat_key(connection, self._vault, amphora_id))

    def _heard(self, heartbeat: Heartbeat) -> None:
        if self._ledger.accept(heartbeat, time.monotonic()):
            self._news.set()

    def _write(self) -> None:
        while not self._stopping.is_set():
            self._news.wait()
            self._news.clear()
            try:
                if self._bookkeeper.flush():
                    doorbell.ring(self._conf.queue.doorbell_dir, doorbell.REPORTER)
            except StoreError as error:
                LOG.warning("could not write down what amphorae say, trying again: %s", error)
            # Changes that come close together are written together.
            self._stopping.wait(self._conf.health.flush_interval)


class HealthManagerService(cotyledon.Service):
    """The health manager as a process of cotyledon's, restarted when it dies."""

    name = "amphora-health-manager"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log.setup(conf, self.name)
        self._manager = HealthManager(conf)

    def run(self) -> None:
        self._manager.run()

    def terminate(self) -> None:
        self._manager.stop()


def main() -> int:
    """Console entry: hear heartbeats until told to end."""
    conf = config.load()
    log.setup(conf, HealthManagerService.name)
    manager = cotyledon.ServiceManager()
    manager.add(HealthManagerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
