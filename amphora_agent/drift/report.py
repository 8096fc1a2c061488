# SPDX-License-Identifier: Apache-2.0
"""What of this machine was found to differ from what it has confirmed.

Invariant: pure memory. What could not be mended is said until it is as confirmed; what was mended is said too, the last
of it, so that whoever changed the machine by hand, or wonders who did, finds it. Lists and sentences are short whatever
was found: they travel in every heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What one report holds: sentences, and characters of each.
_MOST_SENTENCES, _LONGEST_SENTENCE = 5, 160


@dataclass(frozen=True)
class Difference:
    """One thing that is not as confirmed.

    ``word`` is one of those of docs/heartbeat.md; ``sentence`` is for a person and holds no secret.
    """

    word: str
    sentence: str


@dataclass(frozen=True)
class Found:
    """What one look has found; ``at`` is in seconds since 1970."""

    at: float
    differences: tuple[Difference, ...]
    mended: bool

    def document(self) -> dict[str, Any]:
        """For a heartbeat, and for ``GET /v2/info``."""
        told = [one.sentence[:_LONGEST_SENTENCE] for one in self.differences[:_MOST_SENTENCES]]
        return {"at": round(self.at, 3), "words": words(self.differences), "what": told, "mended": self.mended}


def words(differences: Iterable[Difference]) -> list[str]:
    """Each word once, in order."""
    return sorted({one.word for one in differences})


def both(first: Sequence[Difference], second: Sequence[Difference]) -> tuple[Difference, ...]:
    """What two looks have found, as the later one says it: what only one of them saw was in transit."""
    before = {one.word for one in first}
    return tuple(one for one in second if one.word in before)


class Drift:
    """What was found since the agent began. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Found | None = None
        self._left: tuple[Difference, ...] = ()
        self._counts: Counter[str] = Counter()
        self._looks = 0

    def looked(self) -> None:
        """A look was taken."""
        with self._lock:
            self._looks += 1

    def found(self, differences: Sequence[Difference], left: Sequence[Difference]) -> None:
        """Something was found, and all of it but what is `left` was mended."""
        with self._lock:
            new = {one.word for one in differences} - {one.word for one in self._left}
            self._counts.update(new)
            # One that stays is told with the time at which it was found first.
            if new or self._last is None or not left:
                self._last = Found(time.time(), tuple(differences), mended=not left)
            self._left = tuple(left)

    def nothing(self) -> None:
        """Everything is as confirmed."""
        with self._lock:
            self._left = ()

    @property
    def left(self) -> tuple[Difference, ...]:
        """What is not as confirmed, and could not be mended."""
        return self._left

    def heartbeat(self) -> dict[str, Any]:
        """What a heartbeat says of it; nothing where nothing was ever found."""
        with self._lock:
            said: dict[str, Any] = {} if self._last is None else {"drifted": self._last.document()}
            if self._left:
                said["drift"] = words(self._left)
            return said

    def document(self) -> Mapping[str, Any]:
        """What ``GET /v2/info`` shows; ``left`` are the words of what could not be mended."""
        with self._lock:
            last = None if self._last is None else self._last.document()
            return {"last": last, "left": words(self._left), "found": dict(self._counts), "looks": self._looks}
