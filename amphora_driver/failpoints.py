# SPDX-License-Identifier: Apache-2.0
"""The moments of an accepted call at which a test may have a process of the control plane die, or wait.

Invariant: nothing happens at any of them unless the environment variable `VARIABLE` was set when the process started,
which it never is outside of tests. It names a directory; a file in it arms the point of the same name: ``die`` in it
means SIGKILL, once, ``die again`` SIGKILL for whoever comes, anything else means to wait until the file is gone. Of
several processes or threads that reach an armed point at once, one dies (once).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

VARIABLE = "AMPHORA_DRIVER_POINTS"
_DIRECTORY = os.environ.get(VARIABLE)
_POLL_SECONDS = 0.005


class Point(Enum):
    """In the order in which a call reaches them; no call reaches them all."""

    # In octavia-api.
    CLAIM_NOTED = "claim-noted"
    """It is written down that addresses are about to be taken."""
    ADDRESSES_TAKEN = "addresses-taken"
    """They are, and Octavia does not know them yet."""
    INTENT_WRITTEN = "intent-written"
    """What is wanted is in an open transaction of ours."""
    INTENT_COMMITTED = "intent-committed"
    """What is wanted is recorded; nobody was woken, and Octavia's transaction is open still."""

    # In the provider agent.
    BARRIER_NEXT = "barrier-next"
    """Octavia's transactions are about to be waited for."""
    BARRIER_PASSED = "barrier-passed"
    """They have ended, and that is not written down."""
    COMMITTED = "committed"
    """That is written down."""
    TREE_READ = "tree-read"
    """What arrived incomplete was read, and is not written down."""
    TREE_TAKEN = "tree-taken"
    """It is written down."""
    REPORT_SENT = "report-sent"
    """Octavia has taken statuses, and that is not written down."""
    REPORT_TAKEN = "report-taken"
    """It is."""

    # In a controller; steps have points of their own, see `Moment`.
    CLAIMED = "claimed"
    """The lease of a load balancer was taken."""
    FINISHING = "finishing"
    """Nothing is left to do, and the lease is about to be given back."""
    FINISHED = "finished"
    """It is given back."""
    FAILOVER_WRITTEN = "failover-written"
    """That amphorae are replaced is in an open transaction of ours, whoever asked for it."""
    FAILOVER_BEGUN = "failover-begun"
    """That silent amphorae are replaced is recorded; nobody was woken."""
    ROTATION_WRITTEN = "rotation-written"
    """What is next in a rotation is in an open transaction of ours."""
    ROTATION_MOVED = "rotation-moved"
    """It is recorded; nobody was woken."""

    # In a health manager.
    FLUSHING = "flushing"
    """What amphorae said is about to be written down."""
    FLUSHED = "flushed"
    """It is."""


class Moment(Enum):
    """Within a step of a controller's, whatever kind of step it is."""

    BEFORE = "before"
    """It is about to begin."""
    DONE = "done"
    """What it does outside is done, and its mark in the store is about to be written."""
    MARKED = "marked"
    """The mark is there."""


def reach(point: Point) -> None:
    """Say that a call has come this far."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY, point.value))


def reach_in(step: str, moment: Moment) -> None:
    """Say that a step of this kind has come this far; the point's name is both, as in ``Boot-done``."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY, f"{step}-{moment.value}"))


def _stop(armed: Path) -> None:
    _obey(armed)
    while armed.exists():
        armed.with_suffix(".here").touch()  # says that it waits
        time.sleep(_POLL_SECONDS)
        _obey(armed)
    armed.with_suffix(".here").unlink(missing_ok=True)


def _obey(armed: Path) -> None:
    """Die if that is asked for; also whoever waits may be told to."""
    with suppress(FileNotFoundError):
        wish = armed.read_text(encoding="ascii")
        if wish == "die":
            armed.unlink()
        if wish in {"die", "die again"}:
            os.kill(os.getpid(), signal.SIGKILL)
