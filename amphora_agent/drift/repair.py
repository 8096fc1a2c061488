# SPDX-License-Identifier: Apache-2.0
"""Repairs configuration drift: checks periodically, and applies the confirmed bundle again.

Invariant: no repair runs during a change, and none without two checks that found the same kind of difference. The agent
retries an unsuccessful repair with an increasing back-off. The back-off also applies if the same difference returns
soon after a repair, so that HAProxy does not reload at each check. Checks take at most 1/`DUTY_DIVISOR` of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from amphora_agent.drift.check import DriftChecker
from amphora_agent.drift.report import Difference, DriftReport, kinds, seen_twice
from amphora_agent.errors import AgentError

_log = logging.getLogger(__name__)
DUTY_DIVISOR = 200
# Seconds between the first and the second check. The agent repairs only drift that both checks find.
_CONFIRM_SECONDS = 1.0
# Maximum back-off in checks. If drift returns after each repair, the agent repairs at every second check, then at every
# fourth, and so on.
_MAX_BACKOFF = 16
# If a kind of drift returns within this number of checks after a repair, the agent repairs less often.
_RECENT_CHECKS = 10


class DriftRepair:
    """Checks every `interval` seconds, and repairs, in its own thread.

    `on_finding` is called when the agent finds a difference, and when the difference is gone.
    """

    def __init__(
        self, checker: DriftChecker, report: DriftReport, interval: float, on_finding: Callable[[], None]
    ) -> None:
        self._checker = checker
        self._report = report
        self._interval = interval
        self._interval_changed = threading.Event()
        self._on_finding = on_finding
        self._min_pause = 0.0
        self._backoff, self._skip = 1, 0
        # Monotonic time at which each kind of drift was last found.
        self._seen: dict[str, float] = {}
        self._generation: int | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="audit", daemon=True).start()

    def set_interval(self, seconds: float) -> None:
        """Change the interval; the pause in progress counts as a part of it."""
        self._interval = seconds
        self._interval_changed.set()

    def _pause(self) -> None:
        begun = time.monotonic()
        while (left := begun + max(self._interval, self._min_pause) - time.monotonic()) > 0:
            self._interval_changed.wait(left)
            self._interval_changed.clear()

    def _run(self) -> None:
        while True:
            self._pause()
            try:
                self.check_and_repair()
            except AgentError as error:
                _log.warning(
                    "The agent failed to compare the amphora with its configuration, and retries in %.0f s: %s",
                    self._interval,
                    error,
                )
            except Exception:  # noqa: BLE001 (without this thread the agent would never repair drift again)
                _log.exception(
                    "The agent failed to compare the amphora with its configuration because of an unexpected error, "
                    "and retries in %.0f s",
                    self._interval,
                )

    def check_and_repair(self) -> None:
        """Check once, and repair the differences that a second check confirms. Raises AgentError."""
        first = self._check()
        if not first:
            if first is not None:
                self._record_intact()
            return
        time.sleep(min(_CONFIRM_SECONDS, self._interval))
        found = seen_twice(first, self._check() or ())
        if not found:
            return
        known, present = {one.kind for one in self._report.unrepaired}, {one.kind for one in found}
        returned = self._has_returned(present - known)
        if returned:
            _log.warning(
                "The agent repairs configuration drift less often, because drift of these kinds returned "
                "soon after a repair: %s",
                ", ".join(sorted(present - known)),
            )
            self._backoff = self._next_backoff()
            self._skip = self._backoff - 1
            self._report.record(found, found)
            self._on_finding()
        if (returned or present <= known) and self._skip > 0:
            self._skip -= 1
            return
        self._repair(found)

    def _has_returned(self, new: set[str]) -> bool:
        """Whether an earlier difference, which a repair or a push has removed, has returned."""
        if self._checker.generation != self._generation:
            # A new generation replaces the configuration, so earlier drift is forgotten.
            self._seen, self._generation = {}, self._checker.generation
        before = self._recent_kinds()
        self._seen = {kind: self._seen[kind] for kind in before}
        self._seen |= dict.fromkeys(new | {one.kind for one in self._report.unrepaired}, time.monotonic())
        return bool(new) and new <= before

    def _recent_kinds(self) -> set[str]:
        now, recent = time.monotonic(), _RECENT_CHECKS * max(self._interval, self._min_pause)
        return {kind for kind, at in self._seen.items() if now - at <= recent}

    def _next_backoff(self) -> int:
        return min(2 * self._backoff, _MAX_BACKOFF)

    def _check(self) -> tuple[Difference, ...] | None:
        start = time.monotonic()
        found = self._checker.differences()
        self._min_pause = (time.monotonic() - start) * DUTY_DIVISOR
        if found is not None:
            self._report.count_check()
        return found

    def _record_intact(self) -> None:
        self._skip = 0
        if not self._recent_kinds():
            self._backoff = 1
        if self._report.unrepaired:
            _log.info(
                "Configuration drift that the agent could not repair is gone, so the agent ends its "
                "repairs (kinds of drift: %s)",
                ", ".join(kinds(self._report.unrepaired)),
            )
            self._report.clear()
            self._on_finding()

    def _repair(self, found: Sequence[Difference]) -> None:
        for one in found:
            _log.warning("The agent found configuration drift on the amphora, and repairs it now: %s", one.sentence)
        try:
            self._checker.repair(found)
        except AgentError as error:
            _log.warning(
                "The agent could not repair configuration drift of the amphora, and tries again at a later check: %s",
                error,
            )
            unrepaired: tuple[Difference, ...] = tuple(found)
        else:
            # `_check` returns None while a change of the configuration runs. In this case, the repair counts as
            # successful, and the next periodic check finds remaining drift.
            unrepaired = self._check() or ()
        self._report.record(found, unrepaired)
        if unrepaired:
            self._skip, self._backoff = self._backoff - 1, self._next_backoff()
        else:
            _log.info("The agent has repaired the configuration drift of these kinds: %s", ", ".join(kinds(found)))
            self._skip = 0
        self._on_finding()
