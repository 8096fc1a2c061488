# SPDX-License-Identifier: Apache-2.0
"""Heartbeats as Octavia's own health manager reads them (docs/amphora-api-v1.md).

Invariant: no traffic is reported twice. What was counted is written down as reported before the datagram leaves, so
that one that is lost is lost, and a restart of the agent repeats nothing.
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
from amphora_agent.stats.collector import Ledger

_log = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0
# Pools stand beside the listeners, and traffic is what came since the heartbeat before.
VERSION = 3
# By Octavia's names: bytes out, bytes in, connections, errors in requests.
_TRAFFIC = {"tx": "bytes_out", "rx": "bytes_in", "totconns": "total_connections", "ereq": "request_errors"}

Reported = dict[str, dict[str, int]]


def seal(document: Mapping[str, Any], key: bytes) -> bytes:
    """A datagram: the packed document, then its HMAC in hexadecimal."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)
    return packed + hmac.new(key, packed, hashlib.sha256).hexdigest().encode()


def document(
    amphora_id: uuid.UUID,
    sequence: int,
    known: Mapping[str, Any],
    reported: Reported,
    draining: Collection[tuple[str, str]] = (),
) -> tuple[dict[str, Any], Reported]:
    """What a heartbeat says, and what has been reported once it was sent.

    Args:
        known: what `Ledger.document` gives: counters since the amphora was born.
        reported: those of the heartbeat before, by listener. Of one that is gone they are kept: it may come back.
        draining: the members of no weight, each with its backend. HAProxy 2.6 calls them up; Octavia has a word.
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
    """What came on top. If less is known than was reported, the sums were lost, and all of it is new."""
    return count - before if count >= before else count


class OctaviaSender:
    """The thread that samples HAProxy and reports to Octavia: each interval to one of the controllers, in turn.

    Args:
        draining: gives the members of no weight, each with its backend.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        ledger: Ledger,
        draining: Callable[[], Collection[tuple[str, str]]],
    ) -> None:
        self._settings = settings
        self._file = paths.var / "octavia-reported.json"
        self._ledger = ledger
        self._draining = draining
        self._end = threading.Event()
        self._sequence = 0
        self._errors: dict[str, dict[str, Any]] = {}
        self._reported = self._restored()
        self._thread = threading.Thread(target=self._run, name="octavia-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def send_now(self) -> None:
        """Octavia's amphorae report at their interval and at no other time; so does this one."""

    def send_soon(self) -> None:
        """Neither after a change."""

    def errors(self) -> dict[str, dict[str, Any]]:
        """By target or task: how often it failed and how the last time."""
        return dict(self._errors)

    def _restored(self) -> Reported:
        try:
            found: Reported = json.loads(self._file.read_text(encoding="utf-8"))
            return {name: {short: int(counts[short]) for short in _TRAFFIC} for name, counts in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("What was reported to Octavia is lost: %s", error)
            return {}

    def _run(self) -> None:
        step = min(SAMPLE_SECONDS, self._settings.interval)
        due = time.monotonic()
        while not self._end.is_set():
            try:
                self._ledger.sample()
                if time.monotonic() >= due:
                    due = time.monotonic() + self._settings.interval
                    self._report()
            except Exception as error:  # noqa: BLE001 (silence would look like death)
                self._failed("report", error)
            self._end.wait(step)

    def _report(self) -> None:
        amphora, key = self._settings.amphora_id, self._settings.heartbeat_key
        known = self._ledger.document(None)
        said, reported = document(amphora, self._sequence, known, self._reported, self._draining())
        try:
            self._ledger.write()
            if reported != self._reported:
                write_atomically(self._file, json.dumps(reported), durable=False)
        except OSError as error:
            self._failed("write the counters", error)
        self._reported = reported
        targets = self._settings.targets
        if targets:
            target = targets[self._sequence % len(targets)]
            try:
                _send(target, seal(said, key))
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
