# SPDX-License-Identifier: Apache-2.0
"""See to it that this machine stays what it has confirmed.

Invariant: never while a change is under way, and nothing is mended that was not seen twice. What differs is mended by
applying the confirmed bundle once more, as a repeated push does: there is no other way. What that does not mend is said
in the heartbeat, and tried again ever more seldom; so is what was mended and soon differs again: who writes it again
and again must not have HAProxy take a new worker at each look.

A look costs a few milliseconds. With thousands of members, or of certificates, it costs more, and is taken more seldom:
looking takes no more than one part in `SHARE` of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from amphora_agent.drift.report import Difference, Drift, both
from amphora_agent.errors import AgentError

_log = logging.getLogger(__name__)
SHARE = 200
# Between the look that finds something and the one that believes it, in seconds.
_AGAIN_SECONDS = 1.0
# How many times longer it is until what could not be mended is tried again, or what did not stay mended.
_MOST_PATIENCE = 16
# Looks within which what differs once more has not stayed mended.
_SOON = 10


class Audited(Protocol):
    """What can be looked at and mended (`Applier`)."""

    @property
    def generation(self) -> int | None:
        """The confirmed generation."""

    def differences(self) -> tuple[Difference, ...] | None:
        """What is not as confirmed; None while a change is under way, or if there is nothing to be."""

    def mend(self, found: Sequence[Difference]) -> None:
        """Apply what is confirmed once more. Raises `AgentError` if that fails."""


class Auditor:
    """Looks now and then, in a thread of its own.

    Args:
        audited: what is looked at.
        drift: where what is found is noted.
        interval: seconds between two looks.
        tell: called when something was found, or is well again.
    """

    def __init__(self, audited: Audited, drift: Drift, interval: float, tell: Callable[[], None]) -> None:
        self._audited = audited
        self._drift = drift
        self._interval = interval
        self._tell = tell
        self._pause = 0.0
        self._patience, self._skip = 1, 0
        # When each word was found last, on `time.monotonic()`'s clock.
        self._seen: dict[str, float] = {}
        self._generation: int | None = None

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="audit", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(max(self._interval, self._pause))
            try:
                self.audit()
            except AgentError as error:
                _log.warning("Looking for what was changed by hand: %s", error)
            except Exception:  # noqa: BLE001 (without this thread nothing would be mended, and nobody would notice)
                _log.exception("Looking for what was changed by hand")

    def audit(self) -> None:
        """Look once, and mend what is found.

        Raises:
            AgentError: it could not be found out.
        """
        first = self._look()
        if not first:
            if first is not None:
                self._well()
            return
        time.sleep(min(_AGAIN_SECONDS, self._interval))
        found = both(first, self._look() or ())
        if not found:
            return
        known, words = {one.word for one in self._drift.left}, {one.word for one in found}
        came_back = self._came_back(words - known)
        if came_back:
            _log.warning("Mended a while ago, and not as confirmed again: %s", ", ".join(sorted(words - known)))
            self._wait_longer()
            self._drift.found(found, found)
            self._tell()
        if (came_back or words <= known) and self._skip > 0:
            self._skip -= 1
            return
        self._mend(found)

    def _came_back(self, new: set[str]) -> bool:
        """Whether all of what differs now, and did not at the last look, differed a moment ago.

        Whoever mended it meanwhile: a push does so, too.
        """
        now, soon = time.monotonic(), _SOON * max(self._interval, self._pause)
        if self._audited.generation != self._generation:
            # A change has made another machine of it: what became of the one before says nothing.
            self._seen, self._generation = {}, self._audited.generation
        before = {word for word, at in self._seen.items() if now - at <= soon}
        self._seen = {word: self._seen[word] for word in before}
        self._seen |= dict.fromkeys(new | {one.word for one in self._drift.left}, now)
        return bool(new) and new <= before

    def _wait_longer(self) -> None:
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._skip = self._patience - 1

    def _look(self) -> tuple[Difference, ...] | None:
        begun = time.monotonic()
        found = self._audited.differences()
        self._pause = (time.monotonic() - begun) * SHARE
        if found is not None:
            self._drift.looked()
        return found

    def _well(self) -> None:
        self._skip = 0
        if not self._recently():
            self._patience = 1
        if self._drift.left:
            _log.info("What could not be mended is as confirmed again")
            self._drift.nothing()
            self._tell()

    def _recently(self) -> bool:
        """Whether anything was found that, if it is found again, has not stayed mended."""
        now, soon = time.monotonic(), _SOON * max(self._interval, self._pause)
        return any(now - at <= soon for at in self._seen.values())

    def _mend(self, found: Sequence[Difference]) -> None:
        for one in found:
            _log.warning("Not as confirmed: %s", one.sentence)
        try:
            self._audited.mend(found)
        except AgentError as error:
            _log.warning("What was changed by hand could not be mended: %s", error)
            left: tuple[Difference, ...] = tuple(found)
        else:
            # None: a push came, and is asked again next time.
            left = self._look() or ()
        self._drift.found(found, left)
        if left:
            self._skip, self._patience = self._patience - 1, min(2 * self._patience, _MOST_PATIENCE)
        else:
            _log.info("What was changed by hand is mended")
            self._skip = 0
        self._tell()
