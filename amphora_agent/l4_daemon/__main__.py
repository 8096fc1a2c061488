# SPDX-License-Identifier: Apache-2.0
"""The checker's process.

Invariant: it needs nobody: not the agent, and of Python only the standard library. It runs in the load balancer's
namespace. When it ends, however it does, the kernel goes on forwarding as it was told last. SIGHUP has it execute
itself anew, with whatever sources are there by then.

    python -I -S __main__.py RUN-DIRECTORY SOCKET
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping

# Started by its path: -I and -S spare a megabyte, and leave nothing of ours on the path.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.l4.engine import Engine
from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4_checks.check import Kind
from amphora_agent.l4_daemon.checker import Checker
from amphora_agent.l4_daemon.code_version import version
from amphora_agent.l4_daemon.control_socket import Control
from amphora_agent.l4_daemon.persisted_state import Record
from amphora_agent.l4_nftables.engine import NftablesEngine

_FILES = 16384
ROWS = "rows.sock"


def main() -> None:
    """Serve until told to end."""
    _, directory, path = sys.argv
    received = serve(NftablesEngine(), directory, path)
    if received == signal.SIGHUP:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (without a shell)


def serve(engine: Engine, directory: str, path: str) -> int:
    """Serve until a signal says otherwise; which one it was."""
    _have_files()
    woken = _signals()
    loop = Loop()
    received: list[int] = []
    loop.read(woken, lambda: received.extend(woken.recv(64)))
    checker = Checker(loop, engine, Record(directory), KINDS, version())
    control = Control(loop, path, checker.answer)
    # For the responder, which is another user and is to change nothing.
    rows = Control(loop, f"{directory}/{ROWS}", lambda _: checker.answer({"op": "rows"}), mode=0o666)
    while not received:
        checker.turn()
    rows.close()
    control.close()
    checker.close()
    loop.close()
    return received[0]


def _udp(loop: Loop) -> Kind:
    from amphora_agent.l4_checks.udp import UdpChecks  # noqa: PLC0415 (loaded only where it is used, to save memory)

    return UdpChecks(loop)


def _sctp(loop: Loop) -> Kind:
    from amphora_agent.l4_checks.sctp import SctpChecks  # noqa: PLC0415 (as above)

    return SctpChecks(loop)


def _tcp(loop: Loop) -> Kind:
    from amphora_agent.l4_checks.tcp import TcpChecks  # noqa: PLC0415 (as above)

    return TcpChecks(loop)


def _http(loop: Loop) -> Kind:
    from amphora_agent.l4_checks.http import HttpChecks  # noqa: PLC0415 (as above)

    return HttpChecks(loop)


def _ping(loop: Loop) -> Kind:
    from amphora_agent.l4_checks.ping import PingChecks  # noqa: PLC0415 (as above)

    return PingChecks(loop)


KINDS: Mapping[str, Callable[[Loop], Kind]] = {
    "UDP-CONNECT": _udp,
    "SCTP": _sctp,
    "TCP": _tcp,
    "HTTP": _http,
    "PING": _ping,
}
"""The check implementation for each health monitor type."""


def _signals() -> socket.socket:
    """Signals as bytes of a socket: they wake the loop and interrupt nothing."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return woken


def _have_files() -> None:
    """Each check may have a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    main()
