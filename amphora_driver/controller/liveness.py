# SPDX-License-Identifier: Apache-2.0
"""A controller says that it lives, and hears whether it is to take up nothing new.

Invariant: nobody waits for this. It has a thread of its own, which may stand as long as the database does not answer;
what was heard last holds until then.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import process_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)


class Attendance:
    """One controller's row among the processes.

    Args:
        database: where it is.
        name: `process_name()` of this process.
        jobs: asked how many jobs it works on.

    Attributes:
        draining: set while this controller is to take up nothing new, and to have no duty.
    """

    def __init__(self, database: Database, name: str, jobs: Callable[[], int]) -> None:
        self.draining = threading.Event()
        self._database = database
        self._name = name
        self._registry = process_registry.ProcessRegistration(database, name, process_registry.ProcessKind.CONTROLLER)
        self._jobs = jobs

    def run(self, stopping: threading.Event) -> None:
        """Sign now and then, until told to stop."""
        while True:
            self.sign()
            if stopping.wait(process_registry.HEARTBEAT_INTERVAL):
                return

    def sign(self) -> None:
        """Say that this controller lives; what goes wrong is only logged."""
        try:
            draining = self._registry.heartbeat(jobs=self._jobs())
        except (AmphoraDriverError, OSError) as error:
            LOG.warning("could not say that this controller lives: %s", error)
            return
        except Exception:
            LOG.exception("could not say that this controller lives, and try again")
            return
        if draining and not self.draining.is_set():
            LOG.warning("this controller (%s) takes up nothing new: it was asked to drain", self._name)
            self.draining.set()
        elif self.draining.is_set() and not draining:
            LOG.warning("this controller (%s) takes up work again", self._name)
            self.draining.clear()

    def leave(self) -> None:
        """It ends well."""
        try:
            self._registry.deregister()
        except (AmphoraDriverError, OSError) as error:
            LOG.info("the row of this controller stays for a while: %s", error)
