# SPDX-License-Identifier: Apache-2.0
"""Measures the work of a health manager for one heartbeat by stages: receipt (socket to memory) and write (flush).

    .sandbox/test-venv/bin/python benchmarks/heartbeat_stages.py [--size S|M] [--amphorae N] [--seconds S]
        [--database sqlite|mariadb] [--option NAME=VALUE] [--profile FILE]

The objects are those of the real process, on a real socket and database, but in one thread: in each second, a third of
the amphorae sends one heartbeat each, which is received and written. So the processor time of the two stages is
separate, and independent of pauses. `--profile` adds a second measurement with cProfile, which slows the stages, and
writes the functions that need most of the time as text.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import heartbeats

from amphora_driver import config
from amphora_driver.health.service import HealthManager

# Heartbeats in the receive buffer at one time.
_SLICE = 256
# Every amphora sends one heartbeat in this number of seconds.
_INTERVAL = 3
_LINES = 20


class Stages:
    """A health manager whose stages run one after the other in the present thread."""

    def __init__(self, folder: Path, url: str, chosen: argparse.Namespace) -> None:
        lines = [
            *("[amp_database]", f"connection = {url}", f"encryption_key_file = {folder}/key"),
            *("[amp_queue]", f"socket_dir = {folder}/bells", "[amp_status_page]", "health_bind_port = 0"),
            *("[amp_health]", "bind_address = 127.0.0.1", "bind_port = 0", f"interval = {_INTERVAL}"),
            *(" = ".join(one.split("=", 1)) for one in chosen.option),
        ]
        (folder / "driver.conf").write_text("\n".join([*lines, ""]))
        (folder / "bells").mkdir()
        self._manager = HealthManager(config.load([str(folder / "driver.conf")]))
        self._receiver = self._manager._receiver  # noqa: SLF001 - the stages of the real process
        self._receiver.preload(self._manager._read_new_keys(frozenset()))  # noqa: SLF001
        self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._buffer = bytearray(65536)
        self.used = {"receipt": 0.0, "write": 0.0}
        self.profiles = {name: cProfile.Profile() for name in self.used}

    def process(self, sent: list[list[bytes]], *, profiled: bool = False) -> None:
        """Receive and write these heartbeats."""
        target = ("127.0.0.1", self._receiver.port)
        for begin in range(0, len(sent), _SLICE):
            for datagrams in sent[begin : begin + _SLICE]:
                for one in datagrams:
                    self._sender.sendto(one, target)
            self._run("receipt", self._receive, profiled=profiled)
        self._run("write", self._manager._flush, profiled=profiled)  # noqa: SLF001

    def is_settled(self, number: int) -> bool:
        """Return whether the statuses of this number of load balancers are written."""
        states = self._manager._writer._states.values()  # noqa: SLF001
        return len(states) == number and all(one.settled for one in states)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()

    def _receive(self) -> None:
        opened = self._receiver._socket  # noqa: SLF001
        while not self._receiver._receive_burst(opened, self._buffer):  # noqa: SLF001
            pass

    def _run(self, stage, work, *, profiled: bool) -> None:
        begun = time.thread_time()
        if profiled:
            self.profiles[stage].runcall(work)
        else:
            work()
        self.used[stage] += time.thread_time() - begun

    def profile(self, heartbeats_number: int) -> str:
        """Return the functions that need most of the time, as text."""
        texts = []
        for stage, measured in self.profiles.items():
            text = io.StringIO()
            pstats.Stats(measured, stream=text).strip_dirs().sort_stats("tottime").print_stats(_LINES)
            # The first lines have the time of day and the name of a temporary file.
            kept = [one.rstrip() for one in text.getvalue().splitlines() if one.strip()]
            texts.append("\n".join([f"== {stage}, {heartbeats_number} heartbeats", *kept]))
        return "\n\n".join([*texts, ""])


def measure(chosen: argparse.Namespace) -> dict[str, float | str]:
    """Return the figures of one run."""
    with ExitStack() as stack:
        folder, url, server = stack.enter_context(heartbeats.prepared_database(chosen.database))
        fleet = heartbeats.create_fleet(folder, url, chosen.amphorae, chosen.size)
        stages = Stages(folder, url, chosen)
        stack.callback(stages.close)
        epoch = time.time_ns()
        thirds = [fleet[start::_INTERVAL] for start in range(_INTERVAL)]
        # The first heartbeats cause statuses and new rows, which are written before the measurement.
        while not stages.is_settled(len(fleet)):
            _run_seconds(stages, thirds, epoch, _INTERVAL)
        stages.used = dict.fromkeys(stages.used, 0.0)
        before = heartbeats.processor_seconds(server) if server else 0.0
        sent = _run_seconds(stages, thirds, epoch, chosen.seconds)
        database = heartbeats.processor_seconds(server) - before if server else 0.0
        milliseconds = {name: used / sent * 1000 for name, used in stages.used.items()}
        if chosen.profile is not None:
            number = _run_seconds(stages, thirds, epoch, chosen.seconds, profiled=True)
            chosen.profile.write_text(stages.profile(number))
        return {
            "size": chosen.size,
            "database": chosen.database,
            "amphorae": chosen.amphorae,
            "heartbeats": sent,
            **{f"{name}_ms": round(used, 4) for name, used in milliseconds.items()},
            "database_ms": round(database / sent * 1000, 4),
            "heartbeats_per_core": round(1000 / sum(milliseconds.values())),
        }


def _run_seconds(stages: Stages, thirds, epoch: int, seconds: int, *, profiled: bool = False) -> int:
    """Process one third of the fleet in each second; return the number of heartbeats."""
    number = 0
    for second in range(seconds):
        begun = time.monotonic()
        sent = [one.datagrams(epoch) for one in thirds[second % _INTERVAL]]
        stages.process(sent, profiled=profiled)
        number += len(sent)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
    return number


def main() -> int:
    """Measure once, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=heartbeats.SIZES, default="S")
    parser.add_argument("--amphorae", type=int, default=3000)
    parser.add_argument(
        "--seconds",
        type=int,
        default=30,
        help="time of the measurement; each load balancer is read again in about 30 s",
    )
    parser.add_argument("--database", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, an option of [amp_health]")
    parser.add_argument("--profile", type=Path, help="write a profile to this file")
    print(json.dumps(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
