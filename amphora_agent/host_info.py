# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about this machine.

Invariant: reads only, from /proc and the file systems. Sources: proc(5), statvfs(3).
"""

from __future__ import annotations

import os
import platform
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_MEMORY = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapTotal", "SwapFree", "Slab", "Shmem")


def versions() -> dict[str, str]:
    """What the agent itself stands on."""
    return {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION, "kernel": os.uname().release}


def memory() -> dict[str, int]:
    """Bytes, by the names of /proc/meminfo.

    Raises:
        OSError: there is no /proc.
    """
    found = {}
    for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in _MEMORY:
            found[name] = int(rest.split()[0]) * 1024
    return found


def load() -> dict[str, Any]:
    """Mean numbers of processes that want to run, and for how many seconds the machine has been up.

    Raises:
        OSError: there is no /proc.
    """
    uptime = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
    return {"load": list(os.getloadavg()), "processors": os.cpu_count(), "up_seconds": uptime}


def disk(*places: Path) -> dict[str, dict[str, int]]:
    """Bytes and files of the file systems in which these directories are.

    Raises:
        OSError: there is no such directory.
    """
    found = {}
    for place in places:
        said = os.statvfs(place)
        found[str(place)] = {
            "bytes": said.f_blocks * said.f_frsize,
            "available_bytes": said.f_bavail * said.f_frsize,
            "files": said.f_files,
            "available_files": said.f_favail,
        }
    return found


def processes() -> list[dict[str, Any]]:
    """Every process: its name, when it started (seconds since 1970) and the bytes it keeps in memory."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    booted = _booted()
    found = []
    for place in _PROC.iterdir():
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile, or is no process
            pid = int(place.name)
            head, _, rest = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
            fields = rest.split()
            found.append(
                {
                    "pid": pid,
                    "name": head.partition("(")[2],
                    "started": booted + int(fields[19]) / tick,
                    "resident_bytes": int(fields[21]) * page,
                }
            )
    return sorted(found, key=lambda one: one["pid"])


def _booted() -> float:
    for line in (_PROC / "stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
