# SPDX-License-Identifier: Apache-2.0
"""Running amphorae and warm spares use other health managers and log targets without a rotation."""

import json
import socket
import uuid
from contextlib import ExitStack, suppress

import pytest
from drift_lab import drift_lab

from amphora_driver.database.tables import amphora
from amphora_driver.errors import AgentRefused
from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AmphoraState
from sandbox.topology import CONTROL_ADDRESS

pytestmark = [pytest.mark.root, pytest.mark.extended]
OPTIONS = {"amp_spares": {"number": "1"}, "amp_logs": {"queue_bytes": "65536"}}


@pytest.fixture(scope="module")
def lab():
    with drift_lab(options=OPTIONS) as made:
        yield made


@pytest.fixture
def bound(lab):
    """Returns sockets in the place of a second health manager or of a log target."""

    def bind():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((CONTROL_ADDRESS, 0))
        made.settimeout(60)
        return made

    with ExitStack() as closing:
        yield lambda: closing.enter_context(namespaces.run_inside(namespaces.path(lab.settings.control), bind))


@pytest.fixture
def receiver(bound):
    return bound()


def heard(opened, *words):
    """Return the first datagram of the next half second with these words; None without one."""
    opened.settimeout(0.5)
    with suppress(TimeoutError):
        while True:
            text = opened.recv(65536).decode()
            if all(word in text for word in words):
                return text
    return None


def ready(lab):
    rows = lab.database.read(lambda c: c.execute(amphora.select()).all())
    return {row.id for row in rows if row.state == AmphoraState.READY.value}


def test_amphorae_and_spares_send_heartbeats_to_a_new_health_manager(lab, receiver):
    balancer = lab.served("settings")
    generation = lab.settled(balancer)
    everyone = lab.until(lambda: found if len(found := ready(lab)) == 2 else None, "amphora and spare are ready")
    present = lab.compute_conf().amp_health.targets
    lab.configure("amp_health", "targets", ", ".join([*present, f"{CONTROL_ADDRESS}:{receiver.getsockname()[1]}"]))
    heard = set()
    while heard != everyone:
        # The id of the amphora follows the four bytes of the format's name (docs/reference/heartbeat.md).
        heard.add(str(uuid.UUID(bytes=receiver.recv(65536)[4:20])))
    assert ready(lab) == everyone, "no amphora is replaced"
    assert lab.settled(balancer) == generation, "no load balancer is pushed"
    lab.balanced(balancer.vip_address, {"member1": 1, "member2": 1})


def test_log_targets_of_flavor_and_configuration(lab, bound):
    own, common = bound(), bound()
    urls = [f"udp://{CONTROL_ADDRESS}:{one.getsockname()[1]}" for one in (own, common)]
    data = {"connection_logging": True, "tenant_log_targets": [urls[0]]}
    profile = lab.balancers.create_flavor_profile(name="logged", provider_name="haproxy", flavor_data=json.dumps(data))
    flavor = lab.balancers.create_flavor(name="logged", flavor_profile_id=profile.id, is_enabled=True)
    balancer = lab.served("logged", flavor_id=flavor.id)
    generation = lab.settled(balancer)
    here = (f' project="{balancer.project_id}" loadbalancer="{balancer.id}"', " haproxy - flow ")

    line = lab.until(
        lambda: lab.answers(balancer.vip_address, 1) and heard(own, *here), "the amphora has the target of its flavor"
    )
    (listener,) = (one.id for one in lab.balancers.listeners(load_balancer_id=balancer.id))
    assert f' listener="{listener}"]' in line

    lab.configure("amp_logs", "admin_targets", urls[1])
    # The amphora of the other test's load balancer is ready too.
    used = {row.id for each in lab.balancers.load_balancers() for row in lab.of(each)}
    (spare,) = lab.until(lambda: ready(lab) - used, "a spare is ready")
    ids = {lab.of(balancer)[0].id: here[0], spare: ""}
    for amphora_id, known in ids.items():
        # Each refused request is an administrative line of the agent.
        line = lab.until(
            lambda one=amphora_id: heard(common, f'[amphora@32473 id="{one}"', refuse(lab, one)),
            "the amphora has the configured target",
        )
        assert f'id="{amphora_id}"{known}] ' in line
    assert lab.settled(balancer) == generation, "no load balancer is pushed"


def refuse(lab, amphora_id):
    """Send a malformed request to an agent; return what its log line contains."""
    with pytest.raises(AgentRefused):
        lab.agents(lambda agents: agents.put_settings(amphora_id, lab.row(amphora_id).management_address, b"{"))
    return "read the settings"
