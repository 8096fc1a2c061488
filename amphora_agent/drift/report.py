# SPDX-License-Identifier: Apache-2.0
"""The drift report: the differences between this amphora and its confirmed bundle.

Invariant: the last repaired difference stays in the report and explains why the agent reverted a change. Lists and
sentences are short, because each heartbeat carries them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A report of drift has at most _MAX_SENTENCES sentences of _MAX_SENTENCE_LENGTH characters.
_MAX_SENTENCES, _MAX_SENTENCE_LENGTH = 5, 160


@dataclass(frozen=True)
class Difference:
    """One difference from the confirmed bundle.

    ``kind`` is one of the words in docs/reference/heartbeat.md; ``sentence`` is for operators and holds no secret.
    """

    kind: str
    sentence: str


@dataclass(frozen=True)
class Finding:
    """The differences that one check has found; ``at`` is in seconds since 1970."""

    at: float
    differences: tuple[Difference, ...]
    repaired: bool

    def document(self) -> dict[str, Any]:
        sentences = [one.sentence[:_MAX_SENTENCE_LENGTH] for one in self.differences[:_MAX_SENTENCES]]
        found = {"at": round(self.at, 3), "kinds": kinds(self.differences), "sentences": sentences}
        return {**found, "repaired": self.repaired}


def kinds(differences: Iterable[Difference]) -> list[str]:
    """Return the sorted kinds of the differences."""
    return sorted({one.kind for one in differences})


def seen_twice(first: Sequence[Difference], second: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the second check's differences of kinds that both checks have found."""
    before = {one.kind for one in first}
    return tuple(one for one in second if one.kind in before)


class DriftReport:
    """The findings since the agent started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Finding | None = None
        self._unrepaired: tuple[Difference, ...] = ()
        self._counts: Counter[str] = Counter()
        self._checks = 0

    def count_check(self) -> None:
        with self._lock:
            self._checks += 1

    def record(self, differences: Sequence[Difference], unrepaired: Sequence[Difference]) -> None:
        """Record differences; all except the `unrepaired` ones were repaired."""
        with self._lock:
            new = {one.kind for one in differences} - {one.kind for one in self._unrepaired}
            self._counts.update(new)
            # The report keeps the time at which the agent first found a difference, until the difference is repaired.
            if new or self._last is None or not unrepaired:
                self._last = Finding(time.time(), tuple(differences), repaired=not unrepaired)
            self._unrepaired = tuple(unrepaired)

    def clear(self) -> None:
        with self._lock:
            self._unrepaired = ()

    @property
    def unrepaired(self) -> tuple[Difference, ...]:
        """The differences that a repair did not remove."""
        return self._unrepaired

    def heartbeat(self) -> dict[str, Any]:
        """Return the keys for a heartbeat; empty if no check has found a difference."""
        with self._lock:
            keys: dict[str, Any] = {} if self._last is None else {"drifted": self._last.document()}
            if self._unrepaired:
                keys["drift"] = kinds(self._unrepaired)
            return keys

    def document(self) -> Mapping[str, Any]:
        """Return the report for ``GET /v2/info``."""
        with self._lock:
            last = None if self._last is None else self._last.document()
            unrepaired = kinds(self._unrepaired)
            return {"last": last, "unrepaired": unrepaired, "counts": dict(self._counts), "checks": self._checks}
