# SPDX-License-Identifier: Apache-2.0
"""Liveness of a controller: writes its heartbeat to the database and reads the drain flag.

Invariant: no other thread waits for the thread of this module, which may block while the database does not answer.
Until then the drain flag keeps its last value.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import process_registry

LOG = logging.getLogger(__name__)


class ControllerLiveness:
    """The row of one controller in the process registry; `jobs` returns the number of current jobs.

    While `draining` is set, the controller must start no job and hold no duty.
    """

    def __init__(self, database: Database, name: str, jobs: Callable[[], int]) -> None:
        self.draining = threading.Event()
        self._database = database
        self._name = name
        self._registry = process_registry.ProcessRegistration(database, name, process_registry.ProcessKind.CONTROLLER)
        self._jobs = jobs

    def run(self, stopping: threading.Event) -> None:
        while True:
            self.write_heartbeat()
            if stopping.wait(process_registry.HEARTBEAT_INTERVAL):
                return

    def write_heartbeat(self) -> None:
        """Write the heartbeat and read the drain flag; errors are only logged."""
        try:
            draining = self._registry.heartbeat(jobs=self._jobs())
        except (AmphoraDriverError, OSError) as error:
            LOG.warning("this controller could not write its heartbeat to the database and tries again: %s", error)
            return
        except Exception:
            # An error must not end this thread. Without heartbeats, a working controller would count as dead.
            LOG.exception(
                "an unexpected error kept this controller from writing its heartbeat to the database; the "
                "controller tries again"
            )
            return
        if draining and not self.draining.is_set():
            LOG.info("controller %s drains on request and starts no new jobs", self._name)
            self.draining.set()
        elif self.draining.is_set() and not draining:
            LOG.info("the drain of controller %s ended on request, so the controller starts jobs again", self._name)
            self.draining.clear()

    def unregister(self) -> None:
        """Remove the row at an orderly end of the process."""
        try:
            self._registry.deregister()
        except (AmphoraDriverError, OSError) as error:
            LOG.info(
                "the stopping controller could not delete its row from the database; housekeeping deletes the "
                "row after one hour without heartbeats: %s",
                error,
            )
