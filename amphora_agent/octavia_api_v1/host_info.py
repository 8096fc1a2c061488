# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine in the shape in which Octavia's API gives them.

Invariant: every figure is the kernel's own (proc(5)); where it has none, the answer is zero, not a guess.
"""

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
    """What GET details says of the machine: processors, memory (kB), disk (bytes), load, traffic (bytes)."""
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
    """Jiffies since boot. The parts are strings, their sum is a number: so is the API."""
    spent = dict(zip(_CPU, stat.split("\n", 1)[0].split()[1:], strict=False))
    return {
        "total": sum(map(int, spent.values())),
        "user": spent.get("user", "0"),
        "system": spent.get("system", "0"),
        "soft_irq": spent.get("softirq", "0"),
    }


def memory(meminfo: str) -> dict[str, int]:
    """In kB."""
    found = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    return {name: found.get(field, 0) for name, field in _MEMORY.items()}


def networks(dev: str) -> dict[str, dict[str, int]]:
    """Bytes in and out of each interface but the loopback."""
    found = {}
    for line in dev.splitlines():
        name, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and name.strip() != "lo" and len(fields) >= 16:
            found[name.strip()] = {"network_tx": int(fields[8]), "network_rx": int(fields[0])}
    return found


def listeners(configuration: Configuration) -> list[dict[str, str]]:
    """What GET listeners says. Octavia's API calls every listener that is configured active."""
    return [
        {"status": "ACTIVE", "uuid": name, "type": _kind(section.setting("mode"), section.setting("bind"))}
        for name, section in configuration.frontends.items()
    ]


def _kind(mode: tuple[str, ...] | None, bind: tuple[str, ...] | None) -> str:
    if bind is not None and "ssl" in bind:
        return "TERMINATED_HTTPS"
    return mode[0].upper() if mode else "TCP"
