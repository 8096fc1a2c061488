# SPDX-License-Identifier: Apache-2.0
"""A sandbox for one test or module, which leaves no remains on the machine."""

import os
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import claimed
import msgspec
import preloaded

from amphora_driver.host import namespaces
from sandbox import settings as sandbox_settings
from sandbox.stack import Stack

AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)
# Below the ephemeral ports of the kernel (ip(7), ip_local_port_range).
_FIRST_PORT = 20000
# A second provider of the common sandbox, which accepts each request and does nothing. tests/cluster/other_provider.py
# reports its statuses. Octavia drops the third one at its start, because no such driver is installed.
DROPPED = "not_installed"
_PROVIDERS = f"haproxy: HAProxy and keepalived, noop_driver: a driver that does nothing, {DROPPED}: no driver"
SECOND_PROVIDER = {"api_settings": {"enabled_provider_drivers": _PROVIDERS}}


def _sessions(stack):
    """Return the process sessions of the running programs."""
    running = [stack.supervision.running(name) for name in stack.supervision.names()]
    return {process.pid for process in running if process is not None}


def left_behind(settings, sessions=frozenset()):
    """Return the remains of a sandbox on the machine: namespaces, processes, mounts.

    Args:
        settings: of the sandbox.
        sessions: of its programs. Arguments and environment of a forked program do not name the sandbox.
    """
    prefix = f"{settings.prefix}-"
    found = [f"namespace {name}" for name in namespaces.names(prefix)]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            session = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[3])
        except OSError:
            continue
        if (settings.state.encode() in words or session in sessions) and int(folder.name) != os.getpid():
            found.append(f"process {folder.name}")
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line.split()[1]}" for line in mounts if settings.state in line or f"/{prefix}" in line]
    return found


def provider_agents(stack):
    """Return the provider agent processes that octavia-driver-agent started itself."""
    found = stack.supervision.running("octavia-driver-agent").children()
    return [one for one in found if b"provider_agent" in title(one)]


def title(process):
    """Return the title of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


class _Common:
    """The sandbox that modules share by default."""

    def __init__(self):
        self._closing = ExitStack()
        self._running = None
        self._used = False

    @contextmanager
    def used(self):
        """Return stack and settings for one module; start the sandbox if necessary."""
        if self._running is None:
            self._running = self._closing.enter_context(_started({"octavia_options": SECOND_PROVIDER}))
        self._used = True
        try:
            yield self._running
        finally:
            self._used = False

    def end_if_unused(self):
        """End the common sandbox, unless the present module uses it."""
        if not self._used:
            self._running = None
            self._closing.close()


_COMMON = _Common()


@contextmanager
def common():
    """The common sandbox of this process, for one session."""
    try:
        yield _COMMON
    finally:
        _COMMON.end_if_unused()


@contextmanager
def running(**choices):
    """Run a separate sandbox; yield the stack and its settings.

    AMPHORA_KEEP_LOGS names a folder for the logs.
    """
    _COMMON.end_if_unused()
    with _started(choices) as started:
        yield started


@contextmanager
def _started(choices):
    with ExitStack() as closing:
        number = closing.enter_context(claimed.number(_free))
        folder = Path(tempfile.mkdtemp(prefix="ads-"))
        settings = _settings(folder, number, choices)
        stack = Stack(settings)
        preloaded.supervision_forks(stack.supervision)
        sessions = set()
        try:
            stack.up()
            sessions |= _sessions(stack)
            yield stack, settings
        finally:
            sessions |= _sessions(stack)
            stack.down()
            keep = os.environ.get("AMPHORA_KEEP_LOGS")
            if keep:
                shutil.copytree(settings.log, Path(keep, folder.name), dirs_exist_ok=True)
        assert left_behind(settings, sessions) == []
        shutil.rmtree(folder)


def _settings(folder, number, choices):
    """Return settings with unique names and ports, because several sandboxes start at the same time."""
    chosen = sandbox_settings.load_or_create_settings(folder, _prefix(number), AGENT_PYTHON, **choices)
    octavia, network = _ports(number)
    settings = msgspec.structs.replace(chosen, octavia_port=octavia, network_port=network, status_port=0)
    (folder / "sandbox.json").write_bytes(msgspec.json.encode(settings))
    assert sandbox_settings.load_settings(folder) == settings
    return settings


def _prefix(number):
    return f"t{number}"


def _ports(number):
    return _FIRST_PORT + 2 * number, _FIRST_PORT + 2 * number + 1


def _free(number):
    """Return whether the machine has no remains of this number, for example of a killed test."""
    if namespaces.names(f"{_prefix(number)}-"):
        return False
    for port in _ports(number):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
