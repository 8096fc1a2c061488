# SPDX-License-Identifier: Apache-2.0
"""The health manager proves that it hears.

Invariant: its `beat` grows only if what it sent to its own socket a moment ago was received by the thread that receives
heartbeats, and what was heard before was written down a moment ago. So whoever sees the beat grow knows that silence is
not this process's. The proof is no heartbeat, and nothing but this row comes of it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import process_registry

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)
# Seconds a datagram of its own may take.
_OWN = 1.0


class Hearing:
    """One thread of a health manager.

    Args:
        database: where the row is.
        name: `process_name()` of this process.
        hears: whether a datagram to itself is received within so many seconds.
        every: seconds between two proofs.
        patience: seconds after which what was written down last is not of a moment ago any more.
    """

    def __init__(
        self, database: Database, name: str, hears: Callable[[float], bool], every: float, patience: float
    ) -> None:
        self._registry = process_registry.ProcessRegistration(
            database, name, process_registry.ProcessKind.HEALTH_MANAGER
        )
        self._hears = hears
        self._every = every
        self._patience = patience
        self._written_at = float("-inf")
        self._well = True

    def written(self) -> None:
        """What was heard until now is written down."""
        self._written_at = time.monotonic()

    def run(self, stopping: threading.Event) -> None:
        """Prove it now and then, until told to stop; the row goes with that."""
        while not stopping.wait(self._every):
            self.prove()
        try:
            self._registry.deregister()
        except (AmphoraDriverError, OSError) as error:
            LOG.info("the row of this health manager stays: %s", error)

    def prove(self) -> None:
        """Prove it once; what goes wrong is only logged."""
        try:
            written = time.monotonic() - self._written_at <= self._patience
            well = written and self._hears(_OWN)
            self._registry.heartbeat(working=well)
        except (AmphoraDriverError, OSError) as error:
            LOG.warning("could not say that this health manager hears: %s", error)
            return
        except Exception:
            LOG.exception("could not say that this health manager hears, trying again")
            return
        if well is not self._well:
            self._well = well
            why = "" if well else (": it does not receive" if written else ": nothing is written down")
            LOG.warning("this health manager %s%s", "hears again" if well else "cannot prove that it hears", why)
