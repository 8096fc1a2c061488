# SPDX-License-Identifier: Apache-2.0
"""Processes that survive the process that started them, and that a later process finds again.

Invariant: a process is identified by its PID *and* its start time, so that a process with a reused PID never gets a
signal. A signal is sent through a pidfd; the identity is checked after the pidfd is open.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
# During execve(2), /proc shows no arguments of a process for a moment. `_read_arguments` waits this number of seconds
# for the arguments.
_EXEC_SECONDS = 0.5
# PF_KTHREAD in the field `flags` of /proc/PID/stat: the process is a kernel thread.
_KERNEL_THREAD = 0x00200000


class Process(msgspec.Struct, frozen=True):
    """A process: its PID, the clock tick of its start, and the boot id of the kernel."""

    pid: int
    started: int
    boot: str

    def alive(self) -> bool:
        """Whether the process runs; False for a zombie."""
        _reap(self.pid)
        found = _read_stat(self.pid)
        return found is not None and found[0] not in {"Z", "X"} and self._matches(found)

    def children(self) -> list[Process]:
        """The child processes. The kernel has a list of children for each thread."""
        numbers: list[str] = []
        # The process or a thread may end during the read of /proc, so missing files are ignored.
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    numbers += (thread / "children").read_text(encoding="ascii").split()
        found = [identify(int(number)) for number in numbers]
        return [child for child in found if child is not None] if self.alive() else []

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has ended."""
        descriptor = self._open_pidfd()
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; False if it still runs after this time."""
        descriptor = self._open_pidfd()
        if descriptor is None:
            return True
        with closing(select.epoll()) as events:
            events.register(descriptor, select.EPOLLIN)
            ended = bool(events.poll(seconds))
        os.close(descriptor)
        _reap(self.pid)
        return ended

    def _matches(self, found: tuple[str, int]) -> bool:
        return found[1] == self.started and _read_boot_id() == self.boot

    def _open_pidfd(self) -> int | None:
        try:
            descriptor = os.pidfd_open(self.pid)
        # Both errors mean that the process has ended. Some versions of Linux return ENOENT instead of ESRCH.
        except (ProcessLookupError, FileNotFoundError):
            return None
        if self.alive():
            return descriptor
        os.close(descriptor)
        return None


def identify(pid: int) -> Process | None:
    """The process that has this PID now; None if there is none."""
    found = _read_stat(pid)
    return None if found is None else Process(pid, found[1], _read_boot_id())


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path, pass_as_3: int | None = None) -> Process:
    """Start a program, searched on PATH, in its own session, with its output appended to a log.

    The environment is complete: the program inherits no other variable. The program gets the descriptor `pass_as_3` as
    descriptor 3.
    """
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if pass_as_3 is not None:
        actions.append((os.POSIX_SPAWN_DUP2, pass_as_3, 3))
    pid = os.posix_spawnp(argv[0], list(argv), dict(environment), file_actions=actions, setsid=True)
    process = identify(pid)
    if process is None:
        raise ProcessLookupError(f"{argv[0]} ended at once, and another thread collected its status")
    return process


def find_by_last_argument(last_argument: str) -> list[Process]:
    """All processes with this last argument; finds a process whose start was not recorded."""
    return find(lambda entry: _read_arguments(entry)[-1] == last_argument.encode())


def find(matches: Callable[[Path], bool]) -> list[Process]:
    """All processes with a matching directory in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end while its files in /proc are read, so errors are ignored.
            with suppress(OSError):
                if matches(entry):
                    found.append(identify(int(entry.name)))
    return [process for process in found if process is not None]


def _read_arguments(entry: Path) -> list[bytes]:
    """The arguments of a process; an empty one for a kernel thread or a zombie.

    During execve(2) the kernel shows no arguments for a short time, although the process has them before and after.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (text := (entry / "cmdline").read_bytes()) and time.monotonic() < deadline:
        stat = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if stat[0] in {"Z", "X"} or int(stat[6]) & _KERNEL_THREAD:
            break
        time.sleep(0.001)
    return text.rstrip(b"\0").split(b"\0")


def signal_and_wait(processes: Sequence[Process], number: signal.Signals, seconds: float) -> bool:
    """Send a signal to all processes and wait for their end; False if one still runs after this time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.signal(number)
    # The list is built completely before `all`, because `all` stops at the first False. `wait` must run for each
    # process, because `wait` also reaps child processes.
    ended = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    return all(ended)


def _read_stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of a process may contain spaces and parentheses, so the other fields start after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _read_boot_id() -> str:
    return _BOOT_ID_FILE.read_text(encoding="ascii").strip()


def _reap(pid: int) -> None:
    """Reap a child of this process; no error for other processes."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
