# SPDX-License-Identifier: Apache-2.0
"""A sandbox that lives as long as a test needs it, on a machine that afterwards looks as before."""

import os
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import claimed
import msgspec

from amphora_driver.network import namespaces
from amphora_driver.sandbox import settings as sandbox_settings
from amphora_driver.sandbox.stack import Stack

AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)
# Below those that the kernel gives to whoever asks for any (ip(7), ip_local_port_range).
_FIRST_PORT = 20000


def left_behind(settings):
    """What of a sandbox is still on the machine: namespaces, processes, mounts."""
    prefix = f"{settings.prefix}-"
    found = [f"namespace {name}" for name in namespaces.names(prefix)]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if settings.state.encode() in words and int(folder.name) != os.getpid():
            found.append(f"process {folder.name}")
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line.split()[1]}" for line in mounts if settings.state in line or f"/{prefix}" in line]
    return found


def provider_agents(stack):
    """Those processes of ours that octavia-driver-agent has started itself."""
    found = stack.supervision.running("octavia-driver-agent").children()
    return [one for one in found if b"provider_agent" in title(one)]


def title(process):
    """What a process is called; nothing if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def running(**choices):
    """A sandbox of its own; yields the stack and its settings. AMPHORA_KEEP_LOGS names a folder for its logs."""
    with ExitStack() as closing:
        number = closing.enter_context(claimed.number(_free))
        folder = Path(tempfile.mkdtemp(prefix="ads-"))
        settings = _settings(folder, number, choices)
        stack = Stack(settings)
        try:
            stack.up()
            yield stack, settings
        finally:
            stack.down()
            keep = os.environ.get("AMPHORA_KEEP_LOGS")
            if keep:
                shutil.copytree(settings.log, Path(keep, folder.name), dirs_exist_ok=True)
        assert left_behind(settings) == []
        shutil.rmtree(folder)


def _settings(folder, number, choices):
    """Its names and ports are nobody else's: several start at the same time, and each looks before it takes."""
    chosen = sandbox_settings.choose(folder, _prefix(number), AGENT_PYTHON, **choices)
    octavia, network = _ports(number)
    settings = msgspec.structs.replace(chosen, octavia_port=octavia, network_port=network, status_port=0)
    (folder / "sandbox.json").write_bytes(msgspec.json.encode(settings))
    assert sandbox_settings.find(folder) == settings
    return settings


def _prefix(number):
    return f"t{number}"


def _ports(number):
    return _FIRST_PORT + 2 * number, _FIRST_PORT + 2 * number + 1


def _free(number):
    """Whether no test that was killed, and nobody else, has what goes with this number."""
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
