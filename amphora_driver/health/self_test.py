# SPDX-License-Identifier: Apache-2.0
"""Self-test of the health manager: whether it receives heartbeats and writes them to the database.

Invariant: the `beat` in the row of this process grows only after two checks. The receiver thread has received a probe
that this process sent to its own socket, and a recent flush, or a recent write of heartbeats during a longer flush, has
succeeded. So while the beat grows, a silent amphora is not a fault of this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import process_registry

LOG = logging.getLogger(__name__)
# Seconds within which the heartbeat socket must receive the probe of the self-test.
_PROBE_TIMEOUT = 1.0


class ReceiverSelfTest:
    """The self-test thread of a health manager.

    Args:
        receives: returns whether a probe arrives within the given seconds; in a group of receivers, whether the probes
            of all receivers have arrived.
        interval: seconds between two tests.
        max_flush_age: seconds for which a successful flush or write of heartbeats counts as recent.
    """

    def __init__(
        self, database: Database, name: str, receives: Callable[[float], bool], interval: float, max_flush_age: float
    ) -> None:
        self._registry = process_registry.ProcessRegistration(
            database, name, process_registry.ProcessKind.HEALTH_MANAGER
        )
        self._receives = receives
        self._interval = interval
        self._max_flush_age = max_flush_age
        self._flushed_at = float("-inf")
        self._working = True

    def record_flush(self) -> None:
        """Record that the heartbeats up to now are in the database."""
        self._flushed_at = time.monotonic()

    def run(self, stopping: threading.Event) -> None:
        """Test periodically until the event is set, and delete the row then."""
        while not stopping.wait(self._interval):
            self.test()
        try:
            self._registry.deregister()
        except (AmphoraDriverError, OSError) as error:
            LOG.info(
                "the stopping health manager could not delete its row from the database; housekeeping deletes the row "
                "after one hour without heartbeats: %s",
                error,
            )

    def test(self) -> None:
        try:
            flushed = time.monotonic() - self._flushed_at <= self._max_flush_age
            working = flushed and self._receives(_PROBE_TIMEOUT)
            self._registry.heartbeat(working=working)
        except (AmphoraDriverError, OSError) as error:
            LOG.warning("the health manager could not record the result of its self-test and tries again: %s", error)
            return
        except Exception:
            # An error must not end this thread. Without its beat, controllers would regard this health manager as dead.
            LOG.exception(
                "the health manager could not record the result of its self-test because of an unexpected error and "
                "tries again"
            )
            return
        if working is not self._working:
            self._working = working
            if working:
                LOG.info("the self-test of the health manager succeeds again")
            else:
                lost = "a receiver on this host did not receive its probe"
                reason = lost if flushed else "no recent flush to the database succeeded"
                LOG.warning(
                    "the self-test of the health manager failed, and runs again at the next interval; while all health "
                    "managers fail their self-tests, no automatic fail-over begins: %s",
                    reason,
                )
