# SPDX-License-Identifier: Apache-2.0
"""A further health manager: running amphorae and warm spares send heartbeats to it without a rotation."""

import socket
import uuid

import pytest
from drift_lab import drift_lab

from amphora_driver.database.tables import amphora
from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AmphoraState
from sandbox.topology import CONTROL_ADDRESS

pytestmark = [pytest.mark.root, pytest.mark.extended]
OPTIONS = {"amp_spares": {"number": "1"}}


@pytest.fixture(scope="module")
def lab():
    with drift_lab(options=OPTIONS) as made:
        yield made


@pytest.fixture
def receiver(lab):
    """A socket in the place of a second health manager."""

    def bound():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((CONTROL_ADDRESS, 0))
        made.settimeout(60)
        return made

    with namespaces.run_inside(namespaces.path(lab.settings.control), bound) as made:
        yield made


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
