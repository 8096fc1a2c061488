# SPDX-License-Identifier: Apache-2.0
"""The operator that runs a command, as the database records it."""

from __future__ import annotations

import getpass
import socket

# Length of the columns that hold the result.
_MAX_LENGTH = 128


def operator_name() -> str:
    """Return the name of the operating system's user, in at most 128 characters.

    A process can run under a user id without an entry in the user database; the name is then "unknown".
    """
    try:
        return getpass.getuser()[:_MAX_LENGTH]
    except (KeyError, OSError):
        return "unknown"


def operator_at_host() -> str:
    """Return user@host, in at most 128 characters."""
    return f"{operator_name()}@{socket.gethostname()}"[:_MAX_LENGTH]
