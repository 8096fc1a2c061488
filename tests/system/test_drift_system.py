# SPDX-License-Identifier: Apache-2.0
"""The controller detects, reports and repairs drift of amphorae without client errors."""

import configparser
import datetime as dt
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from drift_lab import PAUSE, drift_lab

from amphora_driver.maintenance.drift_audit import load_record
from amphora_driver.reconcile import desired_bundle

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def lab():
    with drift_lab() as made:
        yield made


@pytest.fixture
def balancer(lab):
    made = lab.served("drift")
    lab.settled(made)
    yield made
    lab.clean()


def test_repairs_of_the_agent_are_recorded(lab, balancer):
    (one,) = lab.of(balancer)
    lab.inside(one, "ip link set eth1 mtu 1400")
    lab.drifted(one.id, "repaired by its agent: interface: eth1 has an MTU of 1400")
    assert lab.settled(balancer) == one.confirmed, "the agent's repair needs no push"
    lab.balanced(balancer.vip_address, {"member1": 1, "member2": 1})


def test_a_missing_interface_is_attached_again(lab, balancer):
    (one,) = lab.of(balancer)
    lab.inside(one, "ip link del eth1")
    lab.drifted(one.id, "its agent could not repair: interface")
    lab.until(lambda: answers(lab, balancer), "the members answer")
    lab.settled(balancer)
    lab.until(
        lambda: lab.configuration(lab.of(balancer)[0])["drift"]["unrepaired"] == [],
        "the agent reports no unrepaired drift",
    )
    assert [each.id for each in lab.of(balancer)] == [one.id], "the amphora is not replaced"


def answers(lab, balancer):
    try:
        return set(lab.answers(balancer.vip_address, 4)) <= {"member1", "member2"}
    except OSError:
        return False


def test_foreign_push_is_replaced(lab, balancer):
    """A manual push with the controller's certificate has a newer generation and other content."""
    (one,) = lab.of(balancer)
    conf, vault = lab.compute_conf(), lab.vault()
    catalogue = lab.catalogue(conf)
    recorded = lab.database.read(lambda c: load_record(c, balancer.id, catalogue))
    document = json.loads(desired_bundle.build_bundles(recorded, conf, vault)[one.id])
    document["generation"] += 5
    document["haproxy"] = document["haproxy"].replace("weight 1", "weight 9")
    said = lab.agents(lambda c: c.put_bundle(one.id, one.management_address, json.dumps(document).encode()))
    assert said.generation == one.confirmed + 5
    lab.drifted(one.id, f"and reports {said.generation}")
    lab.until(lambda: lab.settled(balancer) == said.generation + 1, "the amphora confirms a newer generation")
    assert "weight 9" not in lab.configuration(one)["haproxy"]
    assert lab.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"


@pytest.fixture
def pair(lab):
    data = {"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.2}
    profile = lab.balancers.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=json.dumps(data))
    flavor = lab.balancers.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True)
    made = lab.served("pair", flavor_id=flavor.id)
    lab.settled(made)
    yield made
    lab.clean()
    lab.balancers.delete_flavor(flavor)
    lab.balancers.delete_flavor_profile(profile)


def test_an_outdated_amphora_of_a_pair_is_pushed_again(lab, pair):
    """One amphora has the state before the last change, for example restored from a backup."""
    one = lab.of(pair)[1]
    var = Path(lab.settings.amphorae, one.id, "var")
    copy = Path(lab.settings.state, "copy")
    shutil.copytree(var, copy)
    lab.balancers.update_listener(lab.listener_of(pair), connection_limit=777)
    lab.active(pair.id)
    lab.settled(pair)
    before = lab.row(one.id).confirmed_at
    agent = lab.service(one, "amphora-agent")
    assert b"amphora_agent.server" in Path(f"/proc/{agent}/cmdline").read_bytes()
    os.kill(agent, signal.SIGSTOP)
    try:
        for file in copy.iterdir():
            shutil.copy2(file, var / f".{file.name}")
            (var / f".{file.name}").replace(var / file.name)
        (var / "epoch").unlink()
    finally:
        os.kill(agent, signal.SIGKILL)
    shutil.rmtree(copy)
    lab.until(lambda: lab.row(one.id).confirmed_at > before, "the amphora confirms the push")
    lab.settled(pair)
    lab.until(lambda: "maxconn 777" in lab.configuration(one)["haproxy"], "the amphora has the last change")
    assert {each.id for each in lab.of(pair)} >= {one.id}
    assert lab.balancers.get_load_balancer(pair.id).provisioning_status == "ACTIVE"


def test_a_rebooted_amphora_serves_again(lab, balancer):
    (one,) = lab.of(balancer)
    lab.compute.power_off(one.id)
    lab.compute.power_on(one.id)
    lab.until(lambda: answers(lab, balancer), "the members answer")
    lab.settled(balancer)
    assert lab.until(lambda: lab.configuration(one), "the agent answers")["drift"]["unrepaired"] == []


@pytest.mark.extended
def test_another_rendering_is_pushed_slowly(lab, balancer):
    """A new version or new options change the text: load balancers are pushed one after the other."""
    second = lab.served("drift-too")
    before = {each.id: lab.settled(each) for each in (balancer, second)}
    status, said, _ = lab.amphoractl("loadbalancer", "diff", balancer.id)
    assert (status, said) == (0, "")
    lab.stack.supervision.stop("amphora-controller")
    change_option(lab.settings.driver_configuration, "amp_haproxy", "timeout_member_connect", "7000")
    status, said, _ = lab.amphoractl("loadbalancer", "diff", balancer.id[:13])
    assert status == 1
    assert "-    timeout connect 7s" in said.replace("7000ms", "7s").replace("7000", "7s")
    assert "PRIVATE" not in said
    lab.restart()
    for each in (balancer, second):
        lab.until(lambda of=each: lab.settled(of) > before[of.id], "the new rendering is pushed")
    times = told(lab, "this version of the driver renders a different configuration")
    assert len(times) == 2
    assert times[1] - times[0] >= dt.timedelta(seconds=0.9 * PAUSE), "the controller pauses between the pushes"
    assert lab.amphoractl("loadbalancer", "diff", balancer.id)[:2] == (0, "")
    assert lab.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"


def told(lab, words):
    """Return the times of the controller's log lines."""
    lines = (lab.settings.log / "amphora-controller.log").read_text(errors="replace").splitlines()
    return [dt.datetime.fromisoformat(line[:23]) for line in lines if words in line]


def change_option(file, group, name, value):
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read(file)
    if not parser.has_section(group):
        parser.add_section(group)
    parser.set(group, name, value)
    with file.open("w") as opened:
        parser.write(opened)


@pytest.mark.extended
def test_an_operator_repairs_and_diagnoses_drift(lab, balancer, tmp_path):
    (one,) = lab.of(balancer)
    before = lab.row(one.id).confirmed_at
    status, said, _ = lab.amphoractl("loadbalancer", "repair", balancer.id)
    assert (status, one.id in said) == (0, True)
    lab.until(lambda: lab.row(one.id).confirmed_at > before, "the amphora confirms the push")
    assert lab.settled(balancer) == one.confirmed, "the generation is the same"
    file = tmp_path / "diagnosis.json"
    status, said, _ = lab.amphoractl("amphora", "diagnose", one.id, "--output", str(file))
    assert (status, said.strip()) == (0, str(file))
    found = json.loads(file.read_text())
    assert found["recorded"]["id"] == one.id
    assert "frontend" in found["agent"]["haproxy.cfg"]
    assert "heartbeat_key" not in found["recorded"]
    lab.compute.power_off(one.id)
    try:
        status, said, errors = lab.amphoractl("amphora", "diagnose", one.id[:13])
        assert status == 2
        assert "did not answer" in errors
        assert json.loads(said)["recorded"]["management_address"] == one.management_address
        status, said, errors = lab.amphoractl("loadbalancer", "diff", balancer.id)
        assert (status, said, one.id in errors) == (2, "", True)
    finally:
        lab.compute.power_on(one.id)
