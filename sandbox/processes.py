# SPDX-License-Identifier: Apache-2.0
"""The programs of the sandbox: start as detached processes, find and stop them again.

Invariant: a file in the state directory records PID and start time of each program. A later command stops exactly these
processes and their children, and never starts a program twice.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from amphora_driver import failpoints
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import Process, signal_and_wait, spawn
from sandbox.settings import SandboxError

if TYPE_CHECKING:
    from sandbox.settings import Settings

_POLL_INTERVAL = 0.03
_STOP_SECONDS = 8.0
_TAIL_LINES = 15


class Program(msgspec.Struct, frozen=True):
    """One program of the sandbox.

    Args:
        name: the name of the program, its log and its process file.
        namespace: the network namespace of the program; None for the root namespace.
        listen: a port of 127.0.0.1. The program inherits the listening socket as descriptor 3: early clients wait.
        ready: whether the program is ready. `wait_ready` polls this function, so it must be fast.
    """

    name: str
    argv: tuple[str, ...]
    namespace: str | None = None
    listen: int | None = None
    ready: Callable[[Process], bool] = lambda _: True


class Supervision:
    """Starts and stops the programs of one sandbox.

    Attributes:
        spawn: starts a process like `detached_process.spawn`. A test can replace this function.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.spawn = spawn

    def running(self, name: str) -> Process | None:
        """The process of a program; None if the program does not run."""
        process = self._read_process(name)
        return process if process is not None and process.alive() else None

    def start(self, program: Program) -> bool:
        """Start a program; False if it runs."""
        if self.running(program.name) is not None:
            return False
        argv = list(program.argv)
        if program.namespace is not None:
            argv = ["nsenter", f"--net={namespaces.path(program.namespace)}", "--", *argv]
        log = self.log(program.name)
        if log.exists():
            log.replace(log.with_suffix(".log.old"))
        listener = None if program.listen is None else _listen(program.listen, program.name)
        try:
            process = self.spawn(argv, self._environment(), log, None if listener is None else listener.fileno())
        except OSError as error:
            raise SandboxError(f"start {program.name}", str(error)) from error
        finally:
            if listener is not None:
                listener.close()
        self._process_file(program.name).write_bytes(msgspec.json.encode(process))
        return True

    def wait_ready(self, program: Program, seconds: float) -> None:
        """Wait until a started program is ready; raises SandboxError if it ends, or after the time-out."""
        process = self._read_process(program.name)
        for _ in range(int(seconds / _POLL_INTERVAL)):
            if process is None or process.wait(_POLL_INTERVAL):
                self._raise_start_error(program.name, "it ended")
            elif program.ready(process):
                return
        self._raise_start_error(program.name, f"it is not ready after {seconds:.0f} seconds")

    def stop(self, *names: str) -> list[str]:
        """Stop programs and their child processes in parallel; returns the names of the programs that ran."""
        ran = {name: process for name in names if (process := self.running(name)) is not None}
        signal_and_wait(list(ran.values()), signal.SIGTERM, _STOP_SECONDS)
        for process in ran.values():
            # The signal goes to the process group, so it also ends child processes of the program.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STOP_SECONDS)
        for name in names:
            self._process_file(name).unlink(missing_ok=True)
        return list(ran)

    def names(self) -> list[str]:
        """The names of all programs that were started and not stopped."""
        return sorted(path.stem for path in self._settings.run.glob("*.process"))

    def log(self, name: str) -> Path:
        return self._settings.log / f"{name}.log"

    def tail(self, name: str) -> str:
        """The last lines of a program's log."""
        with suppress(FileNotFoundError):
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""

    def _process_file(self, name: str) -> Path:
        return self._settings.run / f"{name}.process"

    def _read_process(self, name: str) -> Process | None:
        try:
            return msgspec.json.decode(self._process_file(name).read_bytes(), type=Process)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _environment(self) -> Mapping[str, str]:
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "HOME", failpoints.VARIABLE)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        fixed = {"OCTAVIA_CONF": str(self._settings.octavia_configuration), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        return {**kept, **self._settings.environment(), **fixed}

    def _raise_start_error(self, name: str, happened: str) -> None:
        tail = self.tail(name)
        raise SandboxError(f"start {name}", happened, f"Its log is {self.log(name)}" + (f":\n{tail}" if tail else "."))


def _listen(port: int, name: str) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise SandboxError(f"start {name}", f"port {port} of 127.0.0.1 is in use ({reason})") from error
