# SPDX-License-Identifier: Apache-2.0
"""The process of the L4 daemon.

Invariant: the L4 daemon runs without the agent, in the load balancer's namespace, and imports only the standard
library. However it ends, the kernel continues to forward as before. On SIGHUP the L4 daemon executes itself again, with
the present sources.

    python -I -S __main__.py RUN-DIRECTORY SOCKET
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from functools import partial

# Python's options -I and -S save a megabyte, but remove the package's directory from the search path. So the next line
# adds the directory again.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4.model import MONITORS
from amphora_agent.l4_checks.check import CheckType, Factories
from amphora_agent.l4_daemon import ELSEWHERE, PACKAGES
from amphora_agent.l4_daemon.checker import Checker
from amphora_agent.l4_daemon.control_socket import ControlSocket
from amphora_agent.l4_daemon.persisted_state import StateFiles
from amphora_agent.l4_nftables.engine import NftablesEngine
from amphora_agent.source_checksum import source_checksum

_MAX_OPEN_FILES = 16384
ROWS_SOCKET = "rows.sock"


def main() -> None:
    """Serve until a signal arrives."""
    _, directory, path = sys.argv
    received = serve(NftablesEngine(), directory, path)
    if received == signal.SIGHUP:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (without a shell)


def serve(engine: NftablesEngine, directory: str, path: str) -> int:
    """Serve until a signal arrives; returns its number."""
    _raise_file_limit()
    wakeup = _open_signal_socket()
    loop = EventLoop()
    received: list[int] = []
    loop.add_reader(wakeup, lambda: received.extend(wakeup.recv(64)))
    version = source_checksum(PACKAGES, ELSEWHERE)
    checker = Checker(loop, engine, StateFiles(directory), KINDS, version)
    control = ControlSocket(loop, path, checker.handle_request)
    # The responder runs as another user and must not change anything. So the responder gets a separate socket, which
    # only returns statistics.
    rows_path = f"{directory}/{ROWS_SOCKET}"
    rows = ControlSocket(loop, rows_path, lambda _: checker.handle_request({"op": "rows"}), mode=0o666)
    while not received:
        checker.run_once()
    for one in (rows, control, checker, loop):
        one.close()
    return received[0]


def _create_checks(kind: str, loop: EventLoop) -> CheckType:
    """Import and create the checks of a monitor type. The imports are local to save memory."""
    if kind == "UDP-CONNECT":
        from amphora_agent.l4_checks.udp import UdpChecks  # noqa: PLC0415 (saves memory)

        return UdpChecks(loop)
    if kind == "SCTP":
        from amphora_agent.l4_checks.sctp import SctpChecks  # noqa: PLC0415 (saves memory)

        return SctpChecks(loop)
    if kind == "TCP":
        from amphora_agent.l4_checks.tcp import TcpChecks  # noqa: PLC0415 (saves memory)

        return TcpChecks(loop)
    if kind == "HTTP":
        from amphora_agent.l4_checks.http import HttpChecks  # noqa: PLC0415 (saves memory)

        return HttpChecks(loop)
    from amphora_agent.l4_checks.ping import PingChecks  # noqa: PLC0415 (saves memory)

    return PingChecks(loop)


KINDS: Factories = {kind: partial(_create_checks, kind) for kind in MONITORS}
"""The check implementation for each health monitor type."""


def _open_signal_socket() -> socket.socket:
    """Return a socket that gets a byte for each signal, so that no signal interrupts a call."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def _raise_file_limit() -> None:
    """Raise the limit of open files, because each check may have a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    main()
