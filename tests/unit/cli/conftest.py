# SPDX-License-Identifier: Apache-2.0
"""`amphoractl` with the entry points of setup.cfg, installed or not."""

import configparser
import importlib
import io
import logging
from pathlib import Path

import migrated
import pytest
from cliff.commandmanager import CommandManager

from amphora_driver.cli.main import COMMANDS, Amphoractl
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job

SETUP = Path(__file__).parents[3] / "setup.cfg"


def entry_points(group):
    parser = configparser.ConfigParser()
    parser.read(SETUP)
    lines = parser["options.entry_points"][group].strip().splitlines()
    return [tuple(part.strip() for part in line.split("=")) for line in lines]


def resolve(target):
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


def run_amphoractl(path, *words):
    """Run one command line; return its status, standard output and standard error."""
    commands = CommandManager(COMMANDS)
    for name, target in entry_points(COMMANDS):
        commands.add_command(name.replace("_", " "), resolve(target))
    out, err = io.StringIO(), io.StringIO()
    app = Amphoractl(commands, stdout=out, stderr=err)
    status = app.run(["--config-file", str(path), *words])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Restore the root logger: cliff adds a handler for its standard error, which a test closes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(name="entry_points")
def entry_points_of():
    """Return names and targets of a group in setup.cfg."""
    return entry_points


@pytest.fixture(name="resolve")
def resolve_target():
    """Return the object that an entry point's target names."""
    return resolve


@pytest.fixture
def filled(tmp_path):
    """A configuration whose database has one load balancer with its amphora."""
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url)
    balancer = "52cf0000-0000-4000-8000-000000000001"
    work_row = {"load_balancer_id": balancer, "project_id": "p", "op": "apply", "generation": 8, "applied": 7}
    machine = {"id": "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11", "load_balancer_id": balancer, "role": "STANDALONE"}

    def fill(connection):
        connection.execute(job.insert().values(**work_row))
        connection.execute(amphora.insert().values(**machine, state="ready", heartbeat_key=b"", created_at=0.0))

    database.write(fill)
    database.dispose()
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {url}\nencryption_key_file = {tmp_path}/keys\n")
    return path


@pytest.fixture
def amphoractl():
    """Return a function that runs a command line: configuration file, then the words."""
    return run_amphoractl
