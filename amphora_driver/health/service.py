# SPDX-License-Identifier: Apache-2.0
"""The health manager process: receives heartbeats and writes the resulting changes to the database.

Invariant: receiving never waits for the database. One thread receives into memory, another one writes, so that a slow
or unreachable database delays statuses only. No process accepts a heartbeat again that any process has accepted: the
order of the last heartbeat is read together with the key. The process tests its own receiver (`self_test`).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Set as AbstractSet

import cotyledon
import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver import config, failpoints, log_context, metrics
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.health.amphora_reports import AmphoraReports, Order
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.receiver import Omitted, Receiver, bind_socket
from amphora_driver.health.receiver_group import GroupMember, ReceiverGroup
from amphora_driver.health.self_test import ReceiverSelfTest
from amphora_driver.health.status_writer import StatusWriter
from amphora_driver.health.unknown_amphorae import UnknownAmphorae
from amphora_driver.queue import local_socket, notifier
from amphora_driver.queue.jobs import process_name
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, orphans, process_registry
from amphora_driver.telemetry.http_server import Telemetry

LOG = logging.getLogger(__name__)

# Number of heartbeat intervals after which the health manager forgets a reported value, unless a later heartbeat
# repeats the value.
_EXPIRY_INTERVALS = 5
# Maximum seconds to wait for new heartbeats before the next flush to the database. So the health manager repeats a
# failed write soon, even without new heartbeats.
_IDLE_FLUSH_INTERVAL = 1.0
# Seconds between two checks whether a long flush delays the times of heartbeats.
_HEARTBEAT_CHECK_INTERVAL = 0.25
# Seconds to wait for the last write of reports when the health manager stops.
_STOP_TIMEOUT = 20.0
# Age in seconds of the last successful write, above which `GET /healthz` returns 503.
_MAX_FLUSH_AGE = 15.0
# Receivers of a group divide the load balancers among themselves. Each receiver reads the division from the database at
# this interval in seconds.
_DISTRIBUTION_INTERVAL = 5.0
# If the last self-test of one receiver of a group is older than this multiple of the interval, all receivers of the
# group fail their self-tests.
_GROUP_TEST_AGE = 1.75


class HealthManager:
    """Receiver, reports in memory, and writer of one health manager process.

    `member` is the part of this process in a group of receivers on one port.
    """

    def __init__(self, conf: ConfigOpts, member: GroupMember | None = None) -> None:
        self._conf = conf
        self._member = member
        self._distributed_at = 0.0
        self._database = Database(conf.amp_database.connection, durable=False)
        self._vault = Vault.load(conf.amp_database.encryption_key_file)
        self._reports = AmphoraReports(expiry=_EXPIRY_INTERVALS * conf.amp_health.interval)
        self._unknown = UnknownAmphorae()
        self._receiver = Receiver(
            conf.amp_health.bind_address,
            conf.amp_health.bind_port,
            self._read_new_keys,
            self._accept,
            on_unknown=lambda amphora_id, address: self._unknown.add(amphora_id, address, time.monotonic()),
            is_newer=self._reports.is_newer,
            accept_time=self._accept_time,
            member=member,
        )
        name = process_name()
        # Self-tests run at least five times within `silent_after`. So controllers learn of a failed self-test long
        # before they regard silent amphorae as dead.
        interval = min(process_registry.HEARTBEAT_INTERVAL, conf.amp_failover.silent_after / 5)
        max_flush_age = _IDLE_FLUSH_INTERVAL + 2 * conf.amp_health.flush_interval
        if member is not None:
            # In a group, the self-tests of all receivers must be recent, so each receiver runs its self-test twice as
            # often.
            interval /= 2
        self._group_test_age = _GROUP_TEST_AGE * interval
        self._self_test = ReceiverSelfTest(self._database, name, self._receives_probe, interval, max_flush_age)
        self._writer = StatusWriter(
            self._database,
            self._reports,
            conf.amp_health.interval,
            lambda: notifier.notify(conf, local_socket.CONTROLLER),
            self._receiver.forget,
            conf.amp_health.near_limit,
            conf.amp_health.statistics_interval,
            lambda: self._receiver.overload.omitted >= Omitted.STATISTICS,
            self._self_test.record_flush,
        )
        kind = process_registry.ProcessKind.HEALTH_MANAGER
        self._telemetry = Telemetry(
            conf,
            kind,
            name,
            lambda: time.monotonic() - self._flushed_at < _MAX_FLUSH_AGE,
            0 if member is None else member.index,
        )
        self._flushed_at = time.monotonic()
        self._updated = threading.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            self._receiver.preload(self._read_new_keys(frozenset()))
        except StoreError as error:
            LOG.warning(
                "the health manager could not read the heartbeat keys at its start and tries again at the first "
                "heartbeat: %s",
                error,
            )
        others = [
            threading.Thread(target=self._flush_until_stopped, name="status-writer"),
            threading.Thread(target=self._write_heartbeats_until_stopped, name="heartbeat-writer"),
            threading.Thread(target=self._self_test.run, args=(self._stopping,), name="self-test"),
        ]
        for thread in others:
            thread.start()
        metrics.set_heartbeat_source(self._count_heartbeats)
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
        """Make `run` end after one last flush."""
        self._stopping.set()
        self._updated.set()
        self._receiver.stop()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of `run`, and return whether it has ended."""
        return self._ended.wait(seconds)

    def _read_new_keys(self, known: AbstractSet[str]) -> dict[str, Secret]:
        def read(connection: sa.Connection) -> tuple[dict[str, Secret], dict[str, Order]]:
            keys = amphorae.read_heartbeat_keys(connection, self._vault, known)
            return keys, amphorae.last_heartbeats(connection, list(keys))

        keys, orders = self._database.read(read)
        # A health manager must refuse heartbeats that another health manager has already accepted. So the recorded
        # epochs and sequence numbers are loaded before the keys are used.
        self._reports.load_orders(orders)
        self._distribute()
        return keys

    def _distribute(self) -> None:
        """Find out which load balancers this receiver of a group processes."""
        if self._member is None:
            return

        def load_orders(amphora_ids: list[str]) -> None:
            # Another receiver may have accepted later heartbeats of these amphorae. So their last epochs and sequence
            # numbers are loaded from the database.
            orders = self._database.read(lambda connection: amphorae.last_heartbeats(connection, amphora_ids))
            self._reports.load_orders(orders)

        self._member.distribute(self._database.read(amphorae.load_balancer_ids_by_age), load_orders)
        self._distributed_at = time.monotonic()

    def _receives_probe(self, seconds: float) -> bool:
        """Return whether this process receives a probe; of a group, whether all receivers do."""
        received = self._receiver.receives_probe(seconds)
        if self._member is None:
            return received
        if received:
            self._member.record_test()
        return self._member.all_tested(self._group_test_age)

    def _count_heartbeats(self) -> metrics.HeartbeatCounts:
        receiver = self._receiver
        return metrics.HeartbeatCounts(
            accepted=receiver.accepted,
            refused=receiver.refused,
            shortened=receiver.shortened,
            lost=receiver.overload.lost + (0 if self._member is None else self._member.lost),
        )

    def _accept(self, heartbeat: Heartbeat) -> None:
        if self._reports.accept(heartbeat, time.monotonic()):
            self._announce()

    def _accept_time(self, amphora_id: str, order: Order) -> bool:
        accepted = self._reports.accept_time(amphora_id, order, time.monotonic())
        if accepted:
            self._announce()
        return accepted

    def _announce(self) -> None:
        """Wake the writer.

        The writer clears the event before it reads the reports. So an event that is set needs no second call, which
        would take a lock.
        """
        if not self._updated.is_set():
            self._updated.set()

    def _record_unknown(self) -> None:
        now = time.monotonic()
        due = self._unknown.find_due(now)
        if not due:
            return
        at = self._database.now()
        omitted = self._database.write(lambda connection: orphans.record_unknown_amphorae(connection, due, at))
        self._unknown.mark_recorded(due, now)
        if omitted:
            LOG.warning(
                "`amphoractl unknown-amphora list` omits %d unknown amphora ids from heartbeats, because the table of "
                "unknown amphorae is full, or contains too many ids from the same IP address",
                omitted,
            )

    def _flush_until_stopped(self) -> None:
        # The first flush does not wait for a heartbeat, because the first self-test needs a recent flush.
        while not self._stopping.is_set():
            self._flush()
            # During the pause, the health manager collects changed statuses, to write them together. The pause is also
            # the back-off after an error.
            self._stopping.wait(self._conf.amp_health.flush_interval)
            self._updated.wait(_IDLE_FLUSH_INTERVAL)
            self._updated.clear()

    def _write_heartbeats_until_stopped(self) -> None:
        """Write the times of heartbeats during long flushes.

        A flush with thousands of statuses may last for seconds on a busy host. Without newer times in the database, the
        amphorae would seem silent, so that the self-test would have to fail.
        """
        while not self._stopping.wait(_HEARTBEAT_CHECK_INTERVAL):
            try:
                self._writer.write_delayed_heartbeats()
            except StoreError as error:
                # The flush writes to the same database, and logs its errors as warnings.
                LOG.debug("the health manager could not write the times of heartbeats and tries again: %s", error)
            except Exception:
                # An error must not end this thread, because later long flushes would delay the times again.
                LOG.exception(
                    "the health manager could not write the times of heartbeats to the database because of an "
                    "unexpected error and tries again"
                )

    def _flush(self, *, last: bool = False) -> None:
        try:
            failpoints.reach(failpoints.Point.FLUSHING)
            with metrics.flush():
                changed = self._writer.flush(last=last)
            failpoints.reach(failpoints.Point.FLUSHED)
            self._self_test.record_flush()
            self._flushed_at = time.monotonic()
            if changed:
                notifier.notify(self._conf, local_socket.REPORTER)
            self._record_unknown()
            if time.monotonic() - self._distributed_at > _DISTRIBUTION_INTERVAL:
                self._distribute()
        except StoreError as error:
            LOG.warning(
                "the health manager could not write the reports of amphorae to the database and tries again: %s", error
            )
        except Exception:
            # An error must not end the flush thread, because all later reports would be lost.
            LOG.exception(
                "the health manager could not write the reports of amphorae to the database because of an unexpected "
                "error and tries again"
            )


class HealthManagerService(cotyledon.Service):
    """The health manager as a service. Cotyledon restarts a crashed service."""

    name = "amphora-health-manager"

    def __init__(self, worker_id: int, conf: ConfigOpts, group: ReceiverGroup | None = None) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._manager = HealthManager(conf, None if group is None else group.member(worker_id))

    def run(self) -> None:
        self._manager.run()

    def terminate(self) -> None:
        self._manager.stop()
        # Cotyledon ends the process when `terminate` returns. So `terminate` waits for the last write.
        if not self._manager.wait(_STOP_TIMEOUT):
            LOG.warning(
                "the health manager exits before writing all reports, because the last write takes longer than %d s; "
                "later heartbeats contain the lost values again",
                _STOP_TIMEOUT,
            )


def main() -> int:
    """Run the health manager until a signal. Return 1 if the database schema does not fit this version."""
    conf = config.load()
    log_context.setup(conf, HealthManagerService.name)
    if not schema_check.is_usable(Database(conf.amp_database.connection)):
        return 1
    options, group = conf.amp_health, None
    if options.receivers > 1:
        group = ReceiverGroup(bind_socket, options.bind_address, options.bind_port, options.receivers)
    manager = cotyledon.ServiceManager()
    manager.add(HealthManagerService, workers=options.receivers, args=(conf, group))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
