# SPDX-License-Identifier: Apache-2.0
"""The process of the responder.

Invariant: the process does not need the agent, and imports little of the standard library only. It runs in HAProxy's
namespace. At SIGHUP it executes the present sources; the listening socket and all open connections pass to the new
program, so that no request fails.

    python -I -S __main__.py PORT STATS-SOCKET PINGS-FILE SUMS-FILE [DESCRIPTOR]

DESCRIPTOR is a file in memory that the former program wrote.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

# Python's options -I and -S save a megabyte, but remove the package's directory from the search path. So the next line
# adds the directory again.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.responder import ELSEWHERE, PACKAGES, prometheus
from amphora_agent.responder.http_server import Responder, Waiting
from amphora_agent.responder.ping_targets import Targets
from amphora_agent.source_checksum import source_checksum


def main() -> None:
    """Serve until SIGTERM; replace the program at SIGHUP."""
    # A blocked signal stays pending until sigwait(). So no signal is lost before all threads run, or while execve(2)
    # starts new code.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    _, port, stats, pings, sums, *left = sys.argv
    place = stats.rpartition("/")[0]
    listener, waiting = _inherited(int(left[0])) if left else (None, [])
    responder = Responder(
        lambda function, *arguments: function(*arguments),
        int(port),
        # The paths of two other sockets are derived from the argument `stats`. A running responder keeps its arguments
        # at an upgrade, so new code must not need more arguments.
        lambda: prometheus.scrape(_worker(place, stats), sums, f"{place}/checker/rows.sock"),
        Targets(pings),
        version=source_checksum(PACKAGES, ELSEWHERE),
        listener=listener,
        waiting=waiting,
    )
    responder.start()
    if signal.sigwait({signal.SIGTERM, signal.SIGHUP}) == signal.SIGTERM:
        responder.close()
        return
    descriptor = _save(*responder.hand_over())
    words = sys.orig_argv[: len(sys.orig_argv) - len(left)]
    os.execv(sys.executable, [sys.executable, *words[1:], str(descriptor)])  # noqa: S606 (without a shell)


def _worker(place: str, main: str) -> Socket:
    """Return HAProxy's socket for metrics, or the main socket if an older agent configured HAProxy."""
    own = f"{place}/metrics.sock"
    return Socket(own if os.path.exists(own) else main)  # noqa: PTH110 (pathlib needs a megabyte)


def _save(listener: socket.socket | None, waiting: list[Waiting]) -> int:
    """Write the open sockets for the new program; return the descriptor of the file."""
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
