# SPDX-License-Identifier: Apache-2.0
"""The version of the sources and of the Python that an L4 daemon runs."""

from __future__ import annotations

import os
import sys
from zlib import crc32

PACKAGES = ("l4", "l4_checks", "l4_daemon", "l4_flow_log", "l4_nftables")
# The L4 daemon imports these files from outside its packages, so its code version includes them. A unit test compares
# the list with the imports.
_NETWORK = ("network/__init__.py", "network/libnftables.py", "network/icmp_echo.py")
ELSEWHERE = ("__init__.py", "errors.py", "log_settings.py", *_NETWORK)


def version() -> str:
    """Return a checksum of the present source files and of the Python version."""
    # The L4 daemon does without pathlib, because the import of pathlib would need a megabyte of memory.
    agent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    own = sorted(
        entry.path
        for package in PACKAGES
        for entry in os.scandir(os.path.join(agent, package))  # noqa: PTH118
        if entry.name.endswith(".py")
    )
    total = crc32(sys.version.encode())
    for file in (*own, *(os.path.join(agent, name) for name in ELSEWHERE)):  # noqa: PTH118
        with open(file, "rb") as source:  # noqa: PTH123
            total = crc32(source.read(), total)
    return f"{total:08x}"
