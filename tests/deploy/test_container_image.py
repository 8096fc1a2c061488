# SPDX-License-Identifier: Apache-2.0
"""The steps of deploy/container/Containerfile in a Debian tree, because no registry has a base image for the test."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/container/Containerfile"
PROGRAMS = ("amphora-controller", "amphora-health-manager", "amphora-cluster", "amphora-cluster-api")

pytestmark = [pytest.mark.extended, pytest.mark.quiet, pytest.mark.root, pytest.mark.lasts(1800)]


def instructions():
    """Pairs of instruction and arguments, with joined lines and without comments."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        yield tuple(line.split(" ", 1))


class Image:
    """What the instructions have set, as a container engine does."""

    def __init__(self, tree, wheels):
        self.tree, self.wheels = tree, wheels
        self.environment, self.user, self.command = {}, None, None

    def execute(self, instruction, arguments):
        if instruction == "RUN":
            # The packages are in the tree already: the test has no network in it.
            script = re.sub(r"apt-get update && .*?rm -rf /var/lib/apt/lists/\*", "true", arguments)
            self.tree.run(["sh", "-c", script], environment=self.environment)
        elif instruction == "COPY":
            source, target = arguments.split()
            place = self.tree.root / target.lstrip("/")
            if source == "dist/":
                shutil.copytree(self.wheels, place)
            else:
                shutil.copy(ROOT / source, place)
        elif instruction == "ENV":
            self.environment |= dict(one.split("=", 1) for one in arguments.split())
        elif instruction == "USER":
            self.user = arguments
        elif instruction == "CMD":
            self.command = json.loads(arguments)
        elif instruction == "ARG":
            name, _, value = arguments.partition("=")
            if name != "BASE":
                self.environment[name] = value.strip('"')
        else:
            assert instruction in {"FROM", "WORKDIR", "STOPSIGNAL"}, instruction


def test_the_image_runs_each_program(tree, wheels):
    image = Image(tree, wheels)
    image.environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/dependencies"}
    for one in instructions():
        image.execute(*one)
    assert image.command == ["amphora-controller"]
    assert image.user == "amphora-driver"
    assert not (tree.root / "tmp/wheels").exists()
    assert tree.run(["id", "--user", image.user]).strip() == "42490"
    shown = tree.run(["amphoractl", "--help"], image.user, image.environment)
    assert "database upgrade" in shown
    assert "group create" in shown
    for program in PROGRAMS:
        # Without keys and a schema, each program names the reason and ends.
        command = tree.command([program], image.user, image.environment)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1, program
        assert re.search(r"amphoractl .*database upgrade|encryption\.keys", done.stdout + done.stderr), done
