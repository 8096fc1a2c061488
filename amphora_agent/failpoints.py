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
    """The failpoints in the order of a change; no change reaches all of them.

    Attributes:
        TAKEN: the agent has taken a bundle from the queue of pushes.
        FILES: the agent has written the complete set of TLS files.
        CHECKING: the agent has written the candidate file for HAProxy.
        RESERVED: the agent has reserved all disk space for the change. HAProxy still runs the former configuration.
        MARKED: the agent has marked the change as unfinished on the disk.
        EARLY: the agent has changed the running HAProxy by runtime commands. The agent has not yet replaced HAProxy's
            configuration file.
        CHECKED: HAProxy has accepted the candidate file.
        PLUGGED: the interfaces have the addresses and routes of the new bundle.
        SWITCHED: the candidate file has replaced HAProxy's configuration file.
        HANDED_OVER: the agent has stored the states of members for HAProxy's next worker. The agent holds a connection
            to the present worker.
        RELOADING: HAProxy's master has received the command to reload.
        LOADED: HAProxy runs the new configuration.
        CONFIRMED: the agent has stored the bundle on the disk as confirmed.
        FINISHED: the agent has removed the mark of the unfinished change from the disk.
        TIDIED: the agent has removed unused TLS files.
        RETURNING: the change of the configuration has failed, and the rollback begins.
    """

    TAKEN = "taken"
    FILES = "files"
    CHECKING = "checking"
    RESERVED = "reserved"
    MARKED = "marked"
    EARLY = "early"
    CHECKED = "checked"
    PLUGGED = "plugged"
    SWITCHED = "switched"
    HANDED_OVER = "handed-over"
    RELOADING = "reloading"
    LOADED = "loaded"
    CONFIRMED = "confirmed"
    FINISHED = "finished"
    TIDIED = "tidied"
    RETURNING = "returning"


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
        # A test waits for the file with the suffix `.here`, which means that this process has reached the failpoint.
        armed.with_suffix(".here").touch()
        time.sleep(_POLL_SECONDS)
    armed.with_suffix(".here").unlink(missing_ok=True)
