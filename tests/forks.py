# SPDX-License-Identifier: Apache-2.0
"""Processes that import programs once for all workers, and fork each program that a test starts.

The import takes most of the processor time of a start. Such a process ends with the run and ends its remaining forks,
so that a killed run leaves no program that restarts its workers. `preloaded.py` forks the programs of a sandbox,
`preloaded_agent.py` forks amphorae. This module imports only the standard library, because the interpreter of the
agents has no test packages.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

# The folder of the run, and the process id of the pytest process that started it: tests/conftest.py sets both.
FOLDER, RUN = "AMPHORA_TESTS_PRELOADED", "AMPHORA_TESTS_RUN"
# A fork keeps these variables, because it can request forks itself.
_KEPT = (FOLDER, RUN, "AMPHORA_AGENT_PYTHON")
CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 20
_START_SECONDS = 120
# Bytes in the command line of the process, reserved for the command line of a fork.
_RESERVED = 2048
LIBC = ctypes.CDLL(None, use_errno=True)


def ask(program: Path, interpreter: str, environment: dict[str, str], request: dict, descriptors: list[int]) -> int:
    """Let a process fork; the first worker that needs the process starts it.

    Args:
        program: the file of the process.
        interpreter: the Python of the process.
        environment: of the process, not of the fork.
        request: describes the fork.
        descriptors: passed on to the fork.

    Returns:
        the process id of the fork.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(str(ensure(program, interpreter, environment)))
        socket.send_fds(asking, [json.dumps(request).encode()], descriptors)
        return int(asking.recv(100))


def ensure(program: Path, interpreter: str, environment: dict[str, str]) -> Path:
    """Return the socket of a process; start the process if it does not run."""
    made_of = f"{program}\n{interpreter}\n{environment.get('PYTHONPATH')}"
    folder = Path(os.environ[FOLDER]) / hashlib.sha256(made_of.encode()).hexdigest()[:8]
    folder.mkdir(exist_ok=True)
    place, log = folder / "socket", folder / "log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _start([interpreter, str(program), str(place), os.environ[RUN], "-" * _RESERVED], environment, log)
    return place


def _start(argv: list[str], environment: dict[str, str], log: Path) -> None:
    ready, told = os.pipe()
    # setsid(1) forks and ends: the process is no child of a worker, which may end its children.
    pid = os.posix_spawnp(
        "setsid",
        ["setsid", "--fork", *argv],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, told, 3),
        ],
    )
    os.close(told)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    readable, _, _ = select.select([ready], [], [], _START_SECONDS)
    said = os.read(ready, 10) if readable else b""
    os.close(ready)
    assert said == b"ready", f"the preloaded process did not start:\n{log.read_text()}"


# -- forking process ---------------------------------------------------------------------------------------------------


def serve(become) -> None:
    """Fork for each request, until the run's first process has ended.

    Args:
        become: called in the fork, with the request and its descriptors; the fork ends when it returns.
    """
    place, run, told = sys.argv[1], int(sys.argv[2]), 3
    # Pages that the collector does not write to stay shared with the forks.
    gc.collect()
    gc.freeze()
    # The kernel reaps the forks, because this process does not wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ended = os.pidfd_open(run)
    forks: dict[int, int] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen(64)
    os.write(told, b"ready")
    os.close(told)
    while True:
        readable, _, _ = select.select([listener, ended], [], [])
        if ended in readable:
            end_all(forks)
            return
        asking, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(asking, _MOST_BYTES, 1)
        pid = os.fork()
        if pid == 0:
            for one in (ended, *forks.values()):
                os.close(one)
            listener.close()
            asking.close()
            _begin(become, json.loads(message), descriptors)
        drop_ended(forks)
        # The fork may have ended, and no process waits for it.
        with suppress(ProcessLookupError):
            forks[pid] = os.pidfd_open(pid)
        # An interrupted request has no reader.
        with suppress(OSError):
            asking.send(str(pid).encode())
        asking.close()
        for one in descriptors:
            os.close(one)


def drop_ended(forks: dict[int, int]) -> None:
    """Close the descriptors of forks that have ended."""
    ended = select.select(forks.values(), [], [], 0)[0] if forks else []
    for pid in [pid for pid, descriptor in forks.items() if descriptor in ended]:
        os.close(forks.pop(pid))


def end_all(forks: dict[int, int]) -> None:
    """End the remaining forks, each with its process group."""
    drop_ended(forks)
    for pid in forks:
        # The fork has not ended, so no other process has its number.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _begin(become, request, descriptors) -> None:
    """Run the program of a request in its own session, with its environment, log and directory."""

    def run():
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        os.environ.clear()
        os.environ.update({**request["environment"], **kept})
        become(request, descriptors)

    end_with(run)


def end_with(run) -> None:
    """Call a function and end this process as the interpreter ends a program; does not return."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the log of the program gets the traceback
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def enter(namespace: str) -> None:
    """Move this process to a network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    check(LIBC.setns(descriptor, CLONE_NEWNET), f"setns to {namespace}")
    os.close(descriptor)


def check(result: int, what: str) -> None:
    """Raise the error of a failed call of the C library."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what} failed")


def rename(argv: list[str]) -> None:
    """Show these words as the command line of this process (proc(5), /proc/PID/cmdline)."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    # Fields 48 and 49 of the line; the text after the name starts with field 3.
    begin, end = int(fields[45]), int(fields[46])
    words = b"\0".join(map(os.fsencode, argv)) + b"\0"
    size = end - begin
    assert len(words) < size, "the command line of the fork is longer than the reserved space"
    ctypes.memmove(begin, words.ljust(size, b"\0"), size)
