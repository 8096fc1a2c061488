# SPDX-License-Identifier: Apache-2.0
"""Consumers of hints from other hosts.

Invariant: each consumer has a thread on which no other thread depends. While the broker is not available, the thread
retries, and processes find the work when they poll the rows.

A controller runs a Celery worker in its own process, with Celery's solo pool. The worker's thread consumes one hint at
a time and passes it to the controller's worker pool. A hint is consumed only when a worker slot is free, so that hints
go to controllers with free slots. Acknowledgements come from the thread that owns the connection. A slow load balancer
delays no hint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kombu
from celery.worker import state
from celery.worker.consumer import Consumer

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.queue import rabbitmq

LOG = logging.getLogger(__name__)
# These loggers of Celery write two lines for each message. The controller's own log has a line for each job, so these
# loggers are limited to warnings.
_VERBOSE_LOGGERS = ("celery.worker.strategy", "celery.app.trace")
_CHECK_SECONDS = 0.5
_RETRY_SECONDS = 2.0


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
        self._tick = hub.timer.call_repeatedly(_CHECK_SECONDS, lambda: None)


class _Consumer:
    """A thread that consumes hints, and starts again after an error."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        """Start the thread; it retries until the broker is available."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop the thread, and wait for the current hint for this time at most."""
        self._ending.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._consume()
            self._ending.wait(_RETRY_SECONDS)

    def _consume(self) -> None:
        """Consume hints until the thread is stopped or an error occurs; log the error."""
        raise NotImplementedError


class ControllerConsumer(_Consumer):
    """Calls `on_hint` for each hint to controllers, one at a time, with a load balancer or None."""

    def __init__(self, url: str, on_hint: Callable[[str | None], None]) -> None:
        super().__init__()
        self._app = rabbitmq.create_celery_app(url)
        self._app.conf.worker_consumer = HintConsumer
        for name in _VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)

        # The nested function has the attribute `__name__`, which Celery needs and `on_hint` may not have.
        def handle_hint(load_balancer_id: str | None) -> None:
            on_hint(load_balancer_id)

        self._app.task(name=rabbitmq.TASK)(handle_hint)

    def stop(self, seconds: float) -> None:
        self._ending.set()
        # Celery stops the worker of this process if the global flag `should_stop` has any value except None.
        state.should_stop = 0
        super().stop(seconds)
        if not self._thread.is_alive():
            state.should_stop = None

    def _consume(self) -> None:
        without = {"without_mingle": True, "without_gossip": True, "without_heartbeat": True}
        try:
            self._app.WorkController(pool_cls="solo", concurrency=1, **without).start()
        except Exception:
            # All errors are caught, because errors of Celery, the broker and the network have no common base class.
            LOG.exception(
                "the controller could not receive messages about new work from the message broker, and "
                "tries again in %g s",
                _RETRY_SECONDS,
            )


class ReporterConsumer(_Consumer):
    """Calls `on_hint` for each hint to reporters."""

    def __init__(self, url: str, on_hint: Callable[[], None]) -> None:
        super().__init__()
        self._url = url
        self._on_hint = on_hint

    def _consume(self) -> None:
        limits = {"connect_timeout": rabbitmq.CONNECT_SECONDS, "heartbeat": rabbitmq.HEARTBEAT_SECONDS}
        connection = kombu.Connection(self._url, **limits)
        # RabbitMQ deletes this queue at the end of the connection. Lost messages about new work are harmless, because
        # the provider agent also polls the database.
        queue = kombu.Queue(exchange=rabbitmq.REPORTERS, exclusive=True, durable=False, auto_delete=True)
        try:
            with connection.Consumer(queue, callbacks=[self._handle], no_ack=True):
                while not self._ending.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=_CHECK_SECONDS)
                    # Also after a message: during many messages, RabbitMQ would otherwise get no heartbeat and close
                    # the connection.
                    connection.heartbeat_check()
        except Exception as error:  # noqa: BLE001 - library, broker and network errors have no common base
            failure = AmphoraDriverError("receive messages from the message broker", type(error).__name__)
            LOG.warning(
                "the provider agent finds new work only when it polls the database, and connects to the message "
                "broker again in %g s: %s",
                _RETRY_SECONDS,
                failure,
            )
        finally:
            connection.collect()

    def _handle(self, _body: Any, _message: Any) -> None:
        self._on_hint()
