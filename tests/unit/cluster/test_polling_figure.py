# SPDX-License-Identifier: Apache-2.0
"""The processor time of a controller that polls 100 groups of 100 servers, while nothing changes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import cluster_polling


@pytest.mark.quiet
@pytest.mark.extended
@pytest.mark.lasts(600)
def test_a_hundred_groups_are_polled_within_ten_seconds(record_property):
    # A project of its own for each group is the slowest case: each project has its own token and its own lists.
    figures = cluster_polling.measure(groups=100, servers=100, projects=100, poll=9.0, seconds=20.0)
    record_property("cores", figures["cores"])
    assert figures["longest_between_passes"] <= 10.0
    assert figures["cores"] <= 0.25
    calls = figures["calls"]
    assert sum(calls.values()) <= 4.1, "a pass needs no call for each server"
