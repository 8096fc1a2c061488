# SPDX-License-Identifier: Apache-2.0
"""Versions, memory, load, disks and processes of this machine, for diagnostics.

Invariant: the functions import psutil at the first call, because the agent serves without psutil.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import ssl
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Return the versions of Python, OpenSSL and the kernel."""
    return {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION, "kernel": os.uname().release}


@cache
def program_version(program: str) -> str | None:
    """Return the version that a program reports; None if the program is not installed."""
    try:
        result = subprocess.run([program, "-v"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv?(\d+\.\d+\.\d+\S*)", result.stdout + result.stderr)
    return found.group(1) if found else None


def memory() -> dict[str, int]:
    """Return the memory of the machine in bytes."""
    import psutil  # noqa: PLC0415 - see the invariant

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        **{name: getattr(ram, name) for name in ("total", "available", "free", "buffers", "cached", "shared", "slab")},
        "swap_total": swap.total,
        "swap_free": swap.free,
    }


def load() -> dict[str, Any]:
    """Return the load averages, the number of processors, and the seconds since boot."""
    import psutil  # noqa: PLC0415 - see the invariant

    return {
        "load": list(psutil.getloadavg()),
        "processors": psutil.cpu_count(),
        "up_seconds": time.time() - psutil.boot_time(),
    }


def disk(*directories: Path) -> dict[str, dict[str, int]]:
    """Return the size in bytes and the number of files of the file systems of some existing directories."""
    found = {}
    for directory in directories:
        usage, files = shutil.disk_usage(directory), os.statvfs(directory)
        found[str(directory)] = {
            "bytes": usage.total,
            "available_bytes": usage.free,
            "files": files.f_files,
            "available_files": files.f_favail,
        }
    return found


def processes() -> list[dict[str, Any]]:
    """Return all processes: id, name, start (seconds since 1970) and resident memory in bytes."""
    import psutil  # noqa: PLC0415 - see the invariant

    found = [one.info for one in psutil.process_iter(("pid", "name", "create_time", "memory_info"))]
    return [
        {
            "pid": one["pid"],
            "name": one["name"],
            "started": one["create_time"],
            "resident_bytes": one["memory_info"].rss if one["memory_info"] is not None else 0,
        }
        for one in sorted(found, key=lambda one: one["pid"])
    ]
