# SPDX-License-Identifier: Apache-2.0
"""A command of `amphoractl` imports its own modules only: the import takes most of the time of a command."""

import subprocess
import sys

import pytest

from amphora_driver.cli.main import COMMANDS, LazyCommands

# Each of these modules belongs to other commands: upgrades, CA rotation, drift, rendering of metadata schemas.
_OTHERS = ("alembic", "amphora_driver.certificates.renewal", "amphora_driver.maintenance.drift_audit")
_PROGRAM = """
import sys
from amphora_driver.cli.main import main
status = main(sys.argv[1:])
print(status, *(name for name in {others!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [("loadbalancer", "list"), ("amphora", "list"), ("job", "list")])
def test_a_command_imports_no_module_of_other_commands(filled, words):
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(others=_OTHERS), "--config-file", filled, *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stderr.splitlines()[-1] == "0"
    assert "52cf0000-0000-4000-8000-000000000001" in ran.stdout


def test_all_commands_of_the_package_are_found(entry_points):
    found = dict(LazyCommands(COMMANDS))
    named = {name.replace("_", " ") for name, _ in entry_points(COMMANDS)}
    assert named <= found.keys()
    assert found["loadbalancer list"].load().__name__ == "ListLoadBalancers"
