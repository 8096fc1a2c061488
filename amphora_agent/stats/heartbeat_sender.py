# SPDX-License-Identifier: Apache-2.0
"""The sender of heartbeats (docs/reference/heartbeat.md): (epoch, sequence) grows with each datagram."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from amphora_agent.config import Settings
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats import heartbeat_codec
from amphora_agent.stats.active_sender import GIVE_WAY_SECONDS, Sender
from amphora_agent.stats.collector import Collector
from amphora_agent.stats.report_differences import ReportDifferences
from amphora_agent.version import agent_version


def next_epoch(paths: Paths) -> int:
    """Return a number greater than that of each former sender; the number is on disk before its first use."""
    last = 0
    with suppress(FileNotFoundError, ValueError):
        last = int(paths.epoch.read_text(encoding="ascii"))
    epoch = max(time.time_ns(), last + 1)
    try:
        write_atomically(paths.epoch, str(epoch))
    except OSError:
        # A full disk accepts no new file, so the agent overwrites the old file. The new number has as many digits and
        # replaces the old number completely.
        with paths.epoch.open("r+", encoding="ascii") as file:
            file.write(str(epoch))
            file.flush()
            os.fsync(file.fileno())
    return epoch


class HeartbeatSender(Sender):
    """Sends a heartbeat to all targets at each interval, and at once after a change of a member's status."""

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        collector: Collector,
        generation: Callable[[], int | None],
        holds_vip: Callable[[], bool | None],
        drift: Callable[[], dict[str, Any]],
        usage: Callable[[], dict[str, int]] = dict,
    ) -> None:
        super().__init__(settings, collector)
        self._paths = paths
        self._generation = generation
        self._holds_vip = holds_vip
        self._drift = drift
        self._usage = usage
        self._soon = False
        self._differences = ReportDifferences()
        self._is_complete = True
        self._epoch: int | None = None
        self._reported: dict[str, dict[str, str]] = {}

    def send_now(self) -> None:
        """Send a complete heartbeat at once; does not wait."""
        self._is_complete = True
        self._wakeup.set()

    def send_soon(self) -> None:
        """Send a heartbeat about a change.

        With many rows, the heartbeat is sent within a second, and may have the rows of the previous sample.
        """
        self._soon = True
        if not self._collector.is_large:
            self._wakeup.set()

    def _is_requested(self) -> bool:
        requested = self._wakeup.is_set() or self._soon or self._epoch is None
        self._wakeup.clear()
        self._soon = False
        return requested or self._collector.statuses() != self._reported

    def _send(self) -> None:
        work = self._collector.priority.background(GIVE_WAY_SECONDS)
        work.give_way()
        if self._epoch is None:
            self._epoch = next_epoch(self._paths)
        self._reported = self._collector.statuses()
        facts = {"agent_version": agent_version(), "holds_vip": self._holds_vip(), **self._drift()}
        facts["usage"] = self._usage()
        document = {**self._collector.document(self._generation()), **facts}
        try:
            self._collector.write(work)
        except OSError as error:
            self._record_error("write the counters", error)
        if self._is_complete:
            self._is_complete = False
            self._differences.forget()
        # All datagrams of a heartbeat use one copy of the settings, even if the settings change meanwhile. New settings
        # are stored before the request for a complete report, so a complete report always reaches the new targets.
        settings = self._settings
        difference = self._differences.find(document)
        first, sizes = self._sequence + 1, []
        amphora, key = settings.amphora_id, settings.heartbeat_key
        for datagram in heartbeat_codec.datagrams(amphora, key, self._epoch, first, difference or document):
            self._sequence += 1
            sizes.append(len(datagram))
            for target in settings.targets:
                self._send_to(target, datagram)
            work.give_way()
        if difference is None:
            self._differences.record(document, first, sizes)
