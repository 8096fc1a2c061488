# SPDX-License-Identifier: Apache-2.0
"""Notifies processes of this host and of other hosts of new work.

Invariant: `notify` returns within microseconds in every state of the broker. It wakes the processes of this host and,
with engine "celery", queues a hint for the publisher thread. Hints that cannot be published soon are dropped. No hint
is necessary: the rows hold the same information, and every process polls them each `poll_interval`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from amphora_driver.errors import AmphoraDriverError, ConfigurationError
from amphora_driver.queue import local_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.queue.rabbitmq import HintSender

LOG = logging.getLogger(__name__)
CELERY = "celery"
# Maximum number of hints (messages about new work) that wait for the message broker.
_MOST_WAITING = 1000
# Shortest and longest pause in seconds after the broker could not be reached.
_BACKOFF = (0.2, 5.0)
_STOP_SECONDS = 5.0
_Hint = tuple[str, str | None]


def notify(conf: ConfigOpts, role: str, load_balancer_id: str | None = None) -> None:
    """Notify the processes of a role of work on one or several (None) load balancers.

    The caller has committed the transaction that records the work.
    """
    local_socket.wake_role(conf.amp_queue.socket_dir, role)
    if conf.amp_queue.engine == CELERY:
        url = conf.amp_queue.broker_url
        (_publishers.get(url) or _publishers.setdefault(url, Publisher(url))).enqueue(role, load_balancer_id)


def reporter_hints(conf: ConfigOpts, on_hint: Callable[[], None]) -> AbstractContextManager[None]:
    """While the block runs, call `on_hint` for every hint to reporters, from all hosts."""
    return _consume_hints(conf, "ReporterConsumer", on_hint)


def controller_hints(conf: ConfigOpts, on_hint: Callable[[str | None], None]) -> AbstractContextManager[None]:
    """While the block runs, consume hints to controllers.

    Each hint is a call of `on_hint` with a load balancer, or None for all. The next hint is consumed after the call.
    """
    return _consume_hints(conf, "ControllerConsumer", on_hint)


@contextlib.contextmanager
def _consume_hints(conf: ConfigOpts, name: str, on_hint: Callable[..., None]) -> Iterator[None]:
    if conf.amp_queue.engine != CELERY:
        yield
        return
    try:
        from amphora_driver.queue import consumer  # noqa: PLC0415 - only the engine `celery` needs it
    except ImportError as error:
        raise _not_installed(error) from error
    thread = getattr(consumer, name)(conf.amp_queue.broker_url, on_hint)
    thread.start()
    try:
        yield
    finally:
        thread.stop(_STOP_SECONDS)


def _not_installed(error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        "use [amp_queue] engine = celery", str(error), "Install octavia-amphora-driver[distributed], or use embedded."
    )


class Publisher:
    """Publishes hints from a thread, which the first hint starts; drops hints beyond `most`."""

    def __init__(self, url: str, most: int = _MOST_WAITING) -> None:
        self._url = url
        self._most = most
        # Hints (messages about new work) that wait for the message broker, in the order of arrival.
        self._waiting: dict[_Hint, None] = {}
        self._news = threading.Condition()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def enqueue(self, role: str, load_balancer_id: str | None) -> bool:
        """Queue a hint; False if it was dropped."""
        with self._news:
            if len(self._waiting) >= self._most or self._ending.is_set():
                return False
            self._waiting[role, load_balancer_id] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hints", daemon=True)
                self._thread.start()
            self._news.notify()
        return True

    def close(self, seconds: float = 10.0) -> None:
        """Stop the thread and drop all queued hints."""
        with self._news:
            self._ending.set()
            self._news.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            # The import is inside the method, because Celery takes half a second to import and only the queue engine
            # `celery` needs it.
            from amphora_driver.queue.rabbitmq import HintSender  # noqa: PLC0415
        except ImportError as error:
            text = (
                "this process cannot send messages about new work to other hosts, which find the work "
                "when they poll the database: %s"
            )
            LOG.error(text, _not_installed(error))  # noqa: TRY400 - the message is complete
            return
        sender = HintSender(self._url)
        pause = _BACKOFF[0]
        while (hint := self._next()) is not None:
            # The loss of an idle connection shows only when a message is sent. So a failed message is sent once more,
            # over a new connection.
            lost = self._send(sender, hint)
            failure = None if lost is None else self._send(sender, hint)
            if failure is None:
                if lost is not None or pause > _BACKOFF[0]:
                    LOG.info("this process announces new work through a new connection to the message broker")
                pause = _BACKOFF[0]
            else:
                # The message names no load balancer, so that the log has one line for many (`repeated_messages`).
                LOG.warning("other hosts find new work only when they poll the database: %s", failure)
                self._ending.wait(pause)
                pause = min(2 * pause, _BACKOFF[1])
        sender.discard_connection()

    def _next(self) -> _Hint | None:
        with self._news:
            while not self._waiting and not self._ending.is_set():
                self._news.wait()
            if self._ending.is_set():
                return None
            hint = next(iter(self._waiting))
            del self._waiting[hint]
            return hint

    def _send(self, sender: HintSender, hint: _Hint) -> AmphoraDriverError | None:
        """Send a hint, and return an error or None.

        The error has no text of the library, which may contain a password.
        """
        try:
            sender.send(*hint)
        except Exception as error:  # noqa: BLE001 - the library's, broker's and network's errors have no common base
            sender.discard_connection()
            return AmphoraDriverError("announce new work through the message broker", type(error).__name__)
        return None


_publishers: dict[str, Publisher] = {}
# A child process has no publisher threads after a fork, so it forgets the publishers of its parent.
os.register_at_fork(after_in_child=_publishers.clear)
