# SPDX-License-Identifier: Apache-2.0
"""One process that imports the programs of a sandbox once, and forks each program that a test starts.

The import takes 9 of the 10 seconds of processor time that a sandbox needs to start. All workers of a run share the
process. It ends when the run ends, and its forks live on: `Supervision` ends them.

A program takes this way only if it is `python -m MODULE` of this interpreter, for a module of `_MODULES`. Everything
else is started as an operator's sandbox starts it, and `test_sandbox.py` starts all programs that way.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from amphora_driver import points
from amphora_driver.compute import process as processes
from amphora_driver.sandbox.processes import Supervision

# The folder of the run, and the process id of the pytest process that began it: tests/conftest.py sets both.
FOLDER, RUN = "AMPHORA_TESTS_PRELOADED", "AMPHORA_TESTS_RUN"
_MODULES = {
    "gunicorn": "gunicorn.__main__",
    "amphora_driver.sandbox.network_api": "amphora_driver.sandbox.network_api",
    "amphora_driver.sandbox.octavia_start": "amphora_driver.sandbox.octavia_start",
    "amphora_driver.sandbox.inward": "amphora_driver.sandbox.inward",
    "amphora_driver.sandbox.outward": "amphora_driver.sandbox.outward",
    "amphora_driver.controller.service": "amphora_driver.controller.service",
    "amphora_driver.health.service": "amphora_driver.health.service",
}
# What these programs import while they run: drivers by name, databases by URL, gunicorn's workers.
_LATER = (
    "octavia.api.app",
    "octavia.cmd.driver_agent",
    "octavia.db.models",
    "octavia.db.repositories",
    "gunicorn.app.wsgiapp",
    "gunicorn.workers.gthread",
    "amphora_driver.driver",
    "amphora_driver.provider_agent",
    "amphora_driver.compute.netns",
    "amphora_driver.network.local",
    "amphora_driver.topology.single",
    "amphora_driver.topology.active_standby",
    "amphora_driver.sandbox.octavia_network",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "sqlalchemy.dialects.mysql.pymysql",
    "pymysql",
)
# Of this process, and so of the preloaded one: a test may set another one for the programs of its sandbox.
_PYTHONPATH = os.environ.get("PYTHONPATH")
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 20
_START_SECONDS = 120


def supervision_forks(supervision: Supervision) -> None:
    """Have a sandbox start its programs by forks, if this is a run with a folder."""
    if FOLDER in os.environ:
        supervision.spawn = _spawn


def _spawn(argv, environment, log, pass_as_3=None):
    request = _request(list(argv), dict(environment), log)
    if request is None:
        return processes.spawn(argv, environment, log, pass_as_3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(str(_ensure()))
        socket.send_fds(asking, [json.dumps(request).encode()], [] if pass_as_3 is None else [pass_as_3])
        pid = int(asking.recv(100))
    found = processes.identify(pid)
    if found is None:
        raise ProcessLookupError(f"{argv[0]} ended at once; its log is {log}")
    return found


def _request(argv, environment, log):
    """What the process is asked for; None if it cannot start this program in this environment."""
    namespace = None
    if argv[0] == "nsenter" and argv[1].startswith("--net=") and argv[2] == "--":
        namespace, argv = argv[1].removeprefix("--net="), argv[3:]
    if argv[:2] != [sys.executable, "-m"] or argv[2] not in _MODULES:
        return None
    if environment.get("PYTHONPATH") != _PYTHONPATH:
        return None
    return {"argv": argv[2:], "environment": environment, "log": str(log), "namespace": namespace}


def _ensure() -> Path:
    """The socket; the first worker that asks starts the process."""
    folder = Path(os.environ[FOLDER])
    place, log = folder / "socket", folder / "log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            ready, told = os.pipe()
            processes.spawn([sys.executable, __file__, str(place), os.environ[RUN]], dict(os.environ), log, told)
            os.close(told)
            readable, _, _ = select.select([ready], [], [], _START_SECONDS)
            said = os.read(ready, 10) if readable else b""
            os.close(ready)
            assert said == b"ready", f"the preloaded process did not start:\n{log.read_text()}"
    return place


# --- the process itself -----------------------------------------------------------------------------------------------


def _serve(place: Path, run: int, told: int = 3) -> None:
    """Fork a program for each request, until the run's first process has ended.

    Args:
        place: the path of the socket.
        run: the process id of the run's first process.
        told: the descriptor that is told when the socket listens.
    """
    from amphora_driver.sandbox import octavia_start  # noqa: PLC0415 - only in this process

    octavia_start.prepare()
    for name in (*_MODULES.values(), *_LATER):
        if name != "gunicorn.__main__":
            importlib.import_module(name)
    # Pages that the collector does not write to stay shared with the forks.
    gc.collect()
    gc.freeze()
    # The kernel reaps the forks: no fork of this process is waited for here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ended = os.pidfd_open(run)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    listener.listen(64)
    os.write(told, b"ready")
    os.close(told)
    while True:
        readable, _, _ = select.select([listener, ended], [], [])
        if ended in readable:
            return
        asking, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(asking, _MOST_BYTES, 1)
        pid = os.fork()
        if pid == 0:
            os.close(ended)
            listener.close()
            asking.close()
            _become(json.loads(message), descriptors)
        # A request that is interrupted has no reader any more.
        with suppress(OSError):
            asking.send(str(pid).encode())
        asking.close()
        for one in descriptors:
            os.close(one)


def _become(request, descriptors) -> None:
    """Be the program of a request; does not return."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        if descriptors:
            os.dup2(descriptors[0], 3)
        if request["namespace"] is not None:
            _enter(request["namespace"])
        os.environ.clear()
        os.environ.update(request["environment"])
        directory = os.environ.get(points.VARIABLE)
        points._DIRECTORY = directory
        module, *arguments = request["argv"]
        sys.argv = [module, *arguments]
        # gunicorn looks for its application where it was started.
        sys.path[0] = str(Path.cwd())
        runpy.run_module(_MODULES[module], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the log of the program is the place for it
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    os.close(descriptor)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
