# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin with the fixtures of the tests on OVN; one pair serves the tests of a module.

Invariant: both ovs-vswitchd run before and after each test. A chassis whose ovs-vswitchd has ended forwards no packet,
although the databases look healthy, and a test on it could pass for the wrong reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from ovn_lab import CHASSIS, remove_orphans
from ovn_network import AMPHORAE, OvnNetwork
from ovn_pair import OvnPair

# ovn_lab has made the modules of the data plane's tests importable.
from amphora_lab import eventually  # isort: skip
from pair_lab import USUAL  # isort: skip
from stalls import Stalls, event_report  # isort: skip
from throwaway_authority import Authority  # isort: skip

_KIND = "ov"


@pytest.fixture(scope="module")
def ovn_booted(tmp_path_factory) -> Iterator[OvnPair]:
    remove_orphans(_KIND)
    network = OvnNetwork(f"{_KIND}{os.getpid()}", tmp_path_factory.mktemp("ovn"))
    try:
        made = OvnPair(network, tmp_path_factory.mktemp("pair"), Authority("controllers"), USUAL)
        made.opened, made.stalls = [], Stalls()
        try:
            for place in AMPHORAE:
                made.boot(place)
            for node in made.nodes:
                eventually(node.answers, "the agent answers")
            made.serve()
            yield made
        finally:
            for each in made.opened:
                each.close()
            made.close()
            made.stalls.close()
    finally:
        network.close()


@pytest.fixture
def ovn_pair(ovn_booted) -> Iterator[OvnPair]:
    """Two amphorae that serve, without connections; the security group is that of the previous test."""
    pair = ovn_booted
    pair.ovn.restart_switches()  # after the failure of another test
    before = pair.ovn.switches()
    assert sorted(before) == list(CHASSIS), pair.ovn.complaints()
    pair.calm()
    yield pair
    assert pair.ovn.switches() == before, f"an ovs-vswitchd has ended: {pair.ovn.complaints()}"
    pair.tidy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add the VIP holders over time to the report of a failed test."""
    report = yield
    pair = getattr(item, "funcargs", {}).get("ovn_booted")
    if report.failed and pair is not None:
        events = event_report(pair.nodes, pair.stalls.found)
        found = f"{events}\novs-vswitchd: {pair.ovn.switches()}\n{pair.ovn.complaints()}"
        report.sections.append(("VRRP and OVN", found))
    return report
