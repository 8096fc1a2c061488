# SPDX-License-Identifier: Apache-2.0
"""Amphorae that say themselves that they are not what they confirmed.

Invariant: pure memory. An amphora that mends itself is only listened to. One that cannot, and says so for longer than
an interval, is to be given its configuration again; if that does not help, again after a pause that doubles: what an
amphora says must not keep a controller busy. It is marked as not as wanted as long as it says so, and no longer.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from amphora_driver.health.amphora_reports import Seen

_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 1800.0
# Words of docs/reference/heartbeat.md after which its ports have to be attached again.
_UNPLUGGED = "interface"
_MOST_WORDS = 8
# Seconds between two notes about one amphora: each is an UPDATE and a line of the log.
_NEWS_PAUSE = 10.0


class Broken(msgspec.Struct, frozen=True):
    """An amphora that is to be given its configuration again, and why; `replug` with its ports.

    `moment` is when it found that, as `News` has it; empty where it did not say.
    """

    amphora_id: str
    confirmed: int
    words: str
    replug: bool
    moment: str = ""


class News(msgspec.Struct, frozen=True):
    """What an amphora has found of itself: when, and the whole of it, in words."""

    moment: str
    sentence: str


class _Complaint(msgspec.Struct):
    since: float
    pushed: float | None = None
    pause: float = _FIRST_PAUSE


class Drifts:
    """Who complains.

    Args:
        interval: seconds between an amphora's heartbeats.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._complaints: dict[str, _Complaint] = {}
        # The last note of each amphora: the moment that the amphora said, and when it was told.
        self._told: dict[str, tuple[float, float]] = {}
        # Amphorae that have complained, until their marks are known to be removed.
        self._complained: set[str] = set()

    def among(self, heard: Mapping[str, Seen], confirmed: Mapping[str, int], now: float) -> list[Broken]:
        """Those of the amphorae just heard that cannot mend themselves.

        Args:
            heard: the last heartbeat of each.
            confirmed: the newest generation each of them confirmed, read after they were heard.
            now: on `time.monotonic()`'s clock, after that reading.
        """
        found = []
        for amphora_id, seen in heard.items():
            expected = confirmed.get(amphora_id, 0)
            complaint = self._complaints.get(amphora_id)
            if not seen.drift:
                # One that complains again at once has not been well: its pause goes on growing.
                if complaint is not None and now > complaint.since + 2 * complaint.pause:
                    del self._complaints[amphora_id]
                continue
            if expected == 0 or seen.generation != expected:
                continue
            if complaint is None:
                self._complaints[amphora_id] = _Complaint(now)
            elif seen.monotonic > complaint.since + self._interval and self._is_due(complaint, now):
                words = ", ".join(one[:32] for one in seen.drift[:_MOST_WORDS])
                moment = "" if seen.drifted is None else _moment(seen.drifted.at)
                found.append(Broken(amphora_id, expected, words, replug=_UNPLUGGED in seen.drift, moment=moment))
        return found

    def marks(
        self, heard: Mapping[str, Seen], confirmed: Mapping[str, int], marked: AbstractSet[str]
    ) -> dict[str, bool]:
        """Whose mark is not what it says of itself, and what the mark should be.

        Who has never complained here is left as it is: a controller may have found what its agent cannot know of.

        Args:
            heard: the last heartbeat of each.
            confirmed: the newest generation each of them confirmed.
            marked: those that are marked as not as wanted.
        """
        found = {}
        for amphora_id, seen in heard.items():
            if not seen.drift:
                if amphora_id not in marked:
                    self._complained.discard(amphora_id)
                elif amphora_id in self._complained:
                    found[amphora_id] = False
                continue
            self._complained.add(amphora_id)
            complaint = self._complaints.get(amphora_id)
            lasts = complaint is not None and seen.monotonic > complaint.since + self._interval
            if lasts and seen.generation == confirmed.get(amphora_id, 0) and amphora_id not in marked:
                found[amphora_id] = True
        return found

    @staticmethod
    def _is_due(complaint: _Complaint, now: float) -> bool:
        return complaint.pushed is None or now >= complaint.pushed + complaint.pause

    def settled(self, broken: list[Broken], now: float) -> None:
        """These were written down."""
        for one in broken:
            complaint = self._complaints.get(one.amphora_id)
            if complaint is not None:
                if complaint.pushed is not None:
                    complaint.pause = min(2 * complaint.pause, _LONGEST_PAUSE)
                complaint.pushed = complaint.since = now

    def news(self, heard: Mapping[str, Seen], now: float) -> dict[str, News]:
        """What amphorae have found of themselves that was not told before, by amphora id.

        After a restart that may be something old, which the row contains already. A finding that follows another one
        within `_NEWS_PAUSE` is told with a later heartbeat.

        Args:
            now: on `time.monotonic()`'s clock.
        """
        found = {}
        for amphora_id, seen in heard.items():
            said = seen.drifted
            at, told = self._told.get(amphora_id, (None, -_NEWS_PAUSE))
            if said is not None and said.what and at != said.at and now - told >= _NEWS_PAUSE:
                found[amphora_id] = News(_moment(said.at), _sentence(said.at, said.what, mended=said.mended))
        return found

    def told(self, heard: Mapping[str, Seen], now: float) -> None:
        """These heartbeats' news was written down."""
        for one, seen in heard.items():
            at, told = self._told.get(one, (None, -_NEWS_PAUSE))
            if seen.drifted is not None and seen.drifted.at != at and now - told >= _NEWS_PAUSE:
                self._told[one] = (seen.drifted.at, now)

    def keep(self, amphora_ids: set[str]) -> None:
        """Forget every amphora but these."""
        self._complaints = {one: complaint for one, complaint in self._complaints.items() if one in amphora_ids}
        self._told = {one: at for one, at in self._told.items() if one in amphora_ids}
        self._complained &= amphora_ids


def _moment(at: float) -> str:
    try:
        return dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "some time"


def _sentence(at: float, what: tuple[str, ...], *, mended: bool) -> str:
    verdict = "mended by its agent" if mended else "could not be mended by its agent"
    return f"{_moment(at)}, {verdict}: {'; '.join(what)}"
