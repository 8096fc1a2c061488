# SPDX-License-Identifier: Apache-2.0
"""A deleted secret: Octavia returns neither the secret nor the object that refers to it.

The secret is deleted before the provider reads its reference. The provider learns half of a fully populated load
balancer, for example its L7 policies, only by reading from Octavia.
"""

import sys
from pathlib import Path

import kill_lab
import msgspec
import pytest
from dataplane.pki import Authority

from sandbox import topology

pytestmark = pytest.mark.root
AUTHORITY = Authority("members").pem


@pytest.fixture
def lab():
    with kill_lab.lab() as made:
        supervision = made.stack.supervision
        program = next(one for one in made.stack.programs() if one.name == "octavia-driver-agent")
        argv = (sys.executable, str(Path(__file__).with_name("impatient_agent.py")))
        supervision.stop(program.name)
        impatient = msgspec.structs.replace(program, argv=argv)
        supervision.start(impatient)
        supervision.wait_ready(impatient, 60)
        yield made


def pool(cloud, name, **more):
    members = [cloud.member("member1")]
    return {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": members, **more}


def listener(port, leads_to):
    rules = [{"type": "PATH", "compare_type": "EQUAL_TO", "value": "/secret"}]
    policies = [{"action": "REJECT", "rules": rules}]
    values = {"name": str(port), "protocol": "HTTP", "protocol_port": port}
    return {**values, "default_pool": {"name": leads_to}, "l7policies": policies}


def states(found):
    return {one.name: one.provisioning_status for one in found}


@pytest.mark.extended
def test_only_unreadable_objects_are_omitted(lab):
    cloud, secrets = lab.cloud, Path(lab.settings.tls)
    (secrets / "authority.crt").write_text(AUTHORITY)
    # Only for these objects, Octavia's API answers 500 without one of the fields.
    ciphers = "ECDHE-RSA-AES128-GCM-SHA256"
    tls = {"tls_versions": ["TLSv1.2"], "tls_ciphers": ciphers, "alpn_protocols": ["http/1.1"]}
    encrypted = {"tls_enabled": True, "ca_tls_container_ref": "authority", **tls}
    lab.hold("barrier-passed")
    made = cloud.balancers.create_load_balancer(
        name="unread",
        vip_subnet_id=topology.VIP_SUBNET,
        pools=[pool(cloud, "open"), pool(cloud, "closed", **encrypted)],
        listeners=[listener(80, "open"), listener(81, "closed")],
    )
    lab.held("barrier-passed")
    (secrets / "authority.crt").unlink()
    lab.disarm()

    balancer = cloud.active(made.id)
    assert states(cloud.balancers.listeners()) == {"80": "ACTIVE", "81": "ERROR"}
    assert states(cloud.balancers.pools()) == {"open": "ACTIVE", "closed": "ERROR"}
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}
    assert cloud.get(balancer.vip_address, "/secret")[0] == 403
    with pytest.raises(OSError, match="refused"):
        cloud.get(balancer.vip_address, port=81)

    (secrets / "another.crt").write_text(AUTHORITY)
    closed = next(one for one in cloud.balancers.pools() if one.name == "closed")
    cloud.put(f"pools/{closed.id}", {"pool": {"ca_tls_container_ref": "another"}})
    cloud.active(made.id)
    assert states(cloud.balancers.listeners()) == {"80": "ACTIVE", "81": "ACTIVE"}
    assert states(cloud.balancers.pools()) == {"open": "ACTIVE", "closed": "ACTIVE"}
    assert cloud.get(balancer.vip_address, "/secret", port=81)[0] == 403, "the provider has read the L7 policy"
