# SPDX-License-Identifier: Apache-2.0
"""The version of the sources and of the Python that a responder runs."""

from __future__ import annotations

import os
import sys
from zlib import crc32

_SUMS = ("stats/__init__.py", "stats/former_workers.py")
_NETWORK = ("network/__init__.py", "network/icmp_echo.py")
# The list has the files outside the responder's package that the responder imports. A unit test compares the list with
# the imports.
ELSEWHERE = ("__init__.py", "errors.py", "haproxy/__init__.py", "haproxy/runtime_socket.py", *_NETWORK, *_SUMS)


def version() -> str:
    """Return a checksum of the present sources. A digest library would need a third of all memory."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib needs a megabyte)
    own = sorted(entry.path for entry in os.scandir(here) if entry.name.endswith(".py"))
    total = crc32(sys.version.encode())
    for file in (*own, *(os.path.join(here, "..", name) for name in ELSEWHERE)):  # noqa: PTH118
        with open(file, "rb") as source:  # noqa: PTH123
            total = crc32(source.read(), total)
    return f"{total:08x}"
