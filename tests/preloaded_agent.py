# SPDX-License-Identifier: Apache-2.0
"""One process that imports the agent once, and forks the amphorae of the tests.

A fork does the work of `setpriv`, `nsenter`, `unshare` and `python -m amphora_agent.services.supervisor`. Its
supervisor forks the agent too. Both are the agent's own code, imported earlier: the import takes half a second of
processor time.

`system/test_netns_compute.py`, `system/test_sandbox.py` and `dataplane/test_agent_service.py` start amphorae with the
real programs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import forks

_SUPERVISOR = ["-m", "amphora_agent.services.supervisor"]
_AGENT = ["-m", "amphora_agent.server"]
# Modules that the agent imports at its start.
_IMPORTED = (
    "amphora_agent.services.supervisor",
    "amphora_agent.server",
    "amphora_agent.app",
    "amphora_agent.tls_gate",
    "amphora_agent.tls_identity",
    "gunicorn.workers.gthread",
)
# sched.h and sys/mount.h.
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
_PRIVATE, _PLAIN = 0x40000 | 0x4000, 2 | 4 | 8
_PR_SET_PDEATHSIG = 1
_END_SECONDS = 30.0
# Variables of the environment that the process keeps.
_KEPT = ("PATH", "LANG", "PYTHONPYCACHEPREFIX", forks.FOLDER, forks.RUN, "AMPHORA_AGENT_PYTHON")


def possible(interpreter: str, environment) -> bool:
    """Return whether amphorae of an interpreter with this environment can be forks."""
    known = (sys.executable, os.environ.get("AMPHORA_AGENT_PYTHON"))
    return forks.FOLDER in os.environ and interpreter in known


def boot(interpreter: str, spec: Path, namespace: str, environment, log: Path, *, ends_with: int | None = None) -> int:
    """Start an amphora.

    Args:
        interpreter: the Python that the amphora's programs are started with.
        spec: the path of the supervisor's specification.
        namespace: the path of the management network namespace.
        environment: the complete environment.
        log: file for standard output and error.
        ends_with: the amphora ends with the process of this id, if given.

    Returns:
        the process id of its outermost process. The supervisor is the only child of that process.
    """
    request = {
        "argv": [interpreter, *_SUPERVISOR, str(spec)],
        "namespace": namespace,
        "environment": dict(environment),
        "log": str(log),
        "ends_with": ends_with,
    }
    return forks.ask(Path(__file__), interpreter, _imports(environment), request, [])


def ready(interpreter: str, environment) -> None:
    """Start the process that forks these amphorae.

    A program of a sandbox must not start it, because it would be in a namespace of that sandbox, and end with it.
    """
    if possible(interpreter, environment):
        forks.ensure(Path(__file__), interpreter, _imports(environment))


def _imports(environment):
    """Return the environment of the process, without variables by which a sandbox finds its processes."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": environment.get("PYTHONPATH", "")}


class Outermost:
    """The outermost process of an amphora that this process did not start itself."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = os.pidfd_open(pid)

    def kill(self) -> None:
        if self._descriptor is not None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, seconds: float = _END_SECONDS) -> None:
        """Wait until the process has ended."""
        if self._descriptor is None:
            return
        ended, _, _ = select.select([self._descriptor], [], [], seconds)
        assert ended, f"process {self.pid} does not end"
        os.close(self._descriptor)
        self._descriptor = None


# -- forking process ---------------------------------------------------------------------------------------------------


def _become(request, _descriptors) -> None:
    """Run as the outermost process of an amphora, in place of unshare(1)."""
    argv = request["argv"]
    forks.rename(argv)
    forks.enter(request["namespace"])
    os.chdir("/")
    forks.check(forks.LIBC.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID), "unshare")
    # The descriptor closes when this process ends, which the supervisor detects at once.
    alive, kept = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(kept)
        forks.end_with(lambda: _supervise(argv, alive))
    os.close(alive)
    _await(child, request["ends_with"])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _await(child: int, ends_with: int | None) -> None:
    """Wait until the child has ended; kill the child when the other process has ended."""
    ended = os.pidfd_open(child)
    watched = [ended]
    if ends_with is not None:
        with suppress(ProcessLookupError):
            watched.append(os.pidfd_open(ends_with))
    readable, _, _ = select.select(watched, [], [])
    if ended not in readable:
        os.kill(child, signal.SIGKILL)


def _supervise(argv, alive: int) -> None:
    """Run as the first process of an amphora, and end with the outermost one."""
    from amphora_agent.services import supervisor  # noqa: PLC0415 - only in this process

    forks.LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:
        return  # the process ended before the watch
    os.close(alive)
    mount = forks.LIBC.mount
    forks.check(mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None), "making mounts private")
    forks.check(mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_PLAIN), None), "mounting /proc")
    interpreter, real = argv[0], os.posix_spawnp

    def spawn(path, words, environment, **how):
        return _fork_agent(words, how) if words == [interpreter, *_AGENT] else real(path, words, environment, **how)

    os.posix_spawnp = spawn
    sys.argv = [supervisor.__file__, argv[-1]]
    supervisor.main()


def _fork_agent(words, how) -> int:
    """Do the work of posix_spawn(3) with this program, these attributes and file actions."""
    pid = os.fork()
    if pid:
        return pid

    def run():
        os.setpgid(0, how["setpgroup"])
        signal.set_wakeup_fd(-1)
        for number in set(how["setsigdef"]) - {signal.SIGPIPE}:  # the interpreter ignores SIGPIPE
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, how["setsigmask"])
        for action in how["file_actions"]:
            if action[0] == os.POSIX_SPAWN_OPEN:
                opened = os.open(action[2], action[3], action[4])
                os.dup2(opened, action[1])
                os.close(opened)
            else:
                os.dup2(action[1], action[2])
        # exec(2) closes all others: Python opens no inheritable descriptors.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        from amphora_agent import failpoints, server  # noqa: PLC0415 - only in this process

        failpoints._DIRECTORY = os.environ.get(failpoints.VARIABLE)
        forks.rename(words)
        sys.argv = [server.__file__]
        server.main()

    forks.end_with(run)
    return 0


def _prepare() -> None:
    # This folder is on the path only for `forks`.
    sys.path.pop(0)
    for name in _IMPORTED:
        importlib.import_module(name)


if __name__ == "__main__":
    _prepare()
    forks.serve(_become)
