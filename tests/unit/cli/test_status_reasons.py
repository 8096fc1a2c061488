# SPDX-License-Identifier: Apache-2.0
"""`loadbalancer show`: the reason of each status that Octavia's API shows without one."""

from types import SimpleNamespace as Row

import pytest

from amphora_driver.cli.formatting import StatusReasons
from amphora_driver.cli.loadbalancer import find_status_reasons

NOW = 1_800_000_000.0
WORK = {"op": "apply", "committed": 8, "generation": 8, "read_back": False, "owner": None, "leased_until": None}


def work(**more):
    return Row(**{**WORK, "dirty": True, "due_at": NOW + 9, "to_report": 0, "error": None, **more})


def status(**more):
    values = {"object_id": "a", "kind": "pools", "provisioning": "ACTIVE", "operating": "ONLINE", "reason": None}
    return Row(**{**values, "since": NOW - 60, "pending": None, "removed": False, **more})


@pytest.mark.parametrize("more", [{}, {"operating": "NO_MONITOR", "reason": "no check reported"}])
def test_a_healthy_object_needs_no_reason(more):
    assert find_status_reasons([status(**more)], work(), NOW) == []
    assert "every object is ACTIVE" in StatusReasons([]).human_readable()


@pytest.mark.parametrize(
    ("row", "job", "shown", "reason"),
    [
        ({"operating": "DEGRADED", "reason": "1 of 3"}, {}, ("ACTIVE", "DEGRADED"), "1 of 3"),
        ({"operating": "ERROR", "reason": "DOWN"}, {"error": "full"}, ("ACTIVE", "ERROR"), "DOWN"),
        ({"operating": None}, {}, ("ACTIVE", "OFFLINE"), "no reason is recorded"),
        (
            {"provisioning": "ERROR", "reason": "no certificate"},
            {"error": "no certificate"},
            ("ERROR", "ONLINE"),
            "no certificate",
        ),
        ({"provisioning": "ERROR"}, {"error": "quota"}, ("ERROR", "ONLINE"), "last error of the job: quota"),
        (
            {"pending": 8},
            {"error": "no space"},
            ("PENDING_UPDATE", "ONLINE"),
            "the change waits for its next attempt; last error of the job: no space",
        ),
        (
            {"pending": 8, "provisioning": None, "operating": None},
            {"committed": 7},
            ("PENDING_CREATE", "OFFLINE"),
            "the change waits for Octavia's commit",
        ),
        (
            {"pending": 8, "removed": True},
            {"due_at": 0.0},
            ("PENDING_DELETE", "ONLINE"),
            "the change waits for a controller",
        ),
        (
            {"pending": 8},
            {"op": "delete", "due_at": 0.0},
            ("PENDING_DELETE", "ONLINE"),
            "the change waits for a controller",
        ),
    ],
)
def test_each_other_status_has_its_reason(row, job, shown, reason):
    (found,) = find_status_reasons([status(**row)], work(**job), NOW)
    assert (found["provisioning"], found["operating"]) == shown
    assert found["reason"] == reason
    line = StatusReasons([found]).human_readable()
    assert line == f"pool a {shown[0]}, {shown[1]}, since 2027-01-15 07:59:00 UTC: {reason}"


@pytest.mark.parametrize(
    ("kind", "shown"), [("l7policies", "l7policy"), ("l7rules", "l7rule"), ("healthmonitors", "healthmonitor")]
)
def test_kinds_have_the_names_of_octavias_commands(kind, shown):
    (found,) = find_status_reasons([status(kind=kind, operating="OFFLINE")], work(), NOW)
    assert found["kind"] == shown
