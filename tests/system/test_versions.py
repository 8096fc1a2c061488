# SPDX-License-Identifier: Apache-2.0
"""Agents of the baseline version under this version's controller."""

import json

import previous
import pytest
from drift_lab import drift_lab
from sandbox_of_a_test import AGENT_PYTHON

pytestmark = [pytest.mark.root, pytest.mark.extended]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A sandbox with agents of the baseline version."""
    folder = tmp_path_factory.mktemp("before")
    previous.unpacked(folder, "amphora_agent")
    # The first process of an amphora reads the folder before it creates its own mount namespace.
    folder.chmod(0o755)
    python = previous.interpreter(folder / "python", AGENT_PYTHON, folder)
    with drift_lab() as lab:
        lab.use_agent(python)
        yield lab


def test_an_agent_of_the_baseline_version_is_pushed_audited_and_repaired(old, tmp_path):
    balancer = old.served("before")
    (one,) = old.of(balancer)
    generation = old.settled(balancer)
    # A change, and heartbeats in the baseline's format.
    old.balancers.update_listener(old.listener_of(balancer), connection_limit=555)
    old.active(balancer.id)
    assert old.settled(balancer) == generation + 1
    old.online(balancer.id)
    old.until(lambda: old.row(one.id).audited_at is not None, "the drift audit has run")
    assert old.row(one.id).drift is None, "the audit finds no drift"

    assert old.amphoractl("loadbalancer", "diff", balancer.id)[:2] == (0, "")
    status, _, errors = old.amphoractl("amphora", "diagnose", one.id, "--output", str(tmp_path / "file"))
    assert status == 0, errors
    assert json.loads((tmp_path / "file").read_text())["agent"]["generation"] == generation + 1

    # The agent repairs a manual change.
    old.inside(one, "ip link set eth1 mtu 1400")
    old.drifted(one.id, "eth1 has an MTU of 1400")
    old.until(lambda: old.amphoractl("loadbalancer", "diff", balancer.id)[0] == 0, "the agent has repaired the MTU")
    old.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
