# SPDX-License-Identifier: Apache-2.0
"""Sends the notifications of the outbox to the message bus of OpenStack.

Invariant: one controller at a time holds the duty `notifications`. A message bus that does not answer delays only the
thread of this duty: no job, no report to Octavia, no other duty. Notifications wait in the database meanwhile, and the
sender drops and counts those that wait longer than [amp_notifications] max_age.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from oslo_config.cfg import ConfigOpts

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.errors import ConfigurationError
from amphora_driver.maintenance.duty_loop import run_duty
from amphora_driver.maintenance.notification_purge import purge_notifications
from amphora_driver.notifications import outbox
from amphora_driver.notifications.envelope import build_message
from amphora_driver.queue.jobs import acquire_duty, release_duty

LOG = logging.getLogger(__name__)
_DUTY, _DUTY_SECONDS = "notifications", 30.0
# Seconds between two attempts of a controller to acquire the duty of sending notifications.
_ACQUIRE_INTERVAL = 5.0
# Maximum number of notifications that are sent before the results are written to the database. After a crash, at most
# this number is sent again.
_MOST_AT_ONCE = 50
# Seconds after which the sender stops a batch and writes the results, so that its lease does not expire during the
# batch.
_BATCH_SECONDS = 5.0
# Shortest and longest pause in seconds after an error of the message bus. Each error doubles the pause.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 60.0
# Seconds between two searches for notifications that are too old.
_PURGE_INTERVAL = 60.0


class MessageBus(Protocol):
    """The part of `notifications.publisher.Publisher` that the sender uses."""

    def publish(self, message: Mapping[str, str]) -> None: ...
    def close(self) -> None: ...
    def discard(self) -> None: ...


class NotificationSender:
    """The thread of a controller that sends notifications while the controller holds the duty."""

    def __init__(self, conf: ConfigOpts, database: Database, owner: str, bus: MessageBus) -> None:
        self._conf = conf
        self._database = database
        self._owner = owner
        self._bus = bus
        self._stopping = self._draining = threading.Event()
        self._held_until = self._acquire_at = self._retry_at = self._purge_at = 0.0
        self._backoff = _FIRST_BACKOFF

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Send due notifications until `stopping` is set, and none while `draining` is set."""
        self._stopping, self._draining = stopping, draining
        every = float(self._conf.amp_queue.poll_interval)
        run_duty(_DUTY, every, stopping, draining, work=self.send_due, release=self.release)

    def release(self) -> None:
        """Close the connection and release the duty."""
        self._bus.discard()
        if self._held_until:
            self._held_until = 0.0
            release_duty(self._database, _DUTY, self._owner)

    def send_due(self) -> None:
        """Send all due notifications if this controller holds the duty and no back-off runs."""
        if not self._hold_duty():
            return
        if time.monotonic() >= self._purge_at:
            purge_notifications(self._database, float(self._conf.amp_notifications.max_age))
            self._purge_at = time.monotonic() + _PURGE_INTERVAL
        while time.monotonic() >= self._retry_at and self._hold_duty() and not self._ends():
            found = self._database.read(lambda connection: outbox.list_due(connection, _MOST_AT_ONCE))
            if not found:
                self._bus.close()
                return
            self._send(found)

    def _ends(self) -> bool:
        return self._stopping.is_set() or self._draining.is_set()

    def _hold_duty(self) -> bool:
        """Acquire or renew the duty if needed, and return whether this controller holds it."""
        now = time.monotonic()
        if now < self._held_until:
            return True
        if now < self._acquire_at:
            return False
        self._acquire_at = now + _ACQUIRE_INTERVAL
        held = acquire_duty(self._database, _DUTY, self._owner, _DUTY_SECONDS)
        self._held_until = now + _DUTY_SECONDS / 2 if held else 0.0
        return held

    def _send(self, found: Sequence[outbox.Notification]) -> None:
        sent: list[int] = []
        until = time.monotonic() + _BATCH_SECONDS
        try:
            for one in found:
                self._bus.publish(build_message(one, self._conf.amp_notifications.publisher_id))
                sent.append(one.id)
                if time.monotonic() > until or self._ends():
                    break
        except Exception as error:  # noqa: BLE001 - library, broker and network errors have no common base
            self._back_off(error)
        else:
            self._backoff = _FIRST_BACKOFF
        if sent:
            self._database.write(lambda connection: outbox.delete(connection, sent))
            metrics.count_notifications("sent", len(sent))

    def _back_off(self, error: Exception) -> None:
        metrics.count_notifications("failed")
        self._bus.discard()
        self._retry_at = time.monotonic() + self._backoff
        # The text of the error may contain the password of the message bus, so the log has the type only.
        LOG.warning(
            "the message bus did not accept a notification (error: %s); the controller tries again in %g s",
            type(error).__name__,
            self._backoff,
        )
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF)


def create_duties(
    conf: ConfigOpts, database: Database, owner: str
) -> dict[str, Callable[[threading.Event, threading.Event], None]]:
    """Return the duty of the sender by its name; nothing while notifications are off.

    Raises:
        ConfigurationError: the URL is missing, or kombu is not installed.
    """
    options = conf.amp_notifications
    if not options.enabled:
        return {}
    attempt = "send notifications ([amp_notifications] enabled)"
    if not options.url:
        raise ConfigurationError(attempt, "[amp_notifications] url is not set", "Set the URL of the message bus.")
    try:
        # The import is inside the function, because only deployments with a message bus have kombu.
        from amphora_driver.notifications.publisher import Publisher  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(attempt, str(error), "Install octavia-amphora-driver[distributed].") from error
    bus = Publisher(
        options.url,
        options.exchange,
        options.topics,
        durable=options.durable_queues,
        quorum=options.quorum_queues,
        ca_certificate=options.ca_certificate,
    )
    return {_DUTY: NotificationSender(conf, database, owner, bus).run}
