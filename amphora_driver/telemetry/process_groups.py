# SPDX-License-Identifier: Apache-2.0
"""Groups processes of the control plane by kind and host, and finds dead ones that were replaced.

Invariant: the functions do no I/O. A killed process cannot delete its row in the registry, so the row of a dead process
alone is no problem. A process is missing only if no process of its kind and host has started after its death.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from amphora_driver.store.process_registry import HEARTBEAT_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A process is dead after five missed heartbeats.
DEAD_AFTER = 5 * HEARTBEAT_INTERVAL
# A group of processes is in a restart loop if at least _LOOP_DEATHS of them were replaced within LOOP_SECONDS seconds.
LOOP_SECONDS = 600.0
_LOOP_DEATHS = 3


class _Process(Protocol):
    """The columns of a process that the groups depend on."""

    @property
    def kind(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def started_at(self) -> float: ...
    @property
    def seen_at(self) -> float: ...


P = TypeVar("P", bound=_Process)


class ProcessGroup(msgspec.Struct, Generic[P], frozen=True, kw_only=True):
    """The processes of one kind on one host, each list with the oldest last heartbeat first.

    Attributes:
        alive: processes with a recent heartbeat.
        replaced: dead processes, each with a successor that started after its last heartbeat.
        missing: dead processes without a successor.
    """

    kind: str
    host: str
    alive: tuple[P, ...] = ()
    replaced: tuple[P, ...] = ()
    missing: tuple[P, ...] = ()

    def recent_deaths(self, now: float) -> int:
        """Return the number of replaced processes that died within the last `LOOP_SECONDS`."""
        return sum(now - one.seen_at <= LOOP_SECONDS for one in self.replaced)

    def restarts_repeatedly(self, now: float) -> bool:
        """Whether processes of the group end and are replaced again and again."""
        return self.recent_deaths(now) >= _LOOP_DEATHS


def group_processes(processes: Iterable[P], now: float) -> tuple[ProcessGroup[P], ...]:
    """Return the processes by kind and host, in the order of kind and host."""
    found: dict[tuple[str, str], list[P]] = {}
    for one in processes:
        found.setdefault((one.kind, one.host), []).append(one)
    return tuple(_build_group(kind, host, ones, now) for (kind, host), ones in sorted(found.items()))


def _build_group(kind: str, host: str, processes: Sequence[P], now: float) -> ProcessGroup[P]:
    ordered = sorted(processes, key=lambda one: one.seen_at)
    alive = tuple(one for one in ordered if now - one.seen_at <= DEAD_AFTER)
    dead = [one for one in ordered if now - one.seen_at > DEAD_AFTER]
    # Each start of a process replaces at most one dead process. Of the dead processes without a successor, the start
    # replaces the process that died first.
    starts = sorted(one.started_at for one in processes)
    replaced, missing = [], []
    for one in dead:
        successor = next((at for at in starts if at > one.seen_at), None)
        if successor is None:
            missing.append(one)
        else:
            starts.remove(successor)
            replaced.append(one)
    return ProcessGroup(kind=kind, host=host, alive=alive, replaced=tuple(replaced), missing=tuple(missing))
