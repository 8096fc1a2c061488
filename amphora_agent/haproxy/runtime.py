# SPDX-License-Identifier: Apache-2.0
"""HAProxy's stats socket.

Invariant: an answer is a success only if it is one that is known to mean success. HAProxy reports errors as
text like any other, so whatever is not recognised is an error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
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
    for removal, group in groupby(steps, lambda step: step.backend if isinstance(step, RemoveServer) else None):
        if removal is not None:
            _remove(worker, removal, [step for step in group if isinstance(step, RemoveServer)])
        else:
            _change(worker, group)


def _change(worker: Socket, steps: Iterable[Step]) -> None:
    for step in steps:
        match step:
            case AddServer():
                _add(worker, step)
            case NameServers():
                _name(worker, step)
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
    _order_all(worker, [f"enable server {step.backend}/{name}" for name in step.names])


def _remove(worker: Socket, backend: str, steps: Sequence[RemoveServer]) -> None:
    """Take servers out of a backend, waiting a moment for the requests they still answer.

    Draining comes first because maintenance closes the connections that are idle at that moment: one that becomes
    idle later would keep the server from being deleted for another five seconds. All of them go together: the question
    who is still busy is about the whole backend, and would be asked a thousand times for a thousand members.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    draining = [step.name for step in steps if not step.disabled]
    if draining:
        _order_all(worker, [f"set server {backend}/{name} state drain" for name in draining])
        while not _busy(worker, backend).isdisjoint(draining) and time.monotonic() < deadline:
            # HAProxy 2.6 tells nobody when a server becomes removable; 3.0 has 'wait ... srv-removable'.
            time.sleep(_POLL_SECONDS)
    _order_all(worker, [f"set server {backend}/{step.name} state maint" for step in steps])
    deadline = max(deadline, time.monotonic() + REMOVAL_SECONDS / 2)
    for step in steps:
        # Its idle connections are closed by the threads that own them: a moment after that answer.
        command = f"del server {backend}/{step.name}"
        while (answer := worker.ask(command).strip()) != _DELETED:
            if time.monotonic() >= deadline:
                raise HaproxyError(f"have HAProxy do '{command}'", answer or "it said nothing")
            time.sleep(_POLL_SECONDS)


def _order_all(worker: Socket, commands: Sequence[str]) -> None:
    """Give commands that have nothing to answer, many at once."""
    for first in range(0, len(commands), _AT_ONCE):
        worker.order("; ".join(commands[first : first + _AT_ONCE]))


def _busy(worker: Socket, backend: str) -> set[str]:
    """The servers of a backend that answer a request now."""
    lines = [line.split() for line in worker.ask(f"show servers conn {backend}").splitlines()]
    if not lines or "used_cur" not in lines[0]:
        return set()
    column = lines[0].index("used_cur") - 1  # the first word of the head is its '#'
    return {words[0].removeprefix(f"{backend}/") for words in lines[1:] if words and int(words[column])}
