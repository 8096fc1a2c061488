# SPDX-License-Identifier: Apache-2.0
"""The process `amphora-cluster`: claims due groups and works on them in a worker pool.

Invariant: one thread claims groups and returns the leases of passes without a change, several in one transaction. A
pass that waits for a cloud blocks one worker thread only. Passes over groups whose last pass failed use at most half of
the threads, so groups with an unreachable cloud never delay the others. A crash of the process loses only time: another
controller of the host notices it, or the leases expire.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import cotyledon
import msgspec
from oslo_config.cfg import ConfigOpts

from amphora_cluster import config
from amphora_cluster.cloud import options
from amphora_cluster.cloud.notifications import NovaNotifications
from amphora_cluster.controller.clouds import Clouds, CloudsOfOwners
from amphora_cluster.controller.elapsed import ElapsedTimes, PurgeClock
from amphora_cluster.controller.group_pass import GroupPass, PassSettings
from amphora_cluster.controller.status_page import StatusPage
from amphora_cluster.database.claims import Claim, Claims, PassEnd
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.database.passes import ClaimedGroup, PassStore
from amphora_cluster.database.processes import HEARTBEAT_INTERVAL, ControllerRegistration
from amphora_cluster.database.requests import RequestStore
from amphora_cluster.database.tables import SCHEMA
from amphora_driver import log_context
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.deadline import Deadline, apply_deadline
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.queue.jobs import process_name
from amphora_driver.queue.process_locks import ProcessLock

LOG = logging.getLogger(__name__)
# Seconds between two searches for due groups. A longer time puts more groups into one transaction.
_TICK = 0.25
# Seconds between two searches for dead controllers on the same host.
_REAP_EVERY = 1.0
# Seconds between two deletions of old requests, events and nonces.
_PURGE_EVERY = 60.0
# Seconds until a forward jump of the database clock counts for deletions. An early deletion of nonces would permit
# repeated signed requests.
_PURGE_DELAY = 900.0
# A stopping controller shortens the deadlines of its running passes to _STOP_GRACE seconds. The process waits for these
# passes for at most _STOP_TIMEOUT seconds.
_STOP_TIMEOUT, _STOP_GRACE = 20.0, 3.0
# Pause in seconds after an error of the database.
_ERROR_BACKOFF = 1.0
# The controller reports itself as unhealthy after this number of seconds without a successful search.
_UNHEALTHY_AFTER = 15.0
# A due time further ahead than this multiple of the longest pause shows that the database clock was set back.
_PAUSE_FACTOR = 2


class _Running:
    """A pass in a worker thread."""

    def __init__(self, claimed: ClaimedGroup, seconds: float) -> None:
        self.claimed = claimed
        self.deadline = Deadline(seconds, f"work on group {claimed.group.id}")


class Controller:
    """Claims groups and works on them until `stop`.

    Args:
        conf: the options.
        clouds: returns the cloud of a group's owner; None for the one of the options.
    """

    def __init__(self, conf: ConfigOpts, clouds: CloudsOfOwners | None = None) -> None:
        own = conf.amp_cluster
        self._conf = conf
        # After a crash, the controller repeats a pass whose commit was lost. So its commits need not be durable.
        self._database = Database(own.connection, durable=False, schema=SCHEMA)
        self._name = process_name()
        self._claims = Claims(self._database, self._name, own.lease)
        self._registration = ControllerRegistration(self._database, self._name)
        self._passes = PassStore(self._database)
        self._groups = GroupStore(self._database, config.load_vault(conf))
        self._requests = RequestStore(self._database)
        settings = PassSettings(
            poll_interval=own.poll_interval,
            retry_first=own.retry_first,
            retry_most=own.retry_most,
            statistics_age=own.statistics_age,
        )
        self._clouds = clouds or Clouds(options.settings(conf))
        elapsed = ElapsedTimes(self._database.seconds_since_clock_jump)
        self._group_pass = GroupPass(
            self._passes, self._database.now, self._groups.open_credential, self._clouds.get, settings, elapsed
        )
        self._purge_clock = PurgeClock(self._database.now, _PURGE_DELAY)
        self._lock = threading.Lock()
        self._running: set[_Running] = set()
        self._ends: list[PassEnd] = []
        self._stopping, self._wakeup = threading.Event(), threading.Event()
        self._idle, self._ended = threading.Event(), threading.Event()
        self._searched_at = time.monotonic()
        self._status = StatusPage(conf, self._database, self._is_healthy)
        self._notifications = (
            NovaNotifications(own.notification_url, self._on_servers, topic=own.notification_topic)
            if own.notification_url
            else None
        )

    def run(self) -> None:
        """Work until `stop`; then return after the end of the running passes."""
        threads = [
            threading.Thread(target=self._repeat, args=words, name=words[0], daemon=True)
            for words in (
                ("renew the leases", self._conf.amp_cluster.lease / 3, self._renew),
                ("write its heartbeat", HEARTBEAT_INTERVAL, self._registration.heartbeat, 0.0),
                ("release the leases of dead controllers", _REAP_EVERY, self._reap),
                # The first purge runs early, because its clock must measure the database clock before any jump.
                ("delete old records", _PURGE_EVERY, self._purge, _ERROR_BACKOFF),
            )
        ]
        with ProcessLock(self._conf.amp_cluster.lock_dir, self._name) as self._process_lock, self._status:
            for thread in threads:
                thread.start()
            if self._notifications is not None:
                self._notifications.start()
            with ThreadPoolExecutor(self._conf.amp_cluster.threads, "pass") as pool:
                while not self._stopping.is_set():
                    self._wakeup.wait(self._search_or_back_off(pool))
                    self._wakeup.clear()
                for one in self._passes_now():
                    one.deadline.bring_forward("this controller stops", _STOP_GRACE)
            if self._notifications is not None:
                self._notifications.stop(_STOP_GRACE)
            self._idle.set()
            for thread in threads:
                # The thread may wait for a database that does not answer, so the join has a time-out.
                thread.join(_STOP_GRACE)
            self._end()
        self._database.dispose()
        self._ended.set()

    def stop(self) -> None:
        """Start no new pass."""
        self._stopping.set()
        self._wakeup.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of `run`; return whether it has ended."""
        return self._ended.wait(seconds)

    def _search_or_back_off(self, pool: ThreadPoolExecutor) -> float:
        """Return leases and start passes; return the seconds until the next search."""
        try:
            self._return_leases()
            self._start_passes(pool)
            self._searched_at = time.monotonic()
        except (StoreError, OSError) as error:
            LOG.warning(
                "the controller cannot claim the groups that are due, and tries again in %g s: %s",
                _ERROR_BACKOFF,
                error,
            )
            return _ERROR_BACKOFF
        except Exception:
            # Without its main thread, the process would run and never claim a group. So no error may end the thread.
            LOG.exception(
                "because of an unexpected error, the controller cannot claim the groups that are due, and tries "
                "again in %g s",
                _ERROR_BACKOFF,
            )
            return _ERROR_BACKOFF
        return _TICK

    def _return_leases(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        try:
            self._claims.end_passes(ends)
        except BaseException:
            with self._lock:
                self._ends = [*ends, *self._ends]
            raise

    def _start_passes(self, pool: ThreadPoolExecutor) -> None:
        running = self._passes_now()
        free = self._conf.amp_cluster.threads - len(running)
        if free <= 0:
            return
        retrying = sum(one.claimed.claim.attempts > 0 for one in running)
        claims: tuple[Claim, ...] = ()
        try:
            claims = self._claims.claim(free, fresh=True)
            more = min(free - len(claims), max(self._conf.amp_cluster.threads // 2, 1) - retrying)
            if more > 0:
                claims += self._claims.claim(more)
            loaded = self._load(claims)
        except BaseException:
            # The controller cannot read the claimed groups. It returns their leases at once, so any controller can
            # claim the groups.
            now = self._database.now()
            self._keep_ends([PassEnd(claim=one, due_at=now, attempts=one.attempts) for one in claims])
            raise
        for claimed in loaded:
            one = _Running(claimed, self._conf.amp_cluster.pass_timeout)
            with self._lock:
                self._running.add(one)
            pool.submit(self._run_pass, one)

    def _load(self, claims: tuple[Claim, ...]) -> tuple[ClaimedGroup, ...]:
        """Read the groups of these leases. A group with an unreadable record gets an error."""
        try:
            return self._passes.load(claims)
        except msgspec.DecodeError:
            LOG.warning(
                "the controller cannot read the records of %d groups together, and reads the groups one by one",
                len(claims),
            )
        loaded: tuple[ClaimedGroup, ...] = ()
        for claim in claims:
            try:
                loaded += self._passes.load([claim])
            except msgspec.DecodeError as error:
                text = f"A record of the group is not valid, or is one of a newer version: {error}"
                unread = (
                    "group %s: the controller cannot use the group's record in the database, and tries again later: %s"
                )
                LOG.error(unread, claim.group_id, error)  # noqa: TRY400 - the traceback has no more information
                due_at, attempts = self._database.now() + self._conf.amp_cluster.retry_most, claim.attempts + 1
                self._keep_ends([PassEnd(claim=claim, due_at=due_at, error=text, attempts=attempts)])
        return loaded

    def _end(self) -> None:
        """Return all leases of this process, and delete its row."""
        try:
            self._return_leases()
            self._claims.release_all()
            self._registration.deregister()
        except (StoreError, OSError) as error:
            LOG.warning(
                "the stopping controller could not return its leases; other controllers continue the groups after "
                "the leases expire: %s",
                error,
            )

    def _run_pass(self, one: _Running) -> None:
        end: PassEnd | None = None
        try:
            with apply_deadline(one.deadline), log_context.about(load_balancer=one.claimed.group.load_balancer_id):
                end = self._group_pass.run(one.claimed)
        finally:
            with self._lock:
                full = len(self._running) >= self._conf.amp_cluster.threads
                self._running.discard(one)
                self._ends += [end] if end is not None else []
            if full:
                # While all threads were in use, other due groups may have waited. The free thread can take one of these
                # groups.
                self._wakeup.set()

    def _repeat(self, task: str, every: float, work: Callable[[], None], first: float | None = None) -> None:
        """Call `work` every few seconds until the last pass has ended; errors are only logged.

        `first` is the pause before the first call, by default that between two calls.
        """
        pause = every if first is None else first
        while not self._idle.wait(pause):
            pause = every
            try:
                work()
            except (AmphoraDriverError, OSError) as error:
                pause = min(_ERROR_BACKOFF, every)
                LOG.warning("the controller could not %s and tries again in %g s: %s", task, pause, error)
            except Exception:
                # No error may end the thread of a repeated task. Otherwise, leases would expire without a renewal, for
                # example.
                LOG.exception("the controller could not %s because of an unexpected error, and tries again later", task)

    def _renew(self) -> None:
        """Renew the leases of running passes, except those that have exceeded their deadline by a lease."""
        lease = self._conf.amp_cluster.lease
        with self._lock:
            waiting = [end.claim for end in self._ends]
        alive = [one.claimed.claim for one in self._passes_now() if one.deadline.left() > -lease]
        self._claims.renew([*alive, *waiting])

    def _reap(self) -> None:
        reaped = self._process_lock.reap_dead(self._claims.release_all)
        if reaped:
            LOG.warning(
                "the controller released the leases of dead controllers on this host, so their groups are due now: %s",
                ", ".join(reaped),
            )
            self._wakeup.set()
        own = self._conf.amp_cluster
        if self._claims.clamp_due_times(_PAUSE_FACTOR * max(own.poll_interval, own.retry_most)):
            LOG.warning(
                "the database clock was set back, so the controller corrects the due times and leases of groups "
                "that are too far in the future"
            )

    def _purge(self) -> None:
        self._registration.purge()
        self._requests.purge(self._conf.amp_cluster.request_retention, self._purge_clock.now())

    def _on_servers(self, changed: Mapping[str, str]) -> None:
        """Make the groups of changed servers and of their projects due: a new server is in no group."""
        self._clouds.servers_changed(set(changed.values()))
        number = self._groups.make_due(server_ids=changed.keys(), project_ids=set(changed.values()))
        LOG.debug(
            "the controller received Nova's notifications about %d servers, and will check %d groups now",
            len(changed),
            number,
        )

    def _passes_now(self) -> list[_Running]:
        with self._lock:
            return list(self._running)

    def _keep_ends(self, ends: list[PassEnd]) -> None:
        with self._lock:
            self._ends += ends

    def _is_healthy(self) -> bool:
        return time.monotonic() - self._searched_at < _UNHEALTHY_AFTER


class ControllerService(cotyledon.Service):
    """One controller as a process of cotyledon, which restarts the process after a crash."""

    name = "amphora-cluster"

    def __init__(self, worker_id: int, conf: ConfigOpts) -> None:
        super().__init__(worker_id)
        log_context.setup(conf, self.name)
        self._controller = Controller(conf)

    def run(self) -> None:
        self._controller.run()

    def terminate(self) -> None:
        self._controller.stop()
        if not self._controller.wait(_STOP_TIMEOUT):
            LOG.warning(
                "the controller stops before it has finished its work on some groups; other controllers "
                "continue with these groups after the leases expire"
            )


def main() -> int:
    """Run the controller until a signal; return 1 if the database or an option is not usable."""
    conf = config.load()
    log_context.setup(conf, ControllerService.name)
    if not schema_check.is_usable(Database(conf.amp_cluster.connection, schema=SCHEMA)):
        return 1
    try:
        config.load_vault(conf)
        options.settings(conf)
    except AmphoraDriverError as error:
        LOG.critical("the controller does not start, because an option is not usable: %s", error)
        return 1
    manager = cotyledon.ServiceManager()
    manager.add(ControllerService, workers=1, args=(conf,))
    manager.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
