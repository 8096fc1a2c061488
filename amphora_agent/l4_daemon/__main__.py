# SPDX-License-Identifier: Apache-2.0
"""The process of the checker.

Invariant: it runs without the agent, and imports only the standard library. It runs in the load balancer's namespace.
However it ends, the kernel continues to forward as before. On SIGHUP it executes itself again, with the present
sources.

    python -I -S __main__.py RUN-DIRECTORY SOCKET
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping

# Started by path with -I and -S, which save a megabyte. So the package is not on sys.path.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.l4.engine import Engine
from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4_checks.check import CheckType
from amphora_agent.l4_daemon.checker import Checker
from amphora_agent.l4_daemon.code_version import version
from amphora_agent.l4_daemon.control_socket import ControlSocket
from amphora_agent.l4_daemon.persisted_state import StateFiles
from amphora_agent.l4_nftables.engine import NftablesEngine

_MAX_OPEN_FILES = 16384
ROWS_SOCKET = "rows.sock"


def main() -> None:
    """Serve until a signal arrives."""
    _, directory, path = sys.argv
    received = serve(NftablesEngine(), directory, path)
    if received == signal.SIGHUP:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (without a shell)


def serve(engine: Engine, directory: str, path: str) -> int:
    """Serve until a signal arrives; returns its number."""
    _raise_file_limit()
    wakeup = _open_signal_socket()
    loop = EventLoop()
    received: list[int] = []
    loop.add_reader(wakeup, lambda: received.extend(wakeup.recv(64)))
    checker = Checker(loop, engine, StateFiles(directory), KINDS, version())
    control = ControlSocket(loop, path, checker.handle_request)
    # For the responder, which runs as another user and may change nothing.
    rows_path = f"{directory}/{ROWS_SOCKET}"
    rows = ControlSocket(loop, rows_path, lambda _: checker.handle_request({"op": "rows"}), mode=0o666)
    while not received:
        checker.run_once()
    rows.close()
    control.close()
    checker.close()
    loop.close()
    return received[0]


def _udp(loop: EventLoop) -> CheckType:
    from amphora_agent.l4_checks.udp import UdpChecks  # noqa: PLC0415 (loaded only where it is used, to save memory)

    return UdpChecks(loop)


def _sctp(loop: EventLoop) -> CheckType:
    from amphora_agent.l4_checks.sctp import SctpChecks  # noqa: PLC0415 (as above)

    return SctpChecks(loop)


def _tcp(loop: EventLoop) -> CheckType:
    from amphora_agent.l4_checks.tcp import TcpChecks  # noqa: PLC0415 (as above)

    return TcpChecks(loop)


def _http(loop: EventLoop) -> CheckType:
    from amphora_agent.l4_checks.http import HttpChecks  # noqa: PLC0415 (as above)

    return HttpChecks(loop)


def _ping(loop: EventLoop) -> CheckType:
    from amphora_agent.l4_checks.ping import PingChecks  # noqa: PLC0415 (as above)

    return PingChecks(loop)


KINDS: Mapping[str, Callable[[EventLoop], CheckType]] = {
    "UDP-CONNECT": _udp,
    "SCTP": _sctp,
    "TCP": _tcp,
    "HTTP": _http,
    "PING": _ping,
}
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
    """Raise the limit of open files: each check may have a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    main()
