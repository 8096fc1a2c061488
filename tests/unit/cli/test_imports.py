# SPDX-License-Identifier: Apache-2.0
"""A command of `amphoractl` imports its own modules only: the import takes most of the time of a command."""

import subprocess
import sys

import pytest

from amphora_driver.cli.main import COMMANDS, LazyCommands

# The version and the overview of the commands need no command, no database and no configuration.
_OF_COMMANDS = (
    *("sqlalchemy", "oslo_config", "oslo_log", "msgspec", "prometheus_client", "cryptography", "urllib3"),
    *("amphora_driver.cli.loadbalancer", "amphora_driver.database", "amphora_driver.config"),
)
# Each of these modules belongs to other commands: upgrades, drift and rendering, secrets, checks of OpenStack, the
# read-only mode.
_OF_OTHERS = (
    *("alembic", "jinja2", "jsonschema", "keystoneauth1", "requests", "urllib3", "oslo_log.log"),
    "amphora_driver.render",
    *("amphora_driver.maintenance", "amphora_driver.telemetry.fleet_queries", "amphora_driver.store.requests"),
)
_PROGRAM = """
import sys
from amphora_driver.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code or 0
print(status, *(name for name in {others!r} if name in sys.modules), file=sys.stderr)
"""
_BALANCER = "52cf0000-0000-4000-8000-000000000001"


def run(others, *words):
    """Run a command line in a process of its own; return its output, and its status with the imported modules."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(others=others), *words], capture_output=True, text=True, check=True
    )
    return ran.stdout, ran.stderr.splitlines()[-1]


@pytest.mark.parametrize(("word", "shown"), [("--version", "0"), ("--help", "loadbalancer list"), ("help", "job list")])
def test_the_version_and_the_overview_import_no_command(word, shown):
    out, imported = run(_OF_COMMANDS, word)
    assert imported == "0"
    assert shown in out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("loadbalancer", "list"), _BALANCER),
        (("loadbalancer", "show", _BALANCER), _BALANCER),
        (("amphora", "list"), _BALANCER),
        (("job", "list"), _BALANCER),
        (("certificate", "list", "-f", "json"), "[]"),
    ],
)
def test_a_command_imports_no_module_of_other_commands(filled, words, shown):
    out, imported = run(_OF_OTHERS, "--config-file", filled, *words)
    assert imported == "0"
    assert shown in out


def test_the_check_of_the_broker_does_not_import_celery(filled, tmp_path):
    more = tmp_path / "broker.conf"
    more.write_text("[amp_queue]\nengine = celery\nbroker_url = amqp://127.0.0.1:1//\n")
    files = ("--config-file", filled, "--config-file", str(more))
    out, imported = run(("celery",), *files, "status", "check", "-c", "Check", "-c", "Details", "-f", "value")
    assert "ConnectionRefusedError" in out or "OperationalError" in out
    assert "celery" not in imported


def test_all_commands_of_the_package_are_found(entry_points):
    found = dict(LazyCommands(COMMANDS))
    named = {name.replace("_", " ") for name, _ in entry_points(COMMANDS)}
    assert named <= found.keys()
    assert found["loadbalancer list"].load().__name__ == "ListLoadBalancers"
