# SPDX-License-Identifier: Apache-2.0
"""Events of a pair and stalls of the machine, to distinguish a product fault from a slow machine.

With the fast setting, a node becomes master after 0.6 s without advertisements. A machine that stalls for that long
moves the VIPs and resets their connections without a fault. The symptoms are the same as with a fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

_LOOK, _LATE = 0.05, 0.2
_MOST_LINES = 20
_WORDS = (" STATE", "advert", "Reload complete", "Starting Keepalived", "Stopp")


class Stalls:
    """A thread that wakes 20 times a second, and records its delays."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        """The due time (seconds since the epoch) and the delay of each late run."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stalls")
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic() + _LOOK
        while not self._over.wait(max(0.0, due - time.monotonic())):
            if (late := time.monotonic() - due) > _LATE:
                self.found.append((time.time() - late, late))
            due = time.monotonic() + _LOOK

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def transitions(lines: Iterable[str]) -> list[str]:
    """Return keepalived's last lines about VRRP states and their reasons."""
    return [line for line in lines if any(word in line for word in _WORDS)][-_MOST_LINES:]


def event_report(nodes: Iterable, stalls: Sequence[tuple[float, float]]) -> str:
    """Return the text for a failure report; never raises."""
    told = []
    for node in nodes:
        said: Sequence[str] = ("(the node has ended)",)
        with suppress(Exception):
            said = transitions(node.said("keepalived"))
        told += [f"{node}:", *(f"  {line}" for line in said)]
    told.append(f"stalls of this process of more than {_LATE} s:")
    told += [f"  {_clock(at)}: {late:.2f} s" for at, late in stalls[-_MOST_LINES:]]
    return "\n".join([*told, *([] if stalls else ["  none"])])


def _clock(moment: float) -> str:
    """Return a time in keepalived's format, with hundredths of a second."""
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f"{moment % 1:.2f}"[1:]
