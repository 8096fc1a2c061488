# SPDX-License-Identifier: Apache-2.0
"""The time from a push with one changed member until the running HAProxy has the change, and until the agent answers.

There is no client traffic. A new member and its weight are polled with `get weight`. A removed member gets no request
from the moment in which it drains, so its state is polled. HAProxy 2.6 needs 1 to 2 ms to find one of 10,000 servers,
and the pause between two polls is 2 ms: a result is up to 4 ms too large. The polls use the processor that the agent
needs for the change, so they begin late: after three quarters of the shortest time so far.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

from data_plane.sides import Amphora

# What `get weight` prints after the steps that it shows.
_SHOWN = {"add": "1 (", "weight": "7 ("}
_STEPS = ("add", "weight", "remove")
_POLL_SECONDS = 0.002
_BLIND = 0.75


def measure(amphora: Amphora, times: int) -> dict[str, dict[str, list[float]]]:
    """Return, by step, the milliseconds until each change is served and until it is answered, in order of size."""
    found: dict[str, dict[str, list[float]]] = {step: {"served": [], "answered": []} for step in _STEPS}
    with ThreadPoolExecutor(1) as thread:
        for _, step in itertools.product(range(times), _STEPS):
            body = amphora.body(step)
            number = _number(amphora) if step == "remove" else ""
            begun = time.monotonic()
            answer = thread.submit(_timed, amphora, step, body)
            time.sleep(_BLIND * min(found[step]["served"], default=0.0) / 1000)
            found[step]["served"].append((_until(amphora, step, number) - begun) * 1000)
            found[step]["answered"].append((answer.result() - begun) * 1000)
    return {step: {name: sorted(values) for name, values in each.items()} for step, each in found.items()}


def _timed(amphora: Amphora, step: str, body: bytes) -> float:
    how = amphora.push(step, body)
    assert how == "runtime", how
    return time.monotonic()


def _until(amphora: Amphora, step: str, number: str) -> float:
    deadline = time.monotonic() + 60
    while not _has(amphora, step, number):
        assert time.monotonic() < deadline, f"HAProxy does not have the change '{step}'"
        time.sleep(_POLL_SECONDS)
    return time.monotonic()


def _has(amphora: Amphora, step: str, number: str) -> bool:
    if step != "remove":
        return amphora.ask(f"get weight {amphora.changing}").startswith(_SHOWN[step])
    return ",no check," not in amphora.ask(f"show stat {number}")


def _number(amphora: Amphora) -> str:
    """Return HAProxy's numbers of the changing member, as words of `show stat`."""
    backend, _, member = amphora.changing.partition("/")
    lines = amphora.ask(f"show servers state {backend}").splitlines()
    words = next(words for words in map(str.split, lines) if words[3:4] == [member])
    return f"{words[0]} 4 {words[2]}"


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of ordered values: the smallest one that is not below the share of them."""
    return values[min(len(values) - 1, int(share * len(values)))]
