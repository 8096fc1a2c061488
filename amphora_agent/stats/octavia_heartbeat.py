# SPDX-License-Identifier: Apache-2.0
"""Heartbeats in the format of Octavia's own health manager (docs/reference/amphora-api-v1.md).

Invariant: no traffic is reported twice. The reported counters are on disk before the datagram is sent: a lost datagram
is not repeated, also after a restart of the agent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from amphora_agent.config import Settings
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats.active_sender import Sender
from amphora_agent.stats.collector import Collector

_log = logging.getLogger(__name__)
# Version of Octavia's heartbeat format in which each heartbeat has the traffic since the previous one.
VERSION = 3
# Octavia's short names of the traffic counters, and the agent's names.
_TRAFFIC = {"tx": "bytes_out", "rx": "bytes_in", "totconns": "total_connections", "ereq": "request_errors"}

Reported = dict[str, dict[str, int]]
Draining = Callable[[], Collection[tuple[str, str]]]
"""Returns the members of weight 0, each with its backend."""


def encode(document: Mapping[str, Any], key: bytes) -> bytes:
    """Return a datagram: the compressed document and its HMAC in hexadecimal."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)
    return packed + hmac.new(key, packed, hashlib.sha256).hexdigest().encode()


def document(
    amphora_id: uuid.UUID,
    sequence: int,
    known: Mapping[str, Any],
    reported: Reported,
    draining: Collection[tuple[str, str]] = (),
) -> tuple[dict[str, Any], Reported]:
    """Return the content of a heartbeat, and the counters that it reports.

    Args:
        known: the result of `Collector.document`: counters since the first boot of the amphora.
        reported: the counters of the previous heartbeat by listener. Removed listeners stay, because they may return.
        draining: the members of weight 0, each with its backend. HAProxy 2.6 reports UP; Octavia expects DRAIN.
    """
    listeners = {}
    now = dict(reported)
    for name, found in known["listeners"].items():
        now[name] = {short: int(found[field]) for short, field in _TRAFFIC.items()}
        before = reported.get(name, {})
        stats = {short: _increase(count, before.get(short, 0)) for short, count in now[name].items()}
        listeners[name] = {"status": found["status"], "stats": {**stats, "conns": found["active_connections"]}}
    pools = {
        name: {
            "status": pool["status"],
            "members": {
                member: "DRAIN" if word == "UP" and (name, member) in draining else word
                for member, word in pool["members"].items()
            },
        }
        for name, pool in known["pools"].items()
    }
    return {"id": str(amphora_id), "seq": sequence, "ver": VERSION, "listeners": listeners, "pools": pools}, now


def _increase(count: int, before: int) -> int:
    """Return the increase of a counter. After a loss of the counters, the whole count is an increase."""
    return count - before if count >= before else count


class OctaviaSender(Sender):
    """Sends heartbeats to Octavia at the interval, to one controller in turn."""

    def __init__(self, settings: Settings, paths: Paths, collector: Collector, draining: Draining) -> None:
        super().__init__(settings, collector)
        self._file = paths.var / "octavia-reported.json"
        self._draining = draining
        self._reported = self._restored()

    def _restored(self) -> Reported:
        try:
            found: Reported = json.loads(self._file.read_text(encoding="utf-8"))
            return {name: {short: int(counts[short]) for short in _TRAFFIC} for name, counts in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning(
                "The agent cannot read which traffic it has reported to Octavia (file %s), and reports all traffic "
                "again: %s",
                self._file,
                error,
            )
            return {}

    def _send(self) -> None:
        known = self._collector.document(None)
        said, reported = document(self._settings.amphora_id, self._sequence, known, self._reported, self._draining())
        try:
            self._collector.write()
            if reported != self._reported:
                write_atomically(self._file, json.dumps(reported), durable=False)
        except OSError as error:
            self._record_error("write the counters", error)
        self._reported = reported
        if targets := self._settings.targets:
            self._send_to(targets[self._sequence % len(targets)], encode(said, self._settings.heartbeat_key))
        self._sequence += 1
