# SPDX-License-Identifier: Apache-2.0
"""Consumers of hints from other hosts.

Invariant: each consumer has its own thread, and no other thread depends on it. While the broker is not available, hangs
or has lost its queues, the thread retries, and processes find the work when they poll the rows.

A controller runs a Celery worker in its own process, with Celery's solo pool. The worker's thread consumes one hint at
a time and passes it to the controller's worker pool. A hint is consumed only when a worker slot is free, so that hints
go to controllers with free slots. Acknowledgements come from the thread that owns the connection. A slow load balancer
delays no hint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import kombu
from celery.worker import state
from celery.worker.consumer import Consumer

from amphora_driver.queue import rabbitmq

LOG = logging.getLogger(__name__)
# Celery loggers that write two lines for each hint; the job's own lines are enough.
_VERBOSE_LOGGERS = ("celery.worker.strategy", "celery.app.trace")
# Seconds between two checks of the stop flag.
_CHECK_EVERY = 0.5
# Seconds before a failed connection or a failed worker is started again.
_RETRY_AFTER = 2.0


class HintConsumer(Consumer):
    """Celery's consumer without the parts that hints do not need: 28 delay queues, remote control, gossip."""

    class Blueprint(Consumer.Blueprint):
        """Start-up steps, in order."""

        default_steps = (
            "celery.worker.consumer.connection:Connection",
            "celery.worker.consumer.events:Events",
            "celery.worker.consumer.tasks:Tasks",
            "celery.worker.consumer.consumer:Evloop",
        )

    _tick: Any = None

    def register_with_event_loop(self, hub: Any) -> None:
        """Add a timer to the event loop, which otherwise does not check the stop flag while it is idle."""
        super().register_with_event_loop(hub)
        if self._tick is not None:
            self._tick.cancel()
        self._tick = hub.timer.call_repeatedly(_CHECK_EVERY, lambda: None)


class ControllerConsumer:
    """Consumes hints to controllers.

    Args:
        url: of the broker.
        on_hint: called for each hint, one at a time, with a load balancer or None. The next hint is consumed after it
            returns.
    """

    def __init__(self, url: str, on_hint: Callable[[str | None], None]) -> None:
        self._app = rabbitmq.create_celery_app(url)
        self._app.conf.worker_consumer = HintConsumer
        for name in _VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)

        # Celery requires a named function.
        def handle_hint(load_balancer_id: str | None) -> None:
            on_hint(load_balancer_id)

        self._app.task(name=rabbitmq.TASK)(handle_hint)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        """Start the thread; it retries until the broker is available."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop the consumer, and wait for the current hint for this time at most."""
        self._ending.set()
        # Celery's way to stop a worker from another thread; a process has one worker.
        state.should_stop = 0
        self._thread.join(seconds)
        if not self._thread.is_alive():
            state.should_stop = None

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                worker = self._app.WorkController(
                    pool_cls="solo",
                    concurrency=1,
                    without_mingle=True,
                    without_gossip=True,
                    without_heartbeat=True,
                )
                worker.start()
            except Exception:
                # The library's, broker's and network's errors have no common base, and the consumer must survive.
                LOG.exception("the consumer of hints failed, starting again in %g s", _RETRY_AFTER)
            self._ending.wait(_RETRY_AFTER)


class ReporterConsumer:
    """Consumes hints to reporters.

    Args:
        url: of the broker.
        on_hint: called for each hint.
    """

    def __init__(self, url: str, on_hint: Callable[[], None]) -> None:
        self._url = url
        self._on_hint = on_hint
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        """Start the thread; it retries until the broker is available."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop the consumer."""
        self._ending.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ending.is_set():
            connection = kombu.Connection(
                self._url, connect_timeout=rabbitmq.CONNECT_SECONDS, heartbeat=rabbitmq.HEARTBEAT_SECONDS
            )
            try:
                self._consume(connection)
            except Exception as error:  # noqa: BLE001 - library, broker and network errors have no common base
                LOG.info("cannot consume hints, trying again in %g s: %s", _RETRY_AFTER, type(error).__name__)
            finally:
                connection.collect()
            self._ending.wait(_RETRY_AFTER)

    def _consume(self, connection: kombu.Connection) -> None:
        # An exclusive queue ends with the connection: missed hints are worthless.
        queue = kombu.Queue(exchange=rabbitmq.REPORTERS, exclusive=True, durable=False, auto_delete=True)
        with connection.Consumer(queue, callbacks=[self._handle], no_ack=True):
            while not self._ending.is_set():
                try:
                    connection.drain_events(timeout=_CHECK_EVERY)
                except TimeoutError:
                    connection.heartbeat_check()

    def _handle(self, _body: Any, _message: Any) -> None:
        self._on_hint()
