# SPDX-License-Identifier: Apache-2.0
"""The moments of a change at which a test may have the agent die, or wait.

Invariant: nothing happens at any of them unless the environment variable `VARIABLE` was set when the agent started,
which it never is outside of tests. It names a directory; a file in it arms the point of the same name: ``die`` in it
means SIGKILL, once, anything else means to wait until the file is gone.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

VARIABLE = "AMPHORA_AGENT_POINTS"
_DIRECTORY = os.environ.get(VARIABLE)
_POLL_SECONDS = 0.005


class Point(Enum):
    """In the order in which a change reaches them; no change reaches them all."""

    TAKEN = "taken"
    """It is this bundle's turn."""
    FILES = "files"
    """Its files are laid out."""
    CHECKING = "checking"
    """Its configuration is in the candidate file, for HAProxy to read."""
    RESERVED = "reserved"
    """What has to be on disk at the end has its room there. Nothing that serves was touched so far."""
    MARKED = "marked"
    """The mark of an unfinished change is there."""
    EARLY = "early"
    """The running HAProxy was changed, its file was not."""
    CHECKED = "checked"
    """HAProxy accepts the candidate."""
    PLUGGED = "plugged"
    """The interfaces are as wanted."""
    SWITCHED = "switched"
    """HAProxy's file is the new one."""
    HANDED_OVER = "handed-over"
    """The states of the members are written down for the next worker, and the present one is held."""
    RELOADING = "reloading"
    """HAProxy's master was told to reload."""
    LOADED = "loaded"
    """HAProxy has confirmed what it runs."""
    CONFIRMED = "confirmed"
    """The bundle is the last confirmed one."""
    FINISHED = "finished"
    """The mark of an unfinished change is gone."""
    TIDIED = "tidied"
    """The files that nothing needs any more are removed."""
    RETURNING = "returning"
    """The change has failed, and what served before is to be brought back."""


def reach(point: Point) -> None:
    """Say that a change has come this far."""
    if _DIRECTORY is not None:
        _stop(Path(_DIRECTORY) / point.value)


def _stop(armed: Path) -> None:
    with suppress(FileNotFoundError):
        if armed.read_text(encoding="ascii") == "die":
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    while armed.exists():
        armed.with_suffix(".here").touch()  # says that it waits
        time.sleep(_POLL_SECONDS)
    armed.with_suffix(".here").unlink(missing_ok=True)
