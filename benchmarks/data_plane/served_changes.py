# SPDX-License-Identifier: Apache-2.0
"""The time from a push with one changed member until the running HAProxy has the change, and until the agent answers.

There is no client traffic. The benchmark polls the weight of the changed server; HAProxy 2.6 needs 2 ms to find one of
10,000 servers, so a result is up to 4 ms too large.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

from data_plane.sides import Amphora

# What `get weight` prints after each step that it can show.
_SHOWN = {"add": "1 (", "weight": "7 (", "remove": "No such"}
_STEPS = ("add", "weight", "remove")
_POLL_SECONDS = 0.002


def measure(amphora: Amphora, times: int) -> dict[str, dict[str, list[float]]]:
    """Return, by step, the milliseconds until each change is served and until it is answered, in order of size."""
    found: dict[str, dict[str, list[float]]] = {step: {"served": [], "answered": []} for step in _STEPS}
    with ThreadPoolExecutor(1) as thread:
        for _, step in itertools.product(range(times), _STEPS):
            body = amphora.body(step)
            begun = time.monotonic()
            answer = thread.submit(_timed, amphora, step, body)
            found[step]["served"].append((_until(amphora, _SHOWN[step]) - begun) * 1000)
            found[step]["answered"].append((answer.result() - begun) * 1000)
    return {step: {name: sorted(values) for name, values in each.items()} for step, each in found.items()}


def _timed(amphora: Amphora, step: str, body: bytes) -> float:
    how = amphora.push(step, body)
    assert how == "runtime", how
    return time.monotonic()


def _until(amphora: Amphora, shown: str) -> float:
    deadline = time.monotonic() + 60
    while not amphora.ask(f"get weight {amphora.changing}").startswith(shown):
        assert time.monotonic() < deadline, f"HAProxy does not show '{shown}'"
        time.sleep(_POLL_SECONDS)
    return time.monotonic()


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of ordered values: the smallest one that is not below the share of them."""
    return values[min(len(values) - 1, int(share * len(values)))]
