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

    # At this failpoint, the driver in octavia-api has recorded the claim of VIP addresses and has not allocated any VIP
    # address yet.
    CLAIM_NOTED = "claim-noted"
    # At this failpoint, the driver has allocated the VIP addresses, and Octavia does not know the addresses yet.
    ADDRESSES_TAKEN = "addresses-taken"
    # At this failpoint, the driver has written the desired state in a transaction that is still open.
    INTENT_WRITTEN = "intent-written"
    # At this failpoint, the driver has committed the desired state and has notified no other process yet.
    INTENT_COMMITTED = "intent-committed"

    # At this failpoint, the provider agent is about to wait until Octavia has committed or rolled back the transactions
    # of the requests.
    BARRIER_NEXT = "barrier-next"
    # At this failpoint, the provider agent has seen the end of Octavia's transactions and has not recorded the end yet.
    BARRIER_PASSED = "barrier-passed"
    # At this failpoint, the provider agent has recorded the end of Octavia's transactions.
    COMMITTED = "committed"
    # At this failpoint, the provider agent has read objects from Octavia and has not recorded the objects yet.
    TREE_READ = "tree-read"
    # At this failpoint, the provider agent has recorded the objects that Octavia returned.
    TREE_TAKEN = "tree-taken"
    # At this failpoint, Octavia has accepted statuses, and the provider agent has not recorded the acceptance yet.
    REPORT_SENT = "report-sent"
    # At this failpoint, the provider agent has recorded which statuses Octavia has accepted.
    REPORT_TAKEN = "report-taken"

    # At this failpoint, the controller has acquired the lease of a load balancer.
    CLAIMED = "claimed"
    # At this failpoint, the controller has executed all steps for a load balancer and is about to return the lease.
    FINISHING = "finishing"
    # At this failpoint, the controller has returned the lease of a load balancer.
    FINISHED = "finished"
    # At this failpoint, a process has written a fail-over, for any cause, in a transaction that is still open.
    FAILOVER_WRITTEN = "failover-written"
    # At this failpoint, the failure detector has committed an automatic fail-over and has notified no other process
    # yet.
    FAILOVER_BEGUN = "failover-begun"
    # At this failpoint, the image rotation has written the next state changes of load balancers in a transaction that
    # is still open.
    ROTATION_WRITTEN = "rotation-written"
    # At this failpoint, the image rotation has committed the state changes of load balancers and has notified no other
    # process yet.
    ROTATION_MOVED = "rotation-moved"

    # At this failpoint, the health manager is about to write the reports of amphorae to the database.
    FLUSHING = "flushing"
    # At this failpoint, the health manager has written the reports of amphorae to the database.
    FLUSHED = "flushed"


class Moment(Enum):
    """Failpoints of every step of a controller."""

    # At this failpoint, the controller is about to start a step of a job.
    BEFORE = "before"
    # At this failpoint, the controller has caused the external effect of a step, and is about to record the step in the
    # database.
    DONE = "done"
    # At this failpoint, the controller has recorded a step of a job in the database.
    MARKED = "marked"


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
        # A test waits for the file with the suffix `.here`, which means that this process has reached the failpoint.
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
