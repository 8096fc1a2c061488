# SPDX-License-Identifier: Apache-2.0
"""Counters of virtual servers and members, and sums over replacements of the kernel's table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, lt
from typing import Any

SUMMED = ("total_connections", "bytes_in", "bytes_out", "request_errors")
# Maximum number of removed virtual servers whose counters are kept. If a removed virtual server is added again, its
# counters continue, because counters must not decrease.
MAX_FORMER = 500
_Sums = tuple[int, ...]
_ZERO: _Sums = (0,) * len(SUMMED)


@dataclass(frozen=True)
class MemberCounters:
    """Counters of a member since the engine's process began to count; bytes as clients see them."""

    active_connections: int = 0
    total_connections: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class Counters(MemberCounters):
    """Counters of a virtual server since the kernel began to count."""

    request_errors: int = 0


MemberPlace = tuple[str, str]
"""A member by the id of its virtual server, and `Member.place`."""


class MonotonicCounters:
    """Sums by virtual server, which never fall. Sums that begin at zero have another ``birth``."""

    def __init__(self) -> None:
        self.birth = os.urandom(8).hex()
        self._settled: dict[str, _Sums] = {}
        self._last: dict[str, _Sums] = {}
        self._active: dict[str, int] = {}

    def update(self, now: Mapping[str, Counters]) -> bool:
        """Add the kernel's present counters; returns whether a counter has restarted since the last call."""
        restarted = False
        found = {name: tuple(getattr(one, field) for field in SUMMED) for name, one in now.items()}
        for name, before in self._last.items():
            if any(map(lt, found.get(name, _ZERO), before)):
                self._settled[name] = tuple(map(add, self._settled.pop(name, _ZERO), before))
                restarted = True
        self._last = found
        self._active = {name: one.active_connections for name, one in now.items()}
        for name in [name for name in self._settled if name not in found][:-MAX_FORMER]:
            del self._settled[name]
        return restarted

    def totals(self, name: str) -> Counters:
        """Return the totals of a virtual server; active connections are the present ones."""
        sums = map(add, self._settled.get(name, _ZERO), self._last.get(name, _ZERO))
        return Counters(active_connections=self._active.get(name, 0), **dict(zip(SUMMED, sums, strict=True)))

    @property
    def names(self) -> set[str]:
        return {*self._settled, *self._last}

    def to_document(self) -> dict[str, Any]:
        return {"birth": self.birth, "columns": SUMMED, "settled": self._settled, "last": self._last}

    @classmethod
    def from_document(cls, value: Any) -> MonotonicCounters:
        """Return the sums of a document of `to_document`; raises KeyError, TypeError or ValueError."""
        if tuple(value["columns"]) != SUMMED:
            raise ValueError("the stored counters have other columns")
        counted = cls()
        counted.birth = str(value["birth"])
        for name in ("settled", "last"):
            kept = {str(key): tuple(map(int, sums)) for key, sums in value[name].items()}
            if any(len(sums) != len(SUMMED) for sums in kept.values()):
                raise ValueError("a row of the stored counters has a wrong number of values")
            setattr(counted, f"_{name}", kept)
        return counted
