# SPDX-License-Identifier: Apache-2.0
"""A sandbox that lives as long as a test needs it, on a machine that afterwards looks as before."""

import itertools
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from amphora_driver.network import namespaces
from amphora_driver.sandbox import settings as sandbox_settings
from amphora_driver.sandbox.stack import Stack

AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)
_numbers = itertools.count()


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


@contextmanager
def running(**choices):
    """A sandbox of its own; yields the stack and its settings. AMPHORA_KEEP_LOGS names a folder for its logs."""
    folder = Path(tempfile.mkdtemp(prefix="ads-"))
    prefix = f"t{os.getpid() % 1000:03d}{next(_numbers)}"
    settings = sandbox_settings.choose(folder, prefix, AGENT_PYTHON, **choices)
    stack = Stack(settings)
    try:
        stack.up()
        yield stack, settings
    finally:
        stack.down()
        keep = os.environ.get("AMPHORA_KEEP_LOGS")
        if keep:
            shutil.copytree(settings.log, Path(keep, prefix), dirs_exist_ok=True)
    assert left_behind(settings) == []
    shutil.rmtree(folder)
