# SPDX-License-Identifier: Apache-2.0
"""The version of the sources and of the Python that a log forwarder runs."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from zlib import crc32

# The process imports these files from outside its package. A unit test compares the list with the imports.
ELSEWHERE = ("__init__.py", "log_settings.py", "services/__init__.py", "services/output_lines.py")


@lru_cache(maxsize=1)
def version() -> str:
    """Return a checksum of the sources at the first call."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib needs a megabyte)
    own = sorted(entry.path for entry in os.scandir(here) if entry.name.endswith(".py"))
    total = crc32(sys.version.encode())
    for file in (*own, *(os.path.join(here, "..", name) for name in ELSEWHERE)):  # noqa: PTH118
        with open(file, "rb") as source:  # noqa: PTH123
            total = crc32(source.read(), total)
    return f"{total:08x}"
