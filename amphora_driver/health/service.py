# SPDX-License-Identifier: Apache-2.0
"""The health manager process: hears heartbeats, and writes down what they change.

Invariant: hearing never waits for the database. One thread receives and remembers, another writes down, so that a
slow or absent database costs nothing but freshness. A heartbeat that was taken once is not taken again, by whatever
process: the place of the last one is read before the first one is checked. That it hears it proves itself (`hearing`).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

import cotyledon

from amphora_driver import config, failpoints, log_context, metrics
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.health.amphora_reports import Ledger
from amphora_driver.health.receiver import Receiver
from amphora_driver.health.self_test import Hearing
from amphora_driver.health.status_writer import Bookkeeper
from amphora_driver.health.unknown_amphorae import Strays
from amphora_driver.queue import local_socket, notifier
from amphora_driver.queue.jobs import process_name
from amphora_driver.store import amphorae, process_registry, unknown_amphorae
from amphora_driver.telemetry.http_server import Telemetry

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.health.amphora_reports import Order
    from amphora_driver.health.heartbeat_codec import Heartbeat
    from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

# What was not repeated for so many intervals is no longer believed.
_BELIEVED_FOR = 5
# Seconds after which the bookkeeper has a look although nobody was heard: something may wait to be tried again.
_LOOK_EVERY = 1.0
# Seconds an ending process waits for the database.
_PATIENCE = 20.0
# Seconds without writing anything down after which this process is said not to do its duty.
_IDLE = 15.0


class HealthManager:
    """Receiver, ledger and bookkeeper of one process."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._database = Database(conf.store.connection, durable=False)
        self._vault = Vault.load(conf.store.encryption_key_file)
        self._ledger = Ledger(expiry=_BELIEVED_FOR * conf.health.interval)
        name = process_name()
        self._strays = Strays()
        self._receiver = Receiver(
            conf.health.bind_address,
            conf.health.bind_port,
            self._new_keys,
            self._heard,
            on_unknown=self._heard_stray,
            is_newer=self._ledger.is_newer,
        )
        self._bookkeeper = Bookkeeper(
            self._database,
            self._ledger,
            conf.health.interval,
            lambda: notifier.notify(conf, local_socket.CONTROLLER),
            self._receiver.forget,
        )
        # Often enough that a pause is seen long before anybody is silent.
        every = min(process_registry.HEARTBEAT_INTERVAL, conf.failover.silent_after / 5)
        patience = _LOOK_EVERY + 2 * conf.health.flush_interval
        self._hearing = Hearing(self._database, name, self._receiver.hears, every, patience)
        self._telemetry = Telemetry(conf, process_registry.ProcessKind.HEALTH_MANAGER, name, self._does_its_duty)
        self._written_at = time.monotonic()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        """Receive until `stop`."""
        try:
            self._receiver.preload(self._new_keys(frozenset()))
        except StoreError as error:
            LOG.warning("Could not read the heartbeat keys. They are read after the first heartbeat: %s", error)
        others = [
            threading.Thread(target=self._write, name="bookkeeper"),
            threading.Thread(target=self._hearing.run, args=(self._stopping,), name="hearing"),
        ]
        for thread in others:
            thread.start()
        metrics.set_heartbeat_source(lambda: (self._receiver.accepted, self._receiver.refused))
        try:
            with self._telemetry:
                self._receiver.run()
        finally:
            metrics.set_heartbeat_source(None)
            self.stop()
            for thread in others:
                thread.join()
            self._flush(last=True)
            self._ended.set()

    def stop(self) -> None:
        """Make `run` end, after one more try to write down what was heard."""
        self._stopping.set()
        self._news.set()
        self._receiver.stop()

    def wait(self, seconds: float) -> bool:
        """Wait until `run` has ended; False if it has not in that time."""
        return self._ended.wait(seconds)

    def _does_its_duty(self) -> bool:
        """Whether what was heard was written down a moment ago."""
        return time.monotonic() - self._written_at < _IDLE

    def _new_keys(self, known: AbstractSet[str]) -> dict[str, Secret]:
        def read(connection: sa.Connection) -> tuple[dict[str, Secret], dict[str, Order]]:
            keys = amphorae.read_heartbeat_keys(connection, self._vault, known)
            return keys, amphorae.last_heartbeats(connection, list(keys))

        keys, orders = self._database.read(read)
        # Before a key is used: a replay of what another process took is refused.
        self._ledger.resume(orders)
        return keys

    def _heard(self, heartbeat: Heartbeat) -> None:
        if self._ledger.accept(heartbeat, time.monotonic()):
            self._news.set()

    def _heard_stray(self, amphora_id: str, address: str) -> None:
        self._strays.hear(amphora_id, address, time.monotonic())

    def _note_strays(self) -> None:
        now = time.monotonic()
        due = self._strays.due(now)
        if not due:
            return
        at = self._database.now()
        left_out = self._database.write(
            lambda connection: unknown_amphorae.record_unknown_amphorae(connection, due, at)
        )
        self._strays.told(due, now)
        if left_out:
            LOG.warning("%d more amphorae that nobody knows are heard than there is room for", left_out)

    def _write(self) -> None:
        while not self._stopping.is_set():
            self._news.wait(_LOOK_EVERY)
            self._news.clear()
            self._flush()
            # Changes that come close together are written together.
            self._stopping.wait(self._conf.health.flush_interval)

    def _flush(self, *, last: bool = False) -> None:
        try:
            failpoints.reach(failpoints.Point.FLUSHING)
            with metrics.flush():
                news = self._bookkeeper.flush(last=last)
            failpoints.reach(failpoints.Point.FLUSHED)
            self._hearing.written()
            self._written_at = time.monotonic()
            if news:
                notifier.notify(self._conf, local_socket.REPORTER)
            self._note_strays()
        except StoreError as error:
            LOG.warning("could not write down what amphorae say, trying again: %s", error)
        except Exception:
            # Without this thread nothing would be written down any more, and nobody would notice.
            LOG.exception("what amphorae say could not be written down, trying again")


class HealthManagerService(cotyledon.Service):
    """The health manager as a process of cotyledon's, restarted when it dies."""

    name = "amphora-health-manager"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._manager = HealthManager(conf)

    def run(self) -> None:
        self._manager.run()

    def terminate(self) -> None:
        self._manager.stop()
        # The process ends when this returns.
        if not self._manager.wait(_PATIENCE):
            LOG.warning("ending although not everything that was heard is written down")


def main() -> int:
    """Console entry: hear heartbeats until told to end; 1 if the database is not one for this version."""
    conf = config.load()
    log_context.setup(conf, HealthManagerService.name)
    if not schema_check.is_usable(Database(conf.store.connection)):
        return 1
    manager = cotyledon.ServiceManager()
    manager.add(HealthManagerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
