# SPDX-License-Identifier: Apache-2.0
"""What the kernel has counted, over exchanges of its table.

Invariant: pure. What `visible` says of a virtual server never falls as long as this lives, or is restored from
`document`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from amphora_agent.l4.engine import Counters

SUMMED = ("total_connections", "bytes_in", "bytes_out", "request_errors")
# Of virtual servers that are gone; they may come back.
MOST_FORMER = 500
_Sums = tuple[int, ...]
_NOTHING: _Sums = (0,) * len(SUMMED)


class Counted:
    """Sums by virtual server.

    Attributes:
        birth: the name of these sums; others that begin at zero have another one.
    """

    def __init__(self) -> None:
        self.birth = os.urandom(8).hex()
        self._settled: dict[str, _Sums] = {}
        self._last: dict[str, _Sums] = {}
        self._active: dict[str, int] = {}

    def read(self, now: Mapping[str, Counters]) -> bool:
        """Take note of what the kernel says; whether it has begun anew somewhere since the last time."""
        anew = False
        found = {name: tuple(getattr(one, field) for field in SUMMED) for name, one in now.items()}
        for name, before in self._last.items():
            present = found.get(name, _NOTHING)
            if any(one < other for one, other in zip(present, before, strict=True)):
                earlier = self._settled.pop(name, _NOTHING)
                self._settled[name] = tuple(one + other for one, other in zip(earlier, before, strict=True))
                anew = True
        self._last = found
        self._active = {name: one.active_connections for name, one in now.items()}
        for name in [name for name in self._settled if name not in found][:-MOST_FORMER]:
            del self._settled[name]
        return anew

    def visible(self, name: str) -> Counters:
        """A virtual server's counters; active connections are those of now."""
        settled, last = self._settled.get(name, _NOTHING), self._last.get(name, _NOTHING)
        total, received, sent, errors = (one + other for one, other in zip(settled, last, strict=True))
        return Counters(self._active.get(name, 0), total, received, sent, errors)

    @property
    def names(self) -> set[str]:
        """All of which anything is known."""
        return {*self._settled, *self._last}

    def document(self) -> dict[str, Any]:
        """For the disk."""
        return {"birth": self.birth, "columns": SUMMED, "settled": self._settled, "last": self._last}

    @classmethod
    def restored(cls, value: Any) -> Counted:
        """What `document` made.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        if tuple(value["columns"]) != SUMMED:
            raise ValueError("other columns")
        counted = cls()
        counted.birth = str(value["birth"])
        for name in ("settled", "last"):
            kept = {str(key): tuple(map(int, sums)) for key, sums in value[name].items()}
            if any(len(sums) != len(SUMMED) for sums in kept.values()):
                raise ValueError("too few numbers")
            setattr(counted, f"_{name}", kept)
        return counted
