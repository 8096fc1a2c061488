# SPDX-License-Identifier: Apache-2.0
"""Output for programs keeps its names, and every command supports every format."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from sqlalchemy.sql.elements import quoted_name

from amphora_driver.cli import amphora, formatting, history, jobs, loadbalancer, resync, status
from amphora_driver.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
# Column names for programs. A name may be added at the end; no name may be removed or changed.
HEADS = {
    loadbalancer.LIST_HEAD: (
        *("ID", "Name", "Project", "Topology", "Provisioning", "Operating", "Wanted", "Applied", "Amphorae"),
        *("Has VIPs", "Last heartbeat", "Waits for", "Attempts", "Error", "Fail-over"),
    ),
    loadbalancer.LONG_HEAD[len(loadbalancer.LIST_HEAD) :]: (
        *("Reason", "VIPs", "Pending since", "Next attempt", "Owner", "Op", "Dirty", "Drift"),
    ),
    amphora.LIST_HEAD: (
        *("ID", "Load balancer", "Role", "State", "Has VIPs", "Address", "Wanted", "Confirmed"),
        *("Reported generation", "Last heartbeat", "Silent", "Certificate expires", "Image", "Agent version", "Drift"),
    ),
    history.HEAD: ("At", "What", "Event", "Number", "Object", "Seconds", "Detail"),
    resync.HEAD: ("Load balancer", "Asked", "Asked by", "Ended", "Outcome", "Detail"),
    status.HEAD: ("Check", "Result", "Details"),
    jobs.HEAD: (
        *("Load balancer", "Op", "Wanted", "Applied", "Waits for", "Pending since", "Objects pending", "To report"),
        *("Owner", "Epoch", "Attempts", "Due in", "Error"),
    ),
}


@pytest.mark.parametrize(("head", "names"), HEADS.items())
def test_column_names_stay(head, names):
    assert head == names


NOW = time.time()


@pytest.mark.parametrize(
    ("value", "person", "program"),
    [
        (formatting.Value(None), "", None),
        (formatting.Value(3), "3", 3),
        (formatting.Age(None), "never", None),
        (formatting.Age(None, ""), "", None),
        (formatting.Age(NOW + 86_400), "0.00 s ago", 0.0),
        (formatting.Remaining(None), "", None),
        (formatting.Remaining(NOW - 60), "0.00 s", 0.0),
        (formatting.Duration(None), "", None),
        (formatting.Duration(0.25), "0.25 s", 0.25),
        (formatting.Duration(59.94), "59.9 s", 59.94),
        (formatting.Duration(61), "1 min 1 s", 61.0),
        (formatting.Duration(3600), "1 h 0 min", 3600.0),
        (formatting.Duration(47 * 3600), "47 h 0 min", 169200.0),
        (formatting.Duration(3 * 86400 + 7200), "3 d 2 h", 266400.0),
        (formatting.ValueList(["a", "b"]), "a, b", ["a", "b"]),
        (formatting.ValueList([]), "", []),
        (formatting.Amphorae([]), "none", []),
        (formatting.Failovers([]), "none", []),
        (formatting.Timestamp(0.0), "1970-01-01 00:00:00 UTC", "1970-01-01T00:00:00+00:00"),
    ],
)
def test_values_in_tables_and_for_programs(value, person, program):
    assert (value.human_readable(), value.machine_readable()) == (person, program)


def test_a_failover_in_a_table():
    now = time.time()
    row = {"id": 3, "cause": "silent", "amphora_id": "a", "reason": None, "silent_since": 0.0, "ended_at": None}
    shown = formatting.Failovers([{**row, "begun_at": now - 90, "served_at": now - 88}]).human_readable()
    assert shown == "3: silent, begun 1 min 30 s ago, served again after 2.0 s, amphora a (no reason given)"


def test_column_names_of_a_failover_are_plain_text():
    (shown,) = formatting.Failovers([{quoted_name("begun_at", None): 0.0}]).machine_readable()
    assert {name: type(name) for name in shown} == {"begun_at": str}


# --- output formats -------------------------------------------------------------------------------------------------

LISTS = ("loadbalancer list", "loadbalancer list --long", "amphora list", "job list", "status check")


@pytest.mark.parametrize("command", LISTS)
@pytest.mark.parametrize("form", ["table", "json", "yaml", "value", "csv"])
def test_lists_support_every_format(amphoractl, filled, command, form):
    status, out, err = amphoractl(filled, *command.split(), "-f", form)
    assert (status in {0, 1, 2}, err) == (True, "")
    assert out.strip()
    if form == "json":
        assert json.loads(out)


@pytest.mark.parametrize("command", ["loadbalancer show 52cf", "amphora show 0b9d"])
@pytest.mark.parametrize("form", ["table", "json", "yaml", "value", "shell"])
def test_single_objects_support_every_format(amphoractl, filled, command, form):
    status, out, err = amphoractl(filled, *command.split(), "-f", form)
    assert (status, err) == (0, "")
    assert "0b9d1c52" in out


def test_a_single_column_can_be_selected(amphoractl, filled):
    assert amphoractl(filled, "loadbalancer", "list", "-f", "value", "-c", "ID", "-c", "Wanted")[1].split()[1] == "8"


# --- completion -----------------------------------------------------------------------------------------------------


def test_completion_contains_every_command(amphoractl, filled, entry_points):
    status, out, _err = amphoractl(filled, "complete")
    assert status == 0
    for name, _target in entry_points(COMMANDS):
        *groups, verb = name.split("_")
        variable = "_".join(["cmds", *groups]).replace("-", "_")  # a bash variable name
        assert re.search(rf"^\s*{variable}='.*\b{verb}\b", out, re.MULTILINE), name
    assert "--remove-unknown" in out


# --- the documents --------------------------------------------------------------------------------------------------


def named_commands():
    """Return every command line in the documents that begins with amphoractl, and its place."""
    found = {}
    for path in DOCS:
        for line in path.read_text(encoding="utf-8").splitlines():
            for words in re.findall(r"(?:^|[`$#] ?|run(?:s|:)? )\s*amphoractl ([a-z][^`|;]*)", line, re.IGNORECASE):
                found.setdefault(words.strip().rstrip("\\"), path.name)
    return found


def test_every_command_in_the_documents_exists(entry_points):
    known = {name.replace("_", " ") for name, _target in entry_points(COMMANDS)} | {"complete", "help"}
    groups = {name.partition(" ")[0] for name in known}
    wrong = []
    for line, page in named_commands().items():
        words = [word for word in shlex.split(line.replace("'", ""), comments=True) if not word.startswith("-")]
        named = [" ".join(words[:number]).rstrip(".,:)") for number in (3, 2, 1)]
        # A group alone names several commands: `amphoractl secrets`.
        if not known & set(named) and not (named[-1] in groups and len(words) == 1):
            wrong.append(f"{page}: amphoractl {line}")
    assert wrong == []


def test_the_documents_contain_commands():
    assert len(named_commands()) > 20
