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
    """Failpoints in the order in which a request reaches them; no request reaches all.

    Attributes:
        CLAIM_NOTED: the driver in octavia-api has recorded the claim of VIP addresses and has not allocated any VIP
            address yet.
        ADDRESSES_TAKEN: the driver has allocated the VIP addresses, and Octavia does not know the addresses yet.
        INTENT_WRITTEN: the driver has written the desired state in a transaction that is still open.
        INTENT_COMMITTED: the driver has committed the desired state and has notified no other process yet.
        BARRIER_NEXT: the provider agent is about to wait until Octavia has committed or rolled back the transactions of
            the requests.
        BARRIER_PASSED: the provider agent has seen the end of Octavia's transactions and has not recorded the end yet.
        COMMITTED: the provider agent has recorded the end of Octavia's transactions.
        TREE_READ: the provider agent has read objects from Octavia and has not recorded the objects yet.
        TREE_TAKEN: the provider agent has recorded the objects that Octavia returned.
        REPORT_SENT: Octavia has accepted statuses, and the provider agent has not recorded the acceptance yet.
        REPORT_TAKEN: the provider agent has recorded which statuses Octavia has accepted.
        CLAIMED: the controller has acquired the lease of a load balancer.
        FINISHING: the controller has executed all steps for a load balancer and is about to return the lease.
        FINISHED: the controller has returned the lease of a load balancer.
        FAILOVER_WRITTEN: a process has written a fail-over, for any cause, in a transaction that is still open.
        FAILOVER_BEGUN: the failure detector has committed an automatic fail-over and has notified no other process yet.
        ROTATION_WRITTEN: the image rotation has written the next state changes of load balancers in a transaction that
            is still open.
        ROTATION_MOVED: the image rotation has committed the state changes of load balancers and has notified no other
            process yet.
        FLUSHING: the health manager is about to write the reports of amphorae to the database.
        FLUSHED: the health manager has written the reports of amphorae to the database.
    """

    CLAIM_NOTED = "claim-noted"
    ADDRESSES_TAKEN = "addresses-taken"
    INTENT_WRITTEN = "intent-written"
    INTENT_COMMITTED = "intent-committed"
    BARRIER_NEXT = "barrier-next"
    BARRIER_PASSED = "barrier-passed"
    COMMITTED = "committed"
    TREE_READ = "tree-read"
    TREE_TAKEN = "tree-taken"
    REPORT_SENT = "report-sent"
    REPORT_TAKEN = "report-taken"
    CLAIMED = "claimed"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILOVER_WRITTEN = "failover-written"
    FAILOVER_BEGUN = "failover-begun"
    ROTATION_WRITTEN = "rotation-written"
    ROTATION_MOVED = "rotation-moved"
    FLUSHING = "flushing"
    FLUSHED = "flushed"


class Moment(Enum):
    """Failpoints of every step of a controller.

    Attributes:
        BEFORE: the controller is about to start a step of a job.
        DONE: the controller has caused the external effect of a step, and is about to record the step in the database.
        MARKED: the controller has recorded a step of a job in the database.
    """

    BEFORE = "before"
    DONE = "done"
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
        # The file with the suffix `.here` tells a waiting test that this process has reached the failpoint.
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
