# SPDX-License-Identifier: Apache-2.0
"""One sandbox for the whole ring, on a machine that afterwards looks as before."""

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from cloud import Cloud

from amphora_driver.network import namespaces
from amphora_driver.sandbox import demo
from amphora_driver.sandbox import settings as sandbox_settings
from amphora_driver.sandbox.stack import Stack
from amphora_driver.store.engine import Database

AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)


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


@pytest.fixture(scope="session")
def sandbox():
    """A sandbox of this run's own; its logs are printed if something is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="ads-"))
    settings = sandbox_settings.choose(folder, f"t{os.getpid() % 9999:04d}", AGENT_PYTHON)
    stack = Stack(settings)
    try:
        stack.up()
        yield stack, settings
    finally:
        stack.down()
    assert left_behind(settings) == []
    keep = os.environ.get("AMPHORA_KEEP_LOGS")
    if keep:
        shutil.copytree(settings.log, keep, dirs_exist_ok=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def settings(sandbox):
    return sandbox[1]


@pytest.fixture(scope="session")
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="session")
def database(settings):
    database = Database(settings.database_url)
    yield database
    database.dispose()


@pytest.fixture(scope="session")
def connection(settings):
    connection = demo.connect(settings)
    yield connection
    connection.close()


@pytest.fixture
def cloud(settings, connection, database):
    """The sandbox as a user sees it, without load balancers before and after the test."""
    cloud = Cloud(settings, connection, database)
    yield cloud
    cloud.clean()


@pytest.fixture
def member_process(stack):
    """Ends a member's server for the length of a with block."""

    @contextmanager
    def stopped(name):
        stack.supervision.stop(name)
        try:
            yield
        finally:
            stack.up()

    return stopped
