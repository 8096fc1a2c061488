# SPDX-License-Identifier: Apache-2.0
"""Drift that agents report in heartbeats: which amphorae need a push, and what to record.

Invariant: an amphora that reports unrepaired drift for longer than one heartbeat interval gets its configuration again.
The next push follows after a back-off that doubles, so that no amphora keeps a controller busy. Drift that an agent
repairs causes no push. An amphora has the mark "drifting" only while it reports drift.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from amphora_driver.health.amphora_reports import LastReport
from amphora_driver.health.status import LastDrift

_FIRST_BACKOFF, _MAX_BACKOFF = 30.0, 1800.0
# Drift of this kind means a missing network interface. The compute backend must attach the amphora's ports again.
_INTERFACE_KIND = "interface"
_MAX_KINDS = 8
# Minimum seconds between two records of drift of one amphora. Each record causes an UPDATE and a log line.
_NOTICE_INTERVAL = 10.0


class UnrepairedDrift(msgspec.Struct, frozen=True):
    """An amphora that needs its configuration again, and the reason.

    With `replug`, the compute backend has to attach its ports again. An unknown time of the drift is empty.
    """

    amphora_id: str
    confirmed: int
    kinds: str
    replug: bool
    found_at: str = ""


class DriftNotice(msgspec.Struct, frozen=True):
    """Drift that an agent has found: the time, and a complete sentence."""

    found_at: str
    sentence: str


class _DriftPeriod(msgspec.Struct):
    """A time during which an amphora reports unrepaired drift."""

    since: float
    pushed: float | None = None
    backoff: float = _FIRST_BACKOFF

    def is_due(self, now: float) -> bool:
        return self.pushed is None or now >= self.pushed + self.backoff


class DriftReports:
    """The amphorae that report drift, with `interval` seconds between two heartbeats."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._periods: dict[str, _DriftPeriod] = {}
        # For each amphora: when the agent found the last recorded drift, and when this process recorded it.
        self._noticed: dict[str, tuple[float, float]] = {}
        # Amphorae that have reported drift to this process. This process later records the end of their drift.
        self._reported: set[str] = set()

    def find_unrepaired(
        self, updated: Mapping[str, LastReport], confirmed: Mapping[str, int], now: float
    ) -> list[UnrepairedDrift]:
        """Return the amphorae that need a push because their agents cannot repair the drift."""
        found = []
        for amphora_id, last in updated.items():
            expected = confirmed.get(amphora_id, 0)
            period = self._periods.get(amphora_id)
            if not last.drift:
                # Drift that returns soon after a repair counts as the same drift, so the delay between two pushes keeps
                # growing.
                if period is not None and now > period.since + 2 * period.backoff:
                    del self._periods[amphora_id]
                continue
            if expected == 0 or last.generation != expected:
                continue
            if period is None:
                self._periods[amphora_id] = _DriftPeriod(now)
            elif last.read_at > period.since + self._interval and period.is_due(now):
                kinds = ", ".join(one[:32] for one in last.drift[:_MAX_KINDS])
                found_at = "" if last.drifted is None else _format_time(last.drifted.at)
                found.append(UnrepairedDrift(amphora_id, expected, kinds, _INTERFACE_KIND in last.drift, found_at))
        return found

    def find_changed_marks(
        self, updated: Mapping[str, LastReport], confirmed: Mapping[str, int], marked: AbstractSet[str]
    ) -> dict[str, bool]:
        """Return the new mark of each amphora whose drift mark differs from its report.

        The mark of an amphora that has never reported drift to this process stays: a controller may have found drift
        that the agent cannot detect.
        """
        changed = {}
        for amphora_id, last in updated.items():
            if not last.drift:
                if amphora_id not in marked:
                    self._reported.discard(amphora_id)
                elif amphora_id in self._reported:
                    changed[amphora_id] = False
                continue
            self._reported.add(amphora_id)
            period = self._periods.get(amphora_id)
            lasts = period is not None and last.read_at > period.since + self._interval
            if lasts and last.generation == confirmed.get(amphora_id, 0) and amphora_id not in marked:
                changed[amphora_id] = True
        return changed

    def record_pushes(self, unrepaired: list[UnrepairedDrift], now: float) -> None:
        """Start or double the back-off of these amphorae, after the database contains their pushes."""
        for one in unrepaired:
            period = self._periods.get(one.amphora_id)
            if period is not None:
                if period.pushed is not None:
                    period.backoff = min(2 * period.backoff, _MAX_BACKOFF)
                period.pushed = period.since = now

    def find_notices(self, updated: Mapping[str, LastReport], now: float) -> dict[str, DriftNotice]:
        """Return the unrecorded drift of these amphorae by amphora id, repaired or not.

        After a restart the result may repeat recorded drift. Drift within `_NOTICE_INTERVAL` of the previous notice
        waits for a later heartbeat.
        """
        return {
            amphora_id: _notice(drifted)
            for amphora_id, drifted in self._unrecorded(updated, now).items()
            if drifted.sentences
        }

    def record_notices(self, updated: Mapping[str, LastReport], now: float) -> None:
        """Remember the notices of these heartbeats, after they are written to the database."""
        self._noticed.update({one: (drifted.at, now) for one, drifted in self._unrecorded(updated, now).items()})

    def has_unrecorded(self, amphora_id: str, last: LastReport) -> bool:
        """Return whether a heartbeat reports drift without a notice, or the end of drift without its record."""
        drifted = last.drifted
        return amphora_id in self._reported or (
            drifted is not None and drifted.at != self._noticed.get(amphora_id, (None, 0.0))[0]
        )

    def _unrecorded(self, updated: Mapping[str, LastReport], now: float) -> dict[str, LastDrift]:
        found = {}
        for amphora_id, last in updated.items():
            at, noticed = self._noticed.get(amphora_id, (None, -_NOTICE_INTERVAL))
            if last.drifted is not None and last.drifted.at != at and now - noticed >= _NOTICE_INTERVAL:
                found[amphora_id] = last.drifted
        return found

    def retain(self, amphora_ids: set[str]) -> None:
        self._periods = {one: period for one, period in self._periods.items() if one in amphora_ids}
        self._noticed = {one: at for one, at in self._noticed.items() if one in amphora_ids}
        self._reported &= amphora_ids


def _format_time(at: float) -> str:
    try:
        return dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "unknown time"


def _notice(drift: LastDrift) -> DriftNotice:
    found_at = _format_time(drift.at)
    result = "repaired by its agent" if drift.repaired else "its agent could not repair"
    return DriftNotice(found_at, f"{found_at}, {result}: {'; '.join(drift.sentences)}")
