# SPDX-License-Identifier: Apache-2.0
"""Telling processes of this host and of others that there is something to look at.

Invariant: `tell` costs its caller next to nothing, whatever state the broker is in: it rings the doorbell of this host
and, with engine "celery", leaves a note for a thread that publishes. What cannot be published soon is dropped. A hint
is never needed: the rows say the same, and are looked at every `poll_interval`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from amphora_driver.errors import ConfigurationError
from amphora_driver.queue import local_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.queue.rabbitmq import Sender

LOG = logging.getLogger(__name__)
CELERY = "celery"
# Hints that wait to be published; a thousand members set at once are one for each load balancer.
_MOST_WAITING = 1000
# Seconds between tries to reach a broker that is away: the first, and the longest pause.
_PAUSES = (0.2, 5.0)
# Seconds an ending process waits for threads that hear.
_GOODBYE_SECONDS = 5.0
_Hint = tuple[str, str | None]


def tell(conf: ConfigOpts, role: str, load_balancer_id: str | None = None) -> None:
    """There is something to do, once the transaction that says what has been committed.

    Args:
        conf: our options.
        role: whose work it is: `doorbell.CONTROLLER` or `doorbell.REPORTER`.
        load_balancer_id: where, if it is one only.
    """
    local_socket.ring(conf.queue.doorbell_dir, role)
    if conf.queue.engine == CELERY:
        url = conf.queue.broker_url
        (_publishers.get(url) or _publishers.setdefault(url, Publisher(url))).put(role, load_balancer_id)


@contextlib.contextmanager
def heard(conf: ConfigOpts, ring: Callable[[], None]) -> Iterator[None]:
    """While the block runs, call `ring` for every hint that reporters are given, of whatever host."""
    if conf.queue.engine != CELERY:
        yield
        return
    ear = _hearing().Ear(conf.queue.broker_url, ring)
    ear.start()
    try:
        yield
    finally:
        ear.stop(_GOODBYE_SECONDS)


@contextlib.contextmanager
def taken(conf: ConfigOpts, look: Callable[[str | None], None]) -> Iterator[None]:
    """While the block runs, take hints for controllers as one of them.

    Args:
        conf: our options.
        look: called for each, one at a time, with a load balancer, or None for all; returns when the next may come.
    """
    if conf.queue.engine != CELERY:
        yield
        return
    worker = _hearing().Worker(conf.queue.broker_url, look)
    worker.start()
    try:
        yield
    finally:
        worker.stop(_GOODBYE_SECONDS)


def _hearing() -> ModuleType:
    try:
        from amphora_driver.queue import consumer  # noqa: PLC0415 - only where it is used, as in `Publisher`
    except ImportError as error:
        raise _not_installed(error) from error
    return consumer


def _not_installed(error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        "use [queue] engine = celery", str(error), "Install octavia-amphora-driver[distributed], or use embedded."
    )


class Publisher:
    """Publishes hints from a thread of its own, which begins with the first one.

    Args:
        url: of the broker.
        most: hints that may wait; more are dropped.
    """

    def __init__(self, url: str, most: int = _MOST_WAITING) -> None:
        self._url = url
        self._most = most
        # In the order they came, each once.
        self._waiting: dict[_Hint, None] = {}
        self._news = threading.Condition()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, role: str, load_balancer_id: str | None) -> bool:
        """Leave a hint to be published; False if it was dropped."""
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
        """End the thread; what waits is dropped."""
        with self._news:
            self._ending.set()
            self._news.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            # Only now, and only where it is used: it takes half a second to be imported.
            from amphora_driver.queue.rabbitmq import Sender  # noqa: PLC0415
        except ImportError as error:
            LOG.error("no hint is published: %s", _not_installed(error))  # noqa: TRY400 - it says all there is
            return
        sender = Sender(self._url)
        pause = _PAUSES[0]
        while (hint := self._next()) is not None:
            # A connection that has not been used for a while may be dead: that shows only now.
            if self._sent(sender, hint) or self._sent(sender, hint):
                pause = _PAUSES[0]
            else:
                LOG.warning("the broker is away: its hints are dropped, who polls finds the work")
                self._ending.wait(pause)
                pause = min(2 * pause, _PAUSES[1])
        sender.close()

    def _next(self) -> _Hint | None:
        with self._news:
            while not self._waiting and not self._ending.is_set():
                self._news.wait()
            if self._ending.is_set():
                return None
            hint = next(iter(self._waiting))
            del self._waiting[hint]
            return hint

    def _sent(self, sender: Sender, hint: _Hint) -> bool:
        try:
            sender.send(*hint)
        except Exception as error:  # noqa: BLE001 - a library's, a broker's or the network's: all the same to a hint
            LOG.info("a hint could not be published: %s", type(error).__name__)
            sender.drop()
            return False
        return True


_publishers: dict[str, Publisher] = {}
# A child has none of its parent's threads.
os.register_at_fork(after_in_child=_publishers.clear)
