# SPDX-License-Identifier: Apache-2.0
"""Failpoints: the moments of a change at which a test can kill the agent, or make the agent wait.

Invariant: a failpoint does nothing unless the environment variable `VARIABLE` names a directory at the agent's start.
Only tests set the variable. A file in the directory arms the failpoint of the same name. The content ``die`` means
SIGKILL, once; any other content makes the agent wait until the file is removed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

VARIABLE = "AMPHORA_AGENT_FAILPOINTS"
_DIRECTORY = os.environ.get(VARIABLE)
_POLL_SECONDS = 0.005


class Point(Enum):
    """The failpoints in the order of a change; no change reaches all of them."""

    TAKEN = "taken"  # The queue has started a bundle.
    FILES = "files"  # The set of TLS files is complete.
    CHECKING = "checking"  # The candidate file for HAProxy is written.
    RESERVED = "reserved"  # All disk space is reserved. The serving processes are unchanged so far.
    MARKED = "marked"  # The change is marked as unfinished on the disk.
    EARLY = "early"  # The running HAProxy was changed at run time, before its file.
    CHECKED = "checked"  # HAProxy has accepted the candidate.
    PLUGGED = "plugged"  # The interfaces have the addresses and routes of the new bundle.
    SWITCHED = "switched"  # HAProxy's file is replaced by the candidate.
    HANDED_OVER = (
        "handed-over"  # The states of the members are stored for the next worker, and the present worker is held.
    )
    RELOADING = "reloading"  # HAProxy's master has received the command to reload.
    LOADED = "loaded"  # HAProxy runs the new configuration.
    CONFIRMED = "confirmed"  # The bundle is confirmed on disk.
    FINISHED = "finished"  # The mark of the unfinished change is removed.
    TIDIED = "tidied"  # Unused TLS files are removed.
    RETURNING = "returning"  # The change has failed, and the rollback begins.


def reach(point: Point) -> None:
    """Stop here if a test has armed this failpoint."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY) / point.value)


def _stop(armed: Path) -> None:
    with suppress(FileNotFoundError):
        if armed.read_text(encoding="ascii") == "die":
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    while armed.exists():
        armed.with_suffix(".here").touch()  # this file shows the test that the agent waits
        time.sleep(_POLL_SECONDS)
    armed.with_suffix(".here").unlink(missing_ok=True)
