# SPDX-License-Identifier: Apache-2.0
"""A checksum of the sources of a daemon. The agent replaces a running daemon whose checksum differs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from zlib import crc32


def source_checksum(packages: Iterable[str], elsewhere: Iterable[str]) -> str:
    """Return a checksum of the present sources of a daemon, of this file, and of the version of Python.

    Args:
        packages: folders of the agent's package whose modules all count.
        elsewhere: files of other folders that the daemon imports. Paths are relative to the agent's package.

    Raises:
        OSError: a source cannot be read.
    """
    # Each daemon imports this module. pathlib or a digest other than crc32 would cost each daemon a megabyte of memory,
    # so the module uses neither.
    agent = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    own = sorted(
        entry.path
        for package in packages
        for entry in os.scandir(os.path.join(agent, package))  # noqa: PTH118
        if entry.name.endswith(".py")
    )
    total = crc32(sys.version.encode())
    for file in (*own, __file__, *(os.path.join(agent, name) for name in elsewhere)):  # noqa: PTH118
        with open(file, "rb") as source:  # noqa: PTH123
            total = crc32(source.read(), total)
    return f"{total:08x}"
