# SPDX-License-Identifier: Apache-2.0
"""What is measured of one side in one slice, and the alternation of two sides."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amphora_agent.network.namespace import Namespace
from data_plane import kinds, sides
from data_plane.kinds import Kind
from data_plane.place import UDP_MEMBER_PORT, Place, processor_seconds

_HERE = Path(__file__).parent
_WRK = _HERE / "wrk_report.lua"
_CLIENTS = 4
# Changes per second of a slice with changes.
CHANGES = 10
_FRAMES = re.compile(r"^Udp: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Slice:
    """The result of one slice: units per second, processor time of HAProxy for one unit in microseconds, and others.

    Attributes:
        p50: latency in milliseconds; None if it is not measured.
        others: processors that the rest of the amphora has used (agent, checks of configurations).
        changes: member changes per second.
        errors: failed units.
    """

    rate: float
    cost: float
    p50: float | None = None
    p99: float | None = None
    others: float = 0.0
    changes: float = 0.0
    errors: int = 0


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        unit: what the rate counts.
        always: whether it is measured with all numbers of members, and with changes.
        share: the part of a slice's duration that suffices.
    """

    name: str
    kind: Kind
    unit: str
    run: Callable[[Place, sides.Amphora | sides.Plain, float], tuple[float, float, dict[str, float]]]
    always: bool = True
    share: float = 1.0


def measured(place: Place, side: sides.Amphora | sides.Plain, case: Case, seconds: float, *, changing: bool) -> Slice:
    """Measure one slice of one side."""
    with _Changer(side, changing) as changer:
        before, others, begun = processor_seconds(side.haproxy), side.others_seconds(), time.monotonic()
        units, lasted, more = case.run(place, side, seconds * case.share)
        used, elapsed = processor_seconds(side.haproxy) - before, time.monotonic() - begun
        rest = (side.others_seconds() - others) / elapsed
    assert units, f"{case.name}: nothing was served by {side.name}"
    cost = more.pop("cpu", used) / units * 1e6
    latency = {name: more[name] for name in ("p50", "p99") if name in more}
    return Slice(
        units / lasted, cost, others=rest, changes=changer.made / elapsed, errors=int(more.get("errors", 0)), **latency
    )


class _Changer:
    """Makes changes of a member at a constant rate within its block."""

    def __init__(self, side: sides.Amphora | sides.Plain, changing: bool) -> None:
        self._side = side
        self._ending = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work) if changing else None
        self.made = 0

    def _work(self) -> None:
        # The first change comes after half of a pause, so that a slice of one second has CHANGES changes, not one more.
        due = time.monotonic() + 0.5 / CHANGES
        try:
            while not self._ending.wait(max(0.0, due - time.monotonic())):
                self._side.change()
                self.made += 1
                due = max(due + 1 / CHANGES, time.monotonic())
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._failed = error

    def __enter__(self) -> _Changer:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        if self._failed is not None:
            raise self._failed


# -- HTTP ---------------------------------------------------------------------------------------------------------


def _wrk(connections: int, path: str = "/", *more: str):
    def run(place: Place, side, seconds: float) -> tuple[float, float, dict[str, float]]:
        kind = side.kind
        scheme = "https" if kind.tls else "http"
        url = f"{scheme}://{side.address}:{kind.port}{path}"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(_WRK), *more, url]
        process = place.inside("cl", command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=seconds + 60)
        assert process.returncode == 0, said
        found = json.loads(said.splitlines()[-1])
        latency = {} if more else {"p50": found["p50"] / 1000, "p99": found["p99"] / 1000}
        return found["requests"], found["microseconds"] / 1e6, {**latency, "errors": found["errors"]}

    return run


# -- TLS ----------------------------------------------------------------------------------------------------------


def _handshakes(place: Place, side, seconds: float) -> tuple[float, float, dict[str, float]]:
    command = ["openssl", "s_time", "-connect", f"{side.address}:{side.kind.port}", "-new", "-time", "60"]
    processes = [
        place.inside("cl", command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(_CLIENTS)
    ]
    try:
        first = sides.handshakes(side)
        deadline = time.monotonic() + 10
        while sides.handshakes(side) < first + 2 * _CLIENTS:
            assert time.monotonic() < deadline, "no TLS handshake"
            time.sleep(0.01)
        used, first, begun = processor_seconds(side.haproxy), sides.handshakes(side), time.monotonic()
        time.sleep(seconds)
        last = sides.handshakes(side)
        lasted, used = time.monotonic() - begun, processor_seconds(side.haproxy) - used
    finally:
        for one in processes:
            one.kill()
        for one in processes:
            one.wait()
    return last - first, lasted, {"cpu": used}


# -- UDP ----------------------------------------------------------------------------------------------------------


def _datagrams(which: str):
    def run(place: Place, side, seconds: float) -> tuple[float, float, dict[str, float]]:
        members = place.network.thread("mem")
        before = members.run(_arrived)
        words = [side.address, str(side.kind.port), str(seconds), which]
        command = [sys.executable, str(_HERE / "datagrams_out.py"), *words]
        process = place.inside("cl", command, stdout=subprocess.PIPE)
        said, _ = process.communicate(timeout=seconds + 60)
        assert process.returncode == 0
        sent = json.loads(said)
        arrived = members.run(_arrived) - before
        return arrived, sent["seconds"], {"cpu": sent["cpu"], "errors": max(0, sent["sent"] - arrived)}

    return run


def _arrived() -> int:
    """Return the number of datagrams that reached this namespace; the socket need not read them."""
    names, values = _FRAMES.findall(Path("/proc/thread-self/net/snmp").read_text(encoding="ascii"))
    found = dict(zip(names.split(), map(int, values.split()), strict=True))
    return found["InDatagrams"] + found["InErrors"] + found["NoPorts"]


@contextlib.contextmanager
def sink(place: Place) -> Iterator[None]:
    """Keep a socket open that takes the datagrams for all members."""

    def opened() -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind(("0.0.0.0", UDP_MEMBER_PORT))
        return one

    members: Namespace = place.network.thread("mem")
    made = members.run(opened)
    try:
        yield
    finally:
        made.close()


# -- all ----------------------------------------------------------------------------------------------------------

_CLOSE = ("-H", "Connection: close")
CASES = (
    Case("requests", kinds.HTTP, "requests/s", _wrk(32)),
    Case("latency", kinds.HTTP, "requests/s", _wrk(2)),
    Case("connections", kinds.HTTP, "connections/s", _wrk(32, "/", *_CLOSE)),
    Case("medium bodies", kinds.HTTP, "bodies/s", _wrk(32, "/medium"), always=False),
    Case("throughput", kinds.HTTP, "bodies/s", _wrk(8, "/large")),
    Case("TLS handshakes", kinds.TLS, "handshakes/s", _handshakes),
    Case("TLS requests", kinds.TLS, "requests/s", _wrk(32), always=False),
    Case("TLS resumed", kinds.TLS, "connections/s", _wrk(32, "/", *_CLOSE), always=False),
    Case("TCP requests", kinds.TCP, "requests/s", _wrk(32), always=False),
    Case("TCP connections", kinds.TCP, "connections/s", _wrk(32, "/", *_CLOSE), always=False),
    Case("TCP throughput", kinds.TCP, "bodies/s", _wrk(8, "/large"), always=False),
    Case("UDP packets", kinds.UDP, "packets/s", _datagrams("packets"), share=0.5),
    Case("UDP bulk", kinds.UDP, "packets/s", _datagrams("bulk"), share=0.5, always=False),
    Case("UDP segments", kinds.UDP, "packets/s", _datagrams("segments"), share=0.5, always=False),
    Case("UDP flows", kinds.UDP, "flows/s", _datagrams("flows"), share=0.5, always=False),
)


@dataclass
class Compared:
    """The slices of two sides, in pairs."""

    first: list[Slice] = field(default_factory=list)
    second: list[Slice] = field(default_factory=list)

    def ratio(self, name: str) -> float | None:
        """Return the median of first / second over the pairs."""
        pairs = [(getattr(one, name), getattr(other, name)) for one, other in zip(self.first, self.second, strict=True)]
        if any(value is None for pair in pairs for value in pair):
            return None
        return statistics.median(one / other for one, other in pairs)


def compare(
    place: Place, both: Sequence, case: Case, *, pairs: int, seconds: float, changing: bool = False
) -> Compared:
    """Measure two sides in turn; the first one of a pair changes with each pair."""
    found = Compared()
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for place_in_pair in order:
            both[place_in_pair].select()
            one = measured(place, both[place_in_pair], case, seconds, changing=changing)
            (found.first, found.second)[place_in_pair].append(one)
    return found
