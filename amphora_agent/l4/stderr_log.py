# SPDX-License-Identifier: Apache-2.0
"""The log of the L4 daemon: lines on standard error for the service manager."""

from __future__ import annotations

import sys


def log(text: str) -> None:
    """Write a line without delay."""
    sys.stderr.write(f"checker: {text}\n")
    sys.stderr.flush()
