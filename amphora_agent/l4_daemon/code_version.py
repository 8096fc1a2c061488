# SPDX-License-Identifier: Apache-2.0
"""Which code a checker runs.

Invariant: two checkers whose versions are equal were started from the same sources and the same Python.
"""

from __future__ import annotations

import os
import sys
from zlib import crc32

# What the checker imports from elsewhere; a test compares.
ELSEWHERE = (
    "__init__.py",
    "errors.py",
    "network/__init__.py",
    "network/libnftables.py",
    "responder/__init__.py",
    "network/icmp_echo.py",
)


def version() -> str:
    """A checksum of the sources as they are now."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is a megabyte)
    own = sorted(entry.path for entry in os.scandir(here) if entry.name.endswith(".py"))
    total = crc32(sys.version.encode())
    for file in (*own, *(os.path.join(here, "..", name) for name in ELSEWHERE)):  # noqa: PTH118
        with open(file, "rb") as source:  # noqa: PTH123
            total = crc32(source.read(), total)
    return f"{total:08x}"
