# SPDX-License-Identifier: Apache-2.0
"""Detects amphorae that use almost all of a limited resource, from the usage in their heartbeats.

Invariant: the result changes only if a resource stays above the limit, or clearly below it, for ten heartbeat
intervals. So a short burst changes nothing, and a usage around the limit causes no repeated writes to the database.
A heartbeat whose values were not read (overload) proves nothing about the usage.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_driver.health.amphora_reports import LastReport
from amphora_driver.model.amphora import Resource

# A mark says that an amphora is near a limit. The mark changes after contradicting heartbeats during this number of
# heartbeat intervals.
_HOLD_INTERVALS = 10
# A mark disappears only if the usage is more than this number of percentage points below the limit.
_HYSTERESIS = 10
_RESOURCES = tuple(one.value for one in Resource)


class NearLimits:
    """The amphorae whose marks are about to change.

    Args:
        interval: seconds between two heartbeats.
        limit: percentage of use from which an amphora is near a limit.
    """

    def __init__(self, interval: float, limit: int = 85) -> None:
        self._hold = _HOLD_INTERVALS * interval
        self._limit = limit
        # For each amphora and resource: the mark that heartbeats contradict, and the times of the first and the last of
        # these heartbeats whose values were read.
        self._changing: dict[tuple[str, str], tuple[bool, float, float]] = {}
        # `_counting` contains the amphorae in `_changing`.
        self._counting: set[str] = set()

    def needs_attention(self, amphora_id: str, usage: Mapping[str, int], marked: str) -> bool:
        """Return whether a heartbeat may contribute to a change of the mark."""
        if marked or amphora_id in self._counting:
            return True
        return bool(usage) and max(usage.values()) >= self._limit

    def find_changed(self, updated: Mapping[str, LastReport], marked: Mapping[str, str]) -> dict[str, str | None]:
        """Return the new mark of each amphora whose mark changes; None without a resource near its limit.

        Args:
            updated: the last heartbeat of each amphora with new heartbeats.
            marked: the recorded marks: names of resources, separated by commas.
        """
        changed: dict[str, str | None] = {}
        for amphora_id, last in updated.items():
            before = marked.get(amphora_id, "")
            known = set(before.split(","))
            near = [
                name
                for name in _RESOURCES
                if self._is_near((amphora_id, name), last.usage.get(name), last.read_at, known=name in known)
            ]
            names = ",".join(near)
            if names != before:
                changed[amphora_id] = names or None
            if any((amphora_id, name) in self._changing for name in _RESOURCES):
                self._counting.add(amphora_id)
            else:
                self._counting.discard(amphora_id)
        return changed

    def _is_near(self, key: tuple[str, str], used: int | None, read_at: float, *, known: bool) -> bool:
        if used is None and not known:
            # If HAProxy is too busy to answer, the agent reports no usage. For a resource without a mark, such a
            # heartbeat changes nothing.
            return False
        percent = used or 0
        contradicts = percent < self._limit - _HYSTERESIS if known else percent >= self._limit
        if not contradicts:
            self._changing.pop(key, None)
            return known
        mark, first, last = self._changing.get(key, (known, read_at, read_at))
        if mark is not known or read_at - last > self._hold:
            # The period of contradiction starts again if the mark has changed, or if the last contradicting heartbeat
            # is too old.
            first = read_at
        self._changing[key] = known, first, read_at
        return known if read_at - first < self._hold else not known

    def retain(self, amphora_ids: set[str]) -> None:
        """Forget deleted amphorae."""
        self._changing = {key: one for key, one in self._changing.items() if key[0] in amphora_ids}
        self._counting &= amphora_ids
