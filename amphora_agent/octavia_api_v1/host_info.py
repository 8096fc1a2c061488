# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine in the format of Octavia's API. A missing figure is zero."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.network.namespace import Namespace

_PROC = Path("/proc")
_CPU = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
_MEMORY = {
    "total": "MemTotal",
    "free": "MemFree",
    "buffers": "Buffers",
    "cached": "Cached",
    "swap_used": "SwapCached",
    "shared": "Shmem",
    "slab": "Slab",
}


def figures(inner: Namespace) -> dict[str, Any]:
    """Return figures for GET details: processors, memory (kB), disk (bytes), load, traffic (bytes)."""
    disk = os.statvfs("/")
    return {
        "cpu_count": os.cpu_count() or 1,
        "cpu": cpu((_PROC / "stat").read_text(encoding="ascii")),
        "memory": memory((_PROC / "meminfo").read_text(encoding="ascii")),
        "disk": {"used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize, "available": disk.f_bavail * disk.f_frsize},
        "load": (_PROC / "loadavg").read_text(encoding="ascii").split()[:3],
        "networks": inner.run(lambda: networks((_PROC / "thread-self/net/dev").read_text(encoding="ascii"))),
    }


def cpu(stat: str) -> dict[str, Any]:
    """Return jiffies since boot. Octavia's API has strings for the parts, and a number for their sum."""
    spent = dict(zip(_CPU, stat.split("\n", 1)[0].split()[1:], strict=False))
    return {
        "total": sum(map(int, spent.values())),
        "user": spent.get("user", "0"),
        "system": spent.get("system", "0"),
        "soft_irq": spent.get("softirq", "0"),
    }


def memory(meminfo: str) -> dict[str, int]:
    """Return memory figures in kB."""
    found = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    return {name: found.get(field, 0) for name, field in _MEMORY.items()}


def networks(dev: str) -> dict[str, dict[str, int]]:
    """Return received and sent bytes of each interface except loopback."""
    found = {}
    for line in dev.splitlines():
        name, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and name.strip() != "lo" and len(fields) >= 16:
            found[name.strip()] = {"network_tx": int(fields[8]), "network_rx": int(fields[0])}
    return found


def listeners(configuration: Configuration) -> list[dict[str, str]]:
    """Return the answer of GET listeners. In Octavia's API every configured listener is active."""
    return [
        {"status": "ACTIVE", "uuid": name, "type": _kind(section.setting("mode"), section.setting("bind"))}
        for name, section in configuration.frontends.items()
    ]


def _kind(mode: tuple[str, ...] | None, bind: tuple[str, ...] | None) -> str:
    if bind is not None and "ssl" in bind:
        return "TERMINATED_HTTPS"
    return mode[0].upper() if mode else "TCP"
