# SPDX-License-Identifier: Apache-2.0
"""Amphorae that say themselves that they are not what they confirmed.

Invariant: pure memory. An amphora that mends itself is only listened to. One that cannot, and says so for longer than
an interval, is to be given its configuration again; if that does not help, again after a pause that doubles: what an
amphora says must not keep a controller busy.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from amphora_driver.health.ledger import Seen

_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 1800.0
# Words of docs/heartbeat.md after which its ports have to be attached again.
_UNPLUGGED = "interface"
_MOST_WORDS = 8


class Broken(msgspec.Struct, frozen=True):
    """An amphora that is to be given its configuration again, and why; `replug` with its ports."""

    amphora_id: str
    confirmed: int
    words: str
    replug: bool


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
        self._told: dict[str, float] = {}

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
                found.append(Broken(amphora_id, expected, words, replug=_UNPLUGGED in seen.drift))
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

    def news(self, heard: Mapping[str, Seen]) -> dict[str, str]:
        """What amphorae have found of themselves that was not told before, in words, by amphora id."""
        found = {}
        for amphora_id, seen in heard.items():
            said = seen.drifted
            if said is not None and said.what and self._told.get(amphora_id) != said.at:
                found[amphora_id] = _sentence(said.at, said.what, mended=said.mended)
        return found

    def told(self, heard: Mapping[str, Seen]) -> None:
        """It was written down."""
        self._told |= {one: seen.drifted.at for one, seen in heard.items() if seen.drifted is not None}

    def keep(self, amphora_ids: set[str]) -> None:
        """Forget every amphora but these."""
        self._complaints = {one: complaint for one, complaint in self._complaints.items() if one in amphora_ids}
        self._told = {one: at for one, at in self._told.items() if one in amphora_ids}


def _sentence(at: float, what: tuple[str, ...], *, mended: bool) -> str:
    try:
        when = dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        when = "some time"
    verdict = "mended by its agent" if mended else "could not be mended by its agent"
    return f"{when}, {verdict}: {'; '.join(what)}"
