# SPDX-License-Identifier: Apache-2.0
"""Failpoints: places where a test can kill or stop a process of the control plane.

Invariant: failpoints do nothing unless a test has set the environment variable `VARIABLE` to a directory before the
start of the process. A file in the directory arms the failpoint of the same name. The content ``die`` means one
SIGKILL, ``die again`` SIGKILL for every process that arrives; any other content means to wait until the file is
deleted. If several processes or threads reach a failpoint with ``die``, one of them dies.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

VARIABLE = "AMPHORA_DRIVER_FAILPOINTS"
_DIRECTORY = os.environ.get(VARIABLE)
_POLL_SECONDS = 0.005


class Point(Enum):
    """Failpoints in the order in which a request reaches them; no request reaches all."""

    # These failpoints are in octavia-api.
    CLAIM_NOTED = "claim-noted"  # The claim of addresses is recorded, and no address is allocated yet.
    ADDRESSES_TAKEN = "addresses-taken"  # Addresses are allocated, and Octavia does not know them yet.
    INTENT_WRITTEN = "intent-written"  # The desired state is written in an open transaction.
    INTENT_COMMITTED = "intent-committed"  # The desired state is committed, and no process is notified.

    # These failpoints are in the provider agent.
    BARRIER_NEXT = "barrier-next"  # The wait for Octavia's transactions is about to start.
    BARRIER_PASSED = "barrier-passed"  # Octavia's transactions have ended, and no row records the end yet.
    COMMITTED = "committed"  # The end of Octavia's transactions is recorded.
    TREE_READ = "tree-read"  # An incomplete load balancer was read from Octavia and is not recorded yet.
    TREE_TAKEN = "tree-taken"  # The complete load balancer is recorded.
    REPORT_SENT = "report-sent"  # Octavia has accepted statuses, and no row records the report yet.
    REPORT_TAKEN = "report-taken"  # The accepted statuses are recorded.

    # These failpoints are in a controller; steps have further failpoints, see `Moment`.
    CLAIMED = "claimed"  # The lease of a load balancer is acquired.
    FINISHING = "finishing"  # The plan is empty, and the lease is about to be returned.
    FINISHED = "finished"  # The lease is returned.
    FAILOVER_WRITTEN = "failover-written"  # A fail-over of any cause is written in an open transaction.
    FAILOVER_BEGUN = "failover-begun"  # An automatic fail-over is committed, and no process is notified.
    ROTATION_WRITTEN = "rotation-written"  # The next moves of a rotation are written in an open transaction.
    ROTATION_MOVED = "rotation-moved"  # The moves of a rotation are committed, and no process is notified.

    # These failpoints are in a health manager.
    FLUSHING = "flushing"  # The reports of amphorae are about to be written.
    FLUSHED = "flushed"  # The reports of amphorae are written.


class Moment(Enum):
    """Failpoints of every step of a controller."""

    BEFORE = "before"  # The step is about to start.
    DONE = "done"  # The external effect of the step is done, and its record is about to be written.
    MARKED = "marked"  # The record of the step is written.


def reach(point: Point) -> None:
    """Kill or stop this process if a test has armed the failpoint."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY, point.value))


def reach_step(step: str, moment: Moment) -> None:
    """Kill or stop this process if a test has armed the failpoint of a step, ``Boot-done`` for example."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY, f"{step}-{moment.value}"))


def _stop(armed: Path) -> None:
    _die_if_told(armed)
    while armed.exists():
        # The file shows the test that this process waits.
        armed.with_suffix(".here").touch()
        time.sleep(_POLL_SECONDS)
        _die_if_told(armed)
    armed.with_suffix(".here").unlink(missing_ok=True)


def _die_if_told(armed: Path) -> None:
    """Kill this process if the file says so; a test may write the file while the process waits."""
    with suppress(FileNotFoundError):
        command = armed.read_text(encoding="ascii")
        if command == "die":
            armed.unlink()
        if command in {"die", "die again"}:
            os.kill(os.getpid(), signal.SIGKILL)
