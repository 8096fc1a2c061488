# SPDX-License-Identifier: Apache-2.0
"""Agents of the version before under this version's controller: served, compared, and mended in the ways they know."""

import json

import previous
import pytest
from drift_lab import drift_lab
from sandbox_of_a_test import AGENT_PYTHON

pytestmark = [pytest.mark.root, pytest.mark.extended]


@pytest.fixture(scope="module", params=["history", "rebuilt"])
def old(request, tmp_path_factory):
    """A sandbox whose agents are of the version before; rebuilt from this one too, as where there is no history."""
    folder = tmp_path_factory.mktemp("before")
    if request.param == "rebuilt":
        previous.rebuilt(folder)
    else:
        previous.unpacked(folder, "amphora_agent")
    # The amphora's own first process reads it before its mounts are its own.
    folder.chmod(0o755)
    python = previous.interpreter(folder / "python", AGENT_PYTHON, folder)
    with drift_lab() as lab:
        lab.use_agent(python)
        yield lab


def test_an_agent_of_the_version_before_is_served_changed_compared_and_repaired(old, tmp_path):
    balancer = old.served("before")
    (one,) = old.of(balancer)
    generation = old.settled(balancer)
    with pytest.raises(Exception, match="was not found"):
        old.configuration(one)
    said = old.agents(lambda client: client.info(one.id, one.management_address))
    assert "audit" not in said.capabilities

    # It does not say which version it is, so that it is known for one to be replaced some time.
    status, checks, _ = old.amphoractl("status", "check", "-f", "json")
    (agents,) = [each for each in json.loads(checks) if each["Check"] == "Agents"]
    assert (status, agents["Result"], "one that does not say" in agents["Details"]) == (1, "Warning", True), agents

    # A change, and heartbeats without anything new in them.
    old.balancers.update_listener(old.listener_of(balancer), connection_limit=555)
    old.active(balancer.id)
    assert old.settled(balancer) == generation + 1
    old.online(balancer.id)
    old.until(lambda: old.row(one.id).audited_at is not None, "it is compared")
    assert old.row(one.id).drift is None, "and nothing differs"

    # What is asked of agents that the one before does not know is asked in the way it does.
    assert old.amphoractl("loadbalancer", "diff", balancer.id)[:2] == (0, "")
    status, _, errors = old.amphoractl("amphora", "diagnose", one.id, "--output", str(tmp_path / "file"))
    assert status == 0, errors
    assert json.loads((tmp_path / "file").read_text())["agent"]["generation"] == generation + 1

    # By hand: an agent of this version would mend it; this one does when it is pushed.
    old.inside(one, "ip link set eth1 mtu 1400")
    status, said, _ = old.amphoractl("loadbalancer", "diff", balancer.id)
    assert (status, said) == (1, "interface eth1 has an MTU of 1400, not 1500\n")
    assert old.amphoractl("loadbalancer", "repair", balancer.id)[0] == 0
    old.until(lambda: old.amphoractl("loadbalancer", "diff", balancer.id)[0] == 0, "it is mended")
    old.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
