# SPDX-License-Identifier: Apache-2.0
"""Hints from Nova's versioned notifications on RabbitMQ.

Invariant: a notification is a hint only. It makes groups due earlier and carries no state into them. A lost, late,
repeated or forged notification changes the time of the next pass only.

Each process has a queue of its own, which RabbitMQ deletes with the connection. No message therefore collects while a
process does not run, and Nova's other consumers lose none. The exchange belongs to Nova; this module never creates it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)
# Priorities of Nova's notifications.
_PRIORITIES = ("info", "error")
_CONNECT_SECONDS = 3.0
_HEARTBEAT_SECONDS = 10
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 60.0
# Seconds for which notifications are collected before one search for due groups. Nova sends several notifications of
# one server in a burst.
_COLLECT_SECONDS = 0.5
_MOST_COLLECTED = 1000


class NovaNotifications:
    """A thread that passes on which servers changed, and connects again after an error.

    Args:
        url: URL of Nova's broker, as kombu reads it; several are separated by semicolons.
        on_servers: called with the changed servers and their projects, by server id. Its exceptions are logged.
        exchange: Nova's exchange (`control_exchange`).
        topic: Nova's topic (`versioned_notifications_topics`).
    """

    def __init__(
        self,
        url: str,
        on_servers: Callable[[Mapping[str, str]], None],
        *,
        exchange: str = "nova",
        topic: str = "versioned_notifications",
    ) -> None:
        self._url = url
        self._on_servers = on_servers
        self._exchange = exchange
        self._topic = topic
        self._ending = threading.Event()
        self._collected: dict[str, str] = {}
        self._backoff = _FIRST_BACKOFF
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop the thread, and wait for this time at most."""
        self._ending.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._consume()
            except Exception as error:  # noqa: BLE001 - library, broker and network errors have no common base
                if self._ending.is_set():
                    return
                # The log contains only the type of the error, because its text may contain the broker's password.
                text = (
                    "the receiver of Nova's notifications lost its connection to the message bus (error: %s) and "
                    "connects again in %g s. Until then, the controller finds changes of servers only at its polls"
                )
                LOG.warning(text, type(error).__name__, self._backoff)
            self._ending.wait(self._backoff)
            self._backoff = min(self._backoff * 2, _LONGEST_BACKOFF)

    def _consume(self) -> None:
        import kombu  # noqa: PLC0415 - an optional package of the extra [distributed]

        connection = kombu.Connection(self._url, connect_timeout=_CONNECT_SECONDS, heartbeat=_HEARTBEAT_SECONDS)
        exchange = kombu.Exchange(self._exchange, type="topic", passive=True)
        queue = kombu.Queue(
            exclusive=True,
            durable=False,
            auto_delete=True,
            bindings=[kombu.binding(exchange, routing_key=f"{self._topic}.{one}") for one in _PRIORITIES],
        )
        try:
            with connection.Consumer(queue, callbacks=[self._receive], no_ack=True, accept=["json"]):
                self._backoff = _FIRST_BACKOFF
                # Notifications from the time without a connection may be lost. This is harmless, because the next poll
                # of each group finds the changes.
                while not self._ending.is_set():
                    self._drain(connection)
        finally:
            connection.collect()

    def _drain(self, connection: Any) -> None:
        """Receive for a short time, then pass on the changed servers."""
        end = time.monotonic() + _COLLECT_SECONDS
        try:
            while len(self._collected) < _MOST_COLLECTED and (left := end - time.monotonic()) > 0:
                connection.drain_events(timeout=left)
        except TimeoutError:
            pass
        connection.heartbeat_check()
        if not self._collected:
            return
        collected, self._collected = self._collected, {}
        try:
            self._on_servers(collected)
        except Exception:
            LOG.exception(
                "the controller could not process %d notifications of Nova, and finds the changes of the servers at "
                "the next poll",
                len(collected),
            )

    def _receive(self, body: Any, _message: Any) -> None:
        changed = read_notification(body)
        if changed is not None:
            self._collected[changed[0]] = changed[1]


def read_notification(body: Any) -> tuple[str, str] | None:
    """Return server and project of a notification; None if it names no server.

    Args:
        body: the message, as JSON or decoded. oslo.messaging 2.0 wraps the notification as text in `oslo.message`.
    """
    try:
        found = _decoded(body)
        if "oslo.message" in found:
            found = _decoded(found["oslo.message"])
        if not str(found["event_type"]).startswith("instance."):
            return None
        data = found["payload"]["nova_object.data"]
        server, project = str(data["uuid"]), str(data["tenant_id"])
    except (ValueError, KeyError, TypeError):
        return None
    return printable(server, 64), printable(project, 64)


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value
