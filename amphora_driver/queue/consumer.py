# SPDX-License-Identifier: Apache-2.0
"""Hearing hints from other hosts.

Invariant: whoever hears does so in a thread that nothing else depends on. While the broker is away, hung or has lost
everything, the thread tries again, and the work is found by looking at the rows.

A controller runs a worker of Celery's in its own process, with Celery's solo pool: one hint after the other is taken,
in the worker's own thread, and handed to the controller's threads. So a hint is taken only when a thread is free
(work spreads to whoever has one), acknowledgements come from the thread that owns the connection, and a load balancer
that takes long holds up no hint.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import kombu
from celery.worker import state
from celery.worker.consumer import Consumer

from amphora_driver.queue import rabbitmq

if TYPE_CHECKING:
    from collections.abc import Callable

LOG = logging.getLogger(__name__)
# Two lines for each hint: what came of it is in the log anyway.
_TALKATIVE = ("celery.worker.strategy", "celery.app.trace")
# Seconds between two looks at whether to stop.
_LOOK_EVERY = 0.5
# Seconds before a connection is tried again, or a worker that failed as a whole begins anew.
_PAUSE = 2.0


class HintConsumer(Consumer):
    """Celery's consumer without what hints have no use for: 28 queues for delays, remote control, gossip."""

    class Blueprint(Consumer.Blueprint):
        """Its parts, in order."""

        default_steps = (
            "celery.worker.consumer.connection:Connection",
            "celery.worker.consumer.events:Events",
            "celery.worker.consumer.tasks:Tasks",
            "celery.worker.consumer.consumer:Evloop",
        )

    _tick: Any = None

    def register_with_event_loop(self, hub: Any) -> None:
        """The loop sleeps until something comes; it has to look now and then whether it should end."""
        super().register_with_event_loop(hub)
        if self._tick is not None:
            self._tick.cancel()
        self._tick = hub.timer.call_repeatedly(_LOOK_EVERY, lambda: None)


class Worker:
    """Hears the hints for controllers.

    Args:
        url: of the broker.
        look: called for each, one at a time, with a load balancer or None; returns when the next one may come.
    """

    def __init__(self, url: str, look: Callable[[str | None], None]) -> None:
        self._app = rabbitmq.application(url)
        self._app.conf.worker_consumer = HintConsumer
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)

        # Celery wants a function with a name.
        def look_at(load_balancer_id: str | None) -> None:
            look(load_balancer_id)

        self._app.task(name=rabbitmq.TASK)(look_at)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hearing", daemon=True)

    def start(self) -> None:
        """Begin to hear; a broker that is away is waited for."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Hear no more; what was taken has been handed over when this returns, if that takes no longer."""
        self._ending.set()
        # Celery's own way to have a worker end from outside of its thread: there is one in a process.
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
                LOG.exception("the worker that hears hints failed, it begins anew")
            self._ending.wait(_PAUSE)


class Ear:
    """Hears the hints for reporters.

    Args:
        url: of the broker.
        heard: called for each.
    """

    def __init__(self, url: str, heard: Callable[[], None]) -> None:
        self._url = url
        self._heard = heard
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hearing", daemon=True)

    def start(self) -> None:
        """Begin to hear; a broker that is away is waited for."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Hear no more."""
        self._ending.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ending.is_set():
            connection = kombu.Connection(
                self._url, connect_timeout=rabbitmq.CONNECT_SECONDS, heartbeat=rabbitmq.HEARTBEAT_SECONDS
            )
            try:
                self._listen(connection)
            except Exception as error:  # noqa: BLE001 - a library's, a broker's or the network's: try again
                LOG.info("hints cannot be heard: %s", type(error).__name__)
            finally:
                connection.collect()
            self._ending.wait(_PAUSE)

    def _listen(self, connection: kombu.Connection) -> None:
        # Its own, gone with the connection: what was said to one that was away need not be kept.
        queue = kombu.Queue(exchange=rabbitmq.REPORTERS, exclusive=True, durable=False, auto_delete=True)
        with connection.Consumer(queue, callbacks=[self._take], no_ack=True):
            while not self._ending.is_set():
                try:
                    connection.drain_events(timeout=_LOOK_EVERY)
                except TimeoutError:
                    connection.heartbeat_check()

    def _take(self, _body: Any, _message: Any) -> None:
        self._heard()
