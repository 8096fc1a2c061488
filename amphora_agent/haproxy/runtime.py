# SPDX-License-Identifier: Apache-2.0
"""HAProxy's stats socket.

Invariant: an answer is a success only if it is one that is known to mean success. HAProxy reports errors as
text like any other, so whatever is not recognised is an error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.comparison import (
    AddServer,
    NameServers,
    RemoveServer,
    SetMaintenance,
    SetWeight,
    Step,
)

ANSWER_SECONDS = 10.0
REMOVAL_SECONDS = 0.1
_POLL_SECONDS = 0.002
_AT_ONCE = 50
"""Commands on one line: HAProxy reads at most 16 KiB."""
_ADDED = "New server registered."
_DELETED = "Server deleted."


class Socket:
    """One of HAProxy's sockets: a connection for each question.

    Args:
        half_close: the master's socket of 2.6 answers to the end only after its peer has said its last word;
        the
            worker's one takes that for a farewell.
    """

    def __init__(self, path: Path, *, half_close: bool = False) -> None:
        self._path = path
        self._half_close = half_close

    def ask(self, question: str) -> str:
        """Ask and return the answer.

        Raises:
            HaproxyError: nobody answers.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(question.encode() + b"\n")
                if self._half_close:
                    connection.shutdown(socket.SHUT_WR)
                parts = []
                while data := connection.recv(65536):
                    parts.append(data)
        except OSError as error:
            raise HaproxyError(f"ask HAProxy '{question}'", f"no answer: {error}") from error
        return b"".join(parts).decode(errors="replace")

    def order(self, command: str, success: str = "") -> None:
        """Give a command, or several with semicolons between them, whose answer is known.

        Raises:
            HaproxyError: the answer is another one.
        """
        answer = self.ask(command).strip()
        if answer != success:
            raise HaproxyError(f"have HAProxy do '{command}'", answer or "it said nothing")


class HeldWorker:
    """A connection that keeps a leaving worker alive until its last counters are read.

    A worker that was replaced ends with its last connection, and takes with it what it counted since anybody
    asked. This connection is the last one, by not being closed.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.identity = identity
        self.was_idle = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.connect(str(path))
            self.ask("prompt")
        except (OSError, HaproxyError):
            self._socket.close()
            raise

    def ask(self, question: str) -> str:
        try:
            self._socket.sendall(question.encode() + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n> "):
                data = self._socket.recv(65536)
                if not data:
                    raise HaproxyError(f"ask a leaving worker '{question}'", "it is gone")
                answer += data
        except OSError as error:
            raise HaproxyError(f"ask a leaving worker '{question}'", str(error)) from error
        return answer[:-3].decode(errors="replace")

    def close(self) -> None:
        self._socket.close()


def carry_out(steps: Iterable[Step], worker: Socket) -> None:
    """Change the running worker.

    Raises:
        HaproxyError: it did not do one of the steps; those before it are done.
    """
    for step in steps:
        match step:
            case AddServer():
                _add(worker, step)
            case NameServers():
                _name(worker, step)
            case RemoveServer():
                _remove(worker, step)
            case SetWeight():
                worker.order(f"set server {step.backend}/{step.name} weight {step.weight}")
            case SetMaintenance():
                state = "maint" if step.maintenance else "ready"
                worker.order(f"set server {step.backend}/{step.name} state {state}")


def _add(worker: Socket, step: AddServer) -> None:
    server, name = step.server, f"{step.backend}/{step.server.name}"
    commands = [" ".join(("add server", name, server.address, *server.keywords))]
    if server.checked:
        commands.append(f"enable health {name}")
    if not server.disabled and not step.waits:
        commands.append(f"enable server {name}")
    worker.order("; ".join(commands), _ADDED)  # whatever fails says something else besides


def _name(worker: Socket, step: NameServers) -> None:
    """Have HAProxy compute the cookies of servers it knows.

    HAProxy 2.6 computes those of all servers whenever the key is set, and none when a server is added.
    """
    worker.order(f"set dynamic-cookie-key backend {step.backend} {step.key}")
    for first in range(0, len(step.names), _AT_ONCE):
        names = step.names[first : first + _AT_ONCE]
        worker.order("; ".join(f"enable server {step.backend}/{name}" for name in names))


def _remove(worker: Socket, step: RemoveServer) -> None:
    """Take a server out, waiting a moment for the requests it still answers.

    Draining comes first because maintenance closes the connections that are idle at that moment: one that becomes
    idle later would keep the server from being deleted for another five seconds.
    """
    name = f"{step.backend}/{step.name}"
    deadline = time.monotonic() + REMOVAL_SECONDS
    if not step.disabled:
        worker.order(f"set server {name} state drain")
        while _connections(worker, step) and time.monotonic() < deadline:
            # HAProxy 2.6 tells nobody when a server becomes removable; 3.0 has 'wait ... srv-removable'.
            time.sleep(_POLL_SECONDS)
    worker.order(f"set server {name} state maint")
    # Its idle connections are closed by the threads that own them: a moment after this answer.
    while (answer := worker.ask(f"del server {name}").strip()) != _DELETED:
        if time.monotonic() >= deadline:
            raise HaproxyError(f"have HAProxy do 'del server {name}'", answer or "it said nothing")
        time.sleep(_POLL_SECONDS)


def _connections(worker: Socket, step: RemoveServer) -> int:
    """The connections on which a server answers a request now."""
    lines = [line.split() for line in worker.ask(f"show servers conn {step.backend}").splitlines()]
    if not lines or "used_cur" not in lines[0]:
        return 0
    column = lines[0].index("used_cur") - 1  # the first word of the head is its '#'
    used = [int(words[column]) for words in lines[1:] if words and words[0] == f"{step.backend}/{step.name}"]
    return used[0] if used else 0
