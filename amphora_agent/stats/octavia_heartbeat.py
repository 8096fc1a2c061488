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
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from amphora_agent.config import Settings, Target
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.stats.collector import Collector

_log = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0
# Format 3: pools are beside the listeners; traffic is the difference to the previous heartbeat.
VERSION = 3
# Octavia's names of the counters.
_TRAFFIC = {"tx": "bytes_out", "rx": "bytes_in", "totconns": "total_connections", "ereq": "request_errors"}

Reported = dict[str, dict[str, int]]


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
        amphora_id: the amphora.
        sequence: the number of the heartbeat.
        known: the result of `Collector.document`: counters since the first boot of the amphora.
        reported: the counters of the previous heartbeat by listener. Removed listeners stay, because they may return.
        draining: the members of weight 0, each with its backend. HAProxy 2.6 reports UP; Octavia expects DRAIN.
    """
    listeners = {}
    now = dict(reported)
    for name, found in known["listeners"].items():
        total = {short: int(found[field]) for short, field in _TRAFFIC.items()}
        before = reported.get(name, {})
        listeners[name] = {
            "status": found["status"],
            "stats": {
                **{short: _since(count, before.get(short, 0)) for short, count in total.items()},
                "conns": found["active_connections"],
            },
        }
        now[name] = total
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
    said = {"id": str(amphora_id), "seq": sequence, "ver": VERSION, "listeners": listeners, "pools": pools}
    return said, now


def _since(count: int, before: int) -> int:
    """Return the increase of a counter. A smaller value than before means that the counters were lost."""
    return count - before if count >= before else count


class OctaviaSender:
    """The thread that samples HAProxy and sends heartbeats to Octavia, to one controller in turn.

    Args:
        settings: targets, interval and key.
        paths: the files of the agent.
        collector: the statistics.
        draining: returns the members of weight 0, each with its backend.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        collector: Collector,
        draining: Callable[[], Collection[tuple[str, str]]],
    ) -> None:
        self._settings = settings
        self._file = paths.var / "octavia-reported.json"
        self._collector = collector
        self._draining = draining
        self._stopping = threading.Event()
        self._sequence = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._reported = self._restored()
        self._thread = threading.Thread(target=self._run, name="octavia-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

    def send_now(self) -> None:
        """Do nothing: Octavia expects heartbeats at the interval only."""

    def send_soon(self) -> None:
        """Do nothing, as `send_now`."""

    def errors(self) -> dict[str, dict[str, Any]]:
        """Return the number of failures and the last error, by target or task."""
        return dict(self._errors)

    def _restored(self) -> Reported:
        try:
            found: Reported = json.loads(self._file.read_text(encoding="utf-8"))
            return {name: {short: int(counts[short]) for short in _TRAFFIC} for name, counts in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("Cannot read the reported counters: %s; all counters are reported again", error)
            return {}

    def _run(self) -> None:
        step = min(SAMPLE_SECONDS, self._settings.interval)
        due = time.monotonic()
        while not self._stopping.is_set():
            try:
                self._collector.sample()
                if time.monotonic() >= due:
                    due = time.monotonic() + self._settings.interval
                    self._report()
            except Exception as error:  # noqa: BLE001 - a silent amphora would be replaced
                self._failed("report", error)
            self._stopping.wait(step)

    def _report(self) -> None:
        amphora, key = self._settings.amphora_id, self._settings.heartbeat_key
        known = self._collector.document(None)
        said, reported = document(amphora, self._sequence, known, self._reported, self._draining())
        try:
            self._collector.write()
            if reported != self._reported:
                write_atomically(self._file, json.dumps(reported), durable=False)
        except OSError as error:
            self._failed("write the counters", error)
        self._reported = reported
        targets = self._settings.targets
        if targets:
            target = targets[self._sequence % len(targets)]
            try:
                _send(target, encode(said, key))
            except OSError as error:
                self._failed(str(target), error)
        self._sequence += 1

    def _failed(self, what: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        known = self._errors.get(what)
        if known is None or known["last"] != text:
            _log.warning("Heartbeat: %s: %s", what, text)
        self._errors[what] = {"count": (known["count"] if known else 0) + 1, "last": text}


def _send(target: Target, datagram: bytes) -> None:
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        link.sendto(datagram, (target.host, target.port))
