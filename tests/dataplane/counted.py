# SPDX-License-Identifier: Apache-2.0
"""Reads the counters of an amphora's metrics.

Invariant: only counters of listeners, pools and members are included, and they never decrease.
"""

from __future__ import annotations

import http.client
import re
from pathlib import Path

from amphora_agent.network.namespace import Namespace

_COUNTED = re.compile(r"^(octavia_(?:listener|pool|member)_\w+_total\{[^}]*\}) (\S+)$", re.MULTILINE)
# Check results describe a member, not its traffic, and restart with each worker.
_OF_CHECKS = re.compile(r"octavia_\w+_(?:check_\w+|downtime_\w+)_total")


def metrics(amphora) -> dict[str, float]:
    """Return counters by name and labels; empty if they are not available."""
    entered = Namespace(Path(f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"))
    try:
        return entered.run(_scrape)
    finally:
        entered.close()


def total(found: dict[str, float], name: str, *labels: str) -> float:
    """Return the sum of a family's samples with all these labels."""
    samples = ((key, value) for key, value in found.items() if key.startswith(f"octavia_{name}{{"))
    return sum(value for key, value in samples if all(label in key for label in labels))


def _scrape() -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", 9101, timeout=10)
    try:
        connection.request("GET", "/metrics")
        with connection.getresponse() as answer:
            said = answer.read().decode()
            found = _COUNTED.findall(said) if answer.status == 200 else []
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    return {name: float(value) for name, value in found if value != "NaN" and not _OF_CHECKS.match(name)}
