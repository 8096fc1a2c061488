# SPDX-License-Identifier: Apache-2.0
"""The usage of this amphora's limited resources, in percent (docs/reference/heartbeat.md).

Invariant: a measurement never waits for another thread and never fails. A resource that cannot be measured is absent.
An amphora in a network namespace shares CPU and memory with others, so these resources are absent there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from amphora_agent.network.namespace import Namespace
from amphora_agent.stats.haproxy_stats import WorkerLoad

# CPU times of a short period are not exact. So a measurement is used again for this number of seconds.
_SECONDS = 2.0
# Seconds between two counts of file descriptors. Linux before version 6.2 needs 0.1 s to count 100,000.
_DESCRIPTOR_SECONDS = 15.0
# Age in seconds above which the heartbeat omits a result of the thread in HAProxy's network namespace. The thread may
# be blocked.
_OUTDATED_SECONDS = 15.0
_CONNTRACK = Path("/proc/sys/net/netfilter")
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)
_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)


class UsageMeter:
    """Measures the usage. Not thread-safe.

    Args:
        load: returns the connections of the present HAProxy worker; None if HAProxy does not answer.
        inner: the namespace with the tracked connections.
        shares_machine: whether other amphorae use the same CPU and memory.
    """

    def __init__(
        self,
        load: Callable[[], WorkerLoad | None],
        inner: Namespace,
        *,
        shares_machine: bool,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._inner = inner
        self._shares_machine = shares_machine
        self._proc = proc
        self._clock = clock
        self._measured: tuple[float, dict[str, int]] | None = None
        self._descriptors: tuple[float, int, int | None] | None = None
        self._cpu: tuple[int, int] | None = None
        self._tracked: Future[int | None] | None = None
        self._tracked_percent: int | None = None
        self._tracked_at = 0.0

    def measure(self) -> dict[str, int]:
        """Return the percentages by the names of the resources, at most `_SECONDS` old."""
        now = self._clock()
        if self._measured is None or now - self._measured[0] >= _SECONDS:
            self._measured = (now, self._measure(now))
        return self._measured[1]

    def _measure(self, now: float) -> dict[str, int]:
        found: dict[str, int | None] = {}
        load = self._load()
        if load is not None:
            found["connections"] = percent(load.connections, load.max_connections)
            found["listener_connections"] = load.listener_percent
            found["file_descriptors"] = self._count_descriptors(load.pid, now)
        if not self._shares_machine:
            found["cpu"] = self._read_cpu()
            found["memory"] = self._read_memory()
        found["conntrack"] = self._read_conntrack()
        return {name: value for name, value in found.items() if value is not None}

    def _count_descriptors(self, pid: int, now: float) -> int | None:
        """Return the part of HAProxy's file descriptors in use."""
        known = self._descriptors
        if known is None or known[1] != pid or now - known[0] >= _DESCRIPTOR_SECONDS:
            self._descriptors = known = (now, pid, _measure_descriptors(self._proc / str(pid)))
        return known[2]

    def _read_cpu(self) -> int | None:
        """Return the busy part of all processors since the previous measurement; None for the first one."""
        with suppress(OSError, ValueError, IndexError):
            times = cpu_times((self._proc / "stat").read_text(encoding="ascii"))
            before, self._cpu = self._cpu, times
            if before is not None:
                return percent(times[0] - before[0], times[1] - before[1])
        return None

    def _read_memory(self) -> int | None:
        with suppress(OSError, KeyError):
            return memory_percent((self._proc / "meminfo").read_text(encoding="ascii"))
        return None

    def _read_conntrack(self) -> int | None:
        """Return the tracked connections of the namespace, from its thread, which may be busy for a while."""
        if self._tracked is None or self._tracked.done():
            if self._tracked is not None:
                self._tracked_percent = None if self._tracked.exception() else self._tracked.result()
                self._tracked_at = self._clock()
            # A namespace that is closed, or cannot be entered, raises RuntimeError.
            with suppress(RuntimeError):
                self._tracked = self._inner.start(_measure_conntrack)
        return self._tracked_percent if self._clock() - self._tracked_at < _OUTDATED_SECONDS else None


def percent(used: int, limit: int) -> int | None:
    """Return the percentage in use, from 0 to 100; None without a limit."""
    return max(0, min(100, 100 * used // limit)) if limit > 0 else None


def cpu_times(stat: str) -> tuple[int, int]:
    """Return the busy time and the whole time of all processors, from /proc/stat (proc(5)).

    The times of guests are part of other columns, so columns after the eighth do not count.
    """
    times = [int(word) for word in stat.split("\n", 1)[0].split()[1:9]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)


def memory_percent(meminfo: str) -> int | None:
    """Return the part of the memory that is not available, from /proc/meminfo; raises KeyError."""
    sizes = {name: int(size) for name, size in _MEMORY.findall(meminfo)}
    return percent(sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"])


def _measure_descriptors(process: Path) -> int | None:
    with suppress(OSError):
        limit = _OPEN_FILES.search((process / "limits").read_text(encoding="ascii"))
        # Since version 6.2, Linux reports the number of file descriptors as the size of this directory.
        number = (process / "fd").stat().st_size or len(os.listdir(process / "fd"))  # noqa: PTH208 (iterdir is slower)
        return None if limit is None else percent(number, int(limit[1]))
    return None


def _measure_conntrack() -> int | None:
    with suppress(OSError, ValueError):
        count, limit = (
            int((_CONNTRACK / f"nf_conntrack_{name}").read_text(encoding="ascii")) for name in ("count", "max")
        )
        return percent(count, limit)
    return None
