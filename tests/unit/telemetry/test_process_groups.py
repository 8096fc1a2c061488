# SPDX-License-Identifier: Apache-2.0
"""Dead processes with a successor on their host are one line with a number, and no warning."""

import pytest
from fleet_rows import INTERVAL, NOW, PROCESSES, fleet, process
from test_page_text import PROCESS, view

from amphora_driver.telemetry import status_page
from amphora_driver.telemetry.alerts import Level, find_notices
from amphora_driver.telemetry.process_groups import group_processes
from amphora_driver.telemetry.status_page import list_process_rows

KIND = "health-manager"


def lived(begin, end, host="host", kind=KIND):
    """Return a process that sent heartbeats between two ages in seconds; an age below 10 means that it is alive."""
    return process(kind, name=f"{host}:{begin}", host=host, started_at=NOW - begin, seen_at=NOW - end)


def restarts(number, every=60.0):
    """Return a chain of processes of which each one but the last was killed and replaced."""
    return tuple(lived((one + 1) * every, one * every + 2 if one else 1) for one in range(number))


@pytest.mark.parametrize(
    ("processes", "alive", "replaced", "missing"),
    [
        ([lived(500, 1)], 1, 0, 0),
        ([lived(500, 60)], 0, 0, 1),
        ([lived(500, 60), lived(55, 1)], 1, 1, 0),
        ([lived(500, 60), lived(400, 1)], 1, 0, 1),
        ([lived(500, 60), lived(55, 40), lived(35, 20)], 0, 2, 1),
        ([lived(500, 60), lived(500, 61), lived(55, 1)], 1, 1, 1),
        ([lived(500, 60), lived(500, 61), lived(55, 1), lived(54, 1)], 2, 2, 0),
        (restarts(32), 1, 31, 0),
    ],
    ids=[
        "alive",
        "dead",
        "replaced",
        "one of two",
        "a chain that ended",
        "one successor",
        "two successors",
        "31 kills",
    ],
)
def test_processes_of_one_host(processes, alive, replaced, missing):
    (group,) = group_processes(processes, NOW)
    assert (len(group.alive), len(group.replaced), len(group.missing)) == (alive, replaced, missing)


def test_a_process_of_another_host_or_kind_replaces_nothing():
    dead = lived(500, 60)
    found = group_processes([dead, lived(55, 1, host="other"), lived(55, 1, kind="controller")], NOW)
    assert [(one.kind, one.host, len(one.alive), len(one.missing)) for one in found] == [
        ("controller", "host", 1, 0),
        (KIND, "host", 0, 1),
        (KIND, "other", 1, 0),
    ]


def warnings(*processes):
    others = tuple(one for one in PROCESSES if one.kind != KIND)
    found = find_notices(fleet(processes=(*others, *processes)), INTERVAL)
    assert all(one.level is Level.WARNING for one in found)
    return [one.text for one in found]


@pytest.mark.parametrize(
    ("processes", "texts"),
    [
        ([lived(500, 60), lived(55, 1)], []),
        (
            [lived(500, 60), lived(55, 1, host="other")],
            ["health-manager on host host sends no heartbeats and was not replaced"],
        ),
        (
            [lived(500, 60), lived(500, 61), lived(55, 1, host="other")],
            ["health-manager on host host sends no heartbeats and was not replaced (2 processes)"],
        ),
        (
            restarts(32),
            ["health-manager on host host ended without a shutdown and was replaced 9 times in the last 10 minutes"],
        ),
        # The newest death was eleven minutes ago.
        ([*(lived(one + 59, one) for one in range(660, 3000, 60)), lived(650, 1)], []),
    ],
    ids=["replaced", "not replaced", "two not replaced", "a loop", "an ended loop"],
)
def test_the_warning_ends_with_its_cause(processes, texts):
    found = warnings(*processes)
    assert len(found) == len(texts)
    assert all(one.startswith(text) for one, text in zip(found, texts, strict=True))


def test_the_page_has_one_line_for_a_host():
    assert [(row.process.seen_at, row.replaced, row.missing) for row in list_process_rows(restarts(32), NOW)] == [
        (NOW - 1, 31, 0)
    ]
    others = tuple(one for one in PROCESSES if one.kind != KIND)
    page = status_page.render_page(view(fleet(processes=(*others, *restarts(32)))), PROCESS).decode()
    assert page.count("<b>health-manager</b>") == 1
    assert "31 replaced" in page
    dead = list_process_rows([lived(500, 60), lived(500, 61)], NOW)
    assert [(row.process.seen_at, row.replaced, row.missing) for row in dead] == [(NOW - 60, 0, 2)]
    both = list_process_rows([lived(500, 60), lived(500, 61), lived(55, 1)], NOW)
    assert [(row.replaced, row.missing) for row in both] == [(1, 0), (0, 1)]
