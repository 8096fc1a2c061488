# SPDX-License-Identifier: Apache-2.0
"""The responder's process.

Invariant: it needs nobody: not the agent, and of Python only the standard library, of that as little as can be. It
runs in HAProxy's namespace. SIGHUP has it execute itself anew, with whatever sources are there by then; nobody who
asks notices: the listening socket and all open connections go on to the successor.

    python -I -S __main__.py PORT STATS-SOCKET PINGS-FILE SUMS-FILE [DESCRIPTOR]

DESCRIPTOR is a file in memory that a predecessor wrote.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

# Started by its path: -I and -S spare a megabyte, and leave nothing of ours on the path.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.responder import prometheus
from amphora_agent.responder.code_version import version
from amphora_agent.responder.http_server import Responder, Waiting
from amphora_agent.responder.ping_targets import Targets


def main() -> None:
    """Serve until told to end."""
    # Blocked before there are threads, and across the change to a successor: none of the two is ever lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    _, port, stats, pings, sums, *left = sys.argv
    place = stats.rpartition("/")[0]
    listener, waiting = _inherited(int(left[0])) if left else (None, [])
    responder = Responder(
        lambda function, *arguments: function(*arguments),
        int(port),
        # Both sockets have their places beside HAProxy's main one (amphora_agent/paths.py): other arguments would
        # keep a responder of an older version from being replaced without a gap.
        lambda: prometheus.scrape(_worker(place, stats), sums, f"{place}/checker/rows.sock"),
        Targets(pings),
        version=version(),
        listener=listener,
        waiting=waiting,
    )
    responder.start()
    if signal.sigwait({signal.SIGTERM, signal.SIGHUP}) == signal.SIGTERM:
        responder.close()
        return
    descriptor = _leave(*responder.hand_over())
    words = sys.orig_argv[: len(sys.orig_argv) - len(left)]
    os.execv(sys.executable, [sys.executable, *words[1:], str(descriptor)])  # noqa: S606 (without a shell)


def _worker(place: str, main: str) -> Socket:
    """HAProxy's socket for questions. One that was configured by an older agent has only the main one."""
    own = f"{place}/metrics.sock"
    return Socket(own if os.path.exists(own) else main)  # noqa: PTH110 (pathlib is a megabyte)


def _leave(listener: socket.socket | None, waiting: list[Waiting]) -> int:
    """Write down what a successor is to go on with; the number of the file."""
    lines = []
    for one, received in ([(listener, b"")] if listener is not None else []) + list(waiting):
        one.set_inheritable(True)
        lines.append(f"{one.detach()} {received.hex()}\n")
    descriptor = os.memfd_create("responder", 0)
    os.write(descriptor, "".join(lines).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _inherited(descriptor: int) -> tuple[socket.socket | None, list[Waiting]]:
    found = []
    with os.fdopen(descriptor, encoding="ascii") as file:
        for line in file:
            number, _, received = line.rstrip("\n").partition(" ")
            one = socket.socket(fileno=int(number))
            one.set_inheritable(False)
            found.append((one, bytes.fromhex(received)))
    return (found[0][0], found[1:]) if found else (None, [])


if __name__ == "__main__":
    main()
