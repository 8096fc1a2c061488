# SPDX-License-Identifier: Apache-2.0
"""Processes of two versions in one sandbox: programs of the version in a folder, and the registry of processes."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import cache

import msgspec

from amphora_driver import config
from amphora_driver.store import process_registry


@cache
def environment(folder):
    """Return an environment in which Python imports the version in a folder, not the working directory's."""
    found = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    asked = [sys.executable, "-c", "import amphora_driver; print(amphora_driver.__file__)"]
    said = subprocess.run(asked, env={**os.environ, **found}, capture_output=True, text=True, check=True).stdout
    assert said.startswith(str(folder))
    return found


def of_version(program, folder):
    """Return a program of the sandbox that runs the version in a folder."""
    words = [f"{name}={value}" for name, value in environment(folder).items()]
    # gunicorn imports from its working directory first.
    return msgspec.structs.replace(program, argv=("env", f"--chdir={folder}", *words, *program.argv))


@contextmanager
def second_controller(lab, folder):
    """Run a controller of the version in a folder beside the current one; yield the program."""
    (first,) = [one for one in lab.stack.programs() if one.name == "amphora-controller"]
    program = of_version(first, folder)
    program = msgspec.structs.replace(program, name="amphora-controller-2", ready=lambda _: True)
    lab.stack.supervision.start(program)
    try:
        yield program
    finally:
        lab.stack.supervision.stop(program.name)


def amphoractl(lab, *words, folder=None):
    """Run a command of the version in a folder, or of the current one; return exit status and output."""
    return run_command({config.FILE_VARIABLE: str(lab.settings.driver_configuration)}, *words, folder=folder)


def run_command(variables, *words, folder=None):
    """Run amphoractl with these variables of the environment; return exit status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "amphora_driver.cli.main", *words, "-f", "json"],
        env={**os.environ, **variables, **({} if folder is None else environment(folder))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def processes(lab, kind=None):
    """Return the registered processes by name."""
    return {row.name: row for row in lab.database.read(lambda c: process_registry.list_processes(c, kind))}


def controllers(lab):
    return set(processes(lab, process_registry.ProcessKind.CONTROLLER))


def left_to(lab, works, rests):
    """Drain one controller, so that the other one does all work."""

    def write(connection):
        process_registry.set_process_draining(connection, rests, draining=True)
        process_registry.set_process_draining(connection, works, draining=False)

    lab.database.write(write)
    # Controllers read the request at their next heartbeat.
    beat = {name: row.beat for name, row in processes(lab).items()}

    def heard():
        now = processes(lab)
        return all(now[one].beat > beat[one] + 1 for one in (works, rests))

    lab.cloud.until(heard, "both controllers have sent a heartbeat")
