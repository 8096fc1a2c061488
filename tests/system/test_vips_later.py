# SPDX-License-Identifier: Apache-2.0
"""A slow network backend: the call returns without an address, and other load balancers continue.

See docs/reference/vips.md. The tests include Octavia's treatment of such a load balancer, because that page relies on
it.
"""

import json
import re
import subprocess
import sys
import uuid

import pytest
import sqlalchemy as sa
from cloud import Cloud
from installed import package
from sandbox_of_a_test import running

from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from amphora_driver.plugins import NETWORK
from amphora_driver.store import amphorae, desired_objects
from sandbox import demo, topology

pytestmark = pytest.mark.root

# An external allocator: it answers when a file exists, and only for existing machines.
SOURCE = """
    from pathlib import Path

    from amphora_driver.errors import Conflict
    from amphora_driver.network.interface import NotYet
    from amphora_driver.network.local import LocalNetwork

    ANSWERS = Path({folder!r})


    class External(LocalNetwork):
        supports = frozenset()

        def allocate_vip(self, load_balancer_id, project_id, wanted, machines=()):
            with (ANSWERS / "asked").open("a") as asked:
                asked.write(f"{{load_balancer_id}} {{project_id}} {{' '.join(machines)}}\\n")
            if (ANSWERS / "refuse").exists():
                raise Conflict(f"take a VIP for load balancer {{load_balancer_id}}", "the allocator has none left")
            if not machines or not (ANSWERS / "go").exists():
                return NotYet(reason="the allocator has not answered", again_in=0.2)
            return super().allocate_vip(load_balancer_id, project_id, wanted, machines)
"""
OPTIONS = {"amp_network": {"driver": "external"}}
SIX = topology.VIP_SUBNET_6


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def cloud(answers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(answers))
        # stevedore caches entry points below HOME; this path does not exist afterwards.
        patch.setenv("HOME", str(answers))
        source = SOURCE.format(folder=str(answers))
        package(answers, "external_network", source, {NETWORK: {"external": "External"}})
        with running(options=OPTIONS) as (_, settings):
            database = Database(settings.database_url)
            connection = demo.connect(settings)
            cloud = Cloud(settings, connection, database)
            yield cloud
            cloud.clean()
            connection.close()
            database.dispose()


def shown(cloud, load_balancer_id):
    return cloud.balancers.get(cloud.url(f"loadbalancers/{load_balancer_id}")).json()["loadbalancer"]


def ours(cloud, load_balancer_id):
    return cloud.database.read(lambda c: desired_objects.load_tree(c, load_balancer_id))


def operator_sees(cloud, load_balancer_id):
    """Return the VIP line of `amphoractl loadbalancer show`."""
    argv = [sys.executable, "-m", "amphora_driver.cli.main", "--config-file", str(cloud.settings.driver_configuration)]
    done = subprocess.run(
        [*argv, "loadbalancer", "show", load_balancer_id, "-f", "value", "-c", "VIPs"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def wish(name, **more):
    member = Cloud.member("member1")
    pool = {"name": f"{name}-pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [member]}
    listener = {"name": name, "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
    return {"name": name, "vip_subnet_id": topology.VIP_SUBNET, "listeners": [listener], **more}


def machines(cloud, load_balancer_id):
    return cloud.database.read(lambda c: amphorae.load_amphorae(c, load_balancer_id))


@pytest.mark.extended
def test_an_address_that_comes_later(cloud, answers):
    made = cloud.post("loadbalancers", {"loadbalancer": wish("later", additional_vips=[{"subnet_id": SIX}])})
    one = made["loadbalancer"]
    # Octavia stores the load balancer without the address; all other fields have values.
    assert (one["vip_address"], one["vip_port_id"], one["vip_subnet_id"]) == (None, None, topology.VIP_SUBNET)
    assert [(vip["subnet_id"], vip["ip_address"]) for vip in one["additional_vips"]] == [(SIX, None)]

    # The amphora boots meanwhile, because its host may determine the address. The port is plugged after that.
    (amphora,) = cloud.until(lambda: [m for m in machines(cloud, one["id"]) if m.compute_id], "an amphora boots")
    line = re.compile(f"{one['id']} \\S+ {amphora.compute_id}")
    cloud.until(lambda: line.search((answers / "asked").read_text()), "the allocator gets the machine")
    assert "not known yet (the allocator has not answered; asked" in operator_sees(cloud, one["id"])
    assert machines(cloud, one["id"])[0].plugged == ()
    assert shown(cloud, one["id"])["provisioning_status"] == "PENDING_CREATE"

    (answers / "go").touch()
    cloud.active(one["id"])
    (answers / "go").unlink()
    four, six = (vip.address for vip in ours(cloud, one["id"]).vips)
    assert (four[:11], six[:11]) == ("198.51.100.", "2001:db8:1:")
    assert operator_sees(cloud, one["id"]) == f"{four}, {six}"
    for address in (four, six):
        assert cloud.answers(address, 2) == {"member1": 2}
    # Octavia's interface has no call for the address.
    assert shown(cloud, one["id"])["vip_address"] is None

    # All other requests work, also those that read the load balancer from Octavia.
    balancer = cloud.balancers.get_load_balancer(one["id"])
    cloud.put(f"loadbalancers/{one['id']}", {"loadbalancer": {"description": "changed"}})
    cloud.active(one["id"])
    cloud.balancers.create_member(cloud.pool_of(balancer), **cloud.member("member2"))
    cloud.active(one["id"])
    cloud.balanced(four, {"member1": 1, "member2": 1})
    before = cloud.amphorae(balancer)
    cloud.balancers.failover_load_balancer(one["id"])
    cloud.active(one["id"])
    cloud.until(
        lambda: len(cloud.amphorae(balancer)) == 1 and not cloud.amphorae(balancer) & before, "the amphora is replaced"
    )
    cloud.balanced(six, {"member1": 1, "member2": 1})
    # Exception: Octavia compares the networks with addresses that it does not have.
    values = {"loadbalancer_id": one["id"], "protocol": "HTTP", "protocol_port": 81, "allowed_cidrs": ["192.0.2.0/24"]}
    answer = cloud.balancers.post(cloud.url("listeners"), json={"listener": values})
    assert (answer.status_code, "None does not appear to be an IPv4 or IPv6 address" in answer.text) == (500, True)

    cloud.balancers.delete_load_balancer(one["id"], cascade=True)
    cloud.gone(one["id"])
    owner = tables.local_port.c.owner
    assert cloud.database.read(lambda c: c.execute(sa.select(owner).where(owner == f"lb-{one['id']}")).first()) is None


def test_a_pair_whose_address_comes_later(cloud, answers):
    """Both machines boot meanwhile, the allocator gets both, and then one of them has the VIP."""
    data = json.dumps({"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.2})
    profile = cloud.balancers.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=data)
    flavor = cloud.balancers.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True)
    made = cloud.post("loadbalancers", {"loadbalancer": wish("pair", flavor_id=flavor.id)})["loadbalancer"]
    try:
        both = cloud.until(
            lambda: len(found := [m for m in machines(cloud, made["id"]) if m.compute_id]) == 2 and found,
            "both amphorae boot",
        )
        line = re.compile(f"{made['id']} \\S+ " + ".*".join(f"(?=.*{one.compute_id})" for one in both))
        cloud.until(lambda: line.search((answers / "asked").read_text()), "the allocator gets both machines")
        assert [one.plugged for one in machines(cloud, made["id"])] == [(), ()]
        (answers / "go").touch()
        cloud.active(made["id"])
        (answers / "go").unlink()
        (address,) = (vip.address for vip in ours(cloud, made["id"]).vips)
        cloud.until(lambda: cloud.answers(address, 2) == {"member1": 2}, "member1 serves")
        assert len(cloud.amphorae(cloud.balancers.get_load_balancer(made["id"]))) == 2, "the pair has two amphorae"
    finally:
        cloud.balancers.delete_load_balancer(made["id"], cascade=True)
        cloud.gone(made["id"])
        cloud.balancers.delete_flavor(flavor)
        cloud.balancers.delete_flavor_profile(profile)


def test_a_requested_address_that_is_refused_later_ends_in_error(cloud, answers):
    """Octavia shows the requested address; the later refusal ends in ERROR, with the reason."""
    body = wish("refused", vip_address="198.51.100.88")
    one = cloud.post("loadbalancers", {"loadbalancer": body})["loadbalancer"]
    assert one["vip_address"] == "198.51.100.88"
    cloud.until(lambda: [m for m in machines(cloud, one["id"]) if m.compute_id], "an amphora boots")
    assert ours(cloud, one["id"]).vip.address == ""
    (answers / "refuse").touch()
    try:
        cloud.until(lambda: shown(cloud, one["id"])["provisioning_status"] == "ERROR", "the status is ERROR")
        error = sa.select(tables.job.c.error).where(tables.job.c.load_balancer_id == one["id"])
        assert "the allocator has none left" in cloud.database.read(lambda c: c.execute(error).scalar())
        # An immediate refusal by the backend is an immediate refusal to the user.
        answer = cloud.balancers.post(cloud.url("loadbalancers"), json={"loadbalancer": wish("no")})
        assert (answer.status_code, "the allocator has none left" in answer.text) == (409, True)
    finally:
        (answers / "refuse").unlink()
    cloud.balancers.delete_load_balancer(one["id"], cascade=True)
    cloud.gone(one["id"])


@pytest.mark.parametrize(
    "asked", [{"vip_qos_policy_id": topology.derive_id("ten-megabit")}, {"vip_sg_ids": [topology.derive_id("web")]}]
)
def test_unsupported_options_of_the_backend_are_refused(cloud, asked):
    (name,) = asked
    answer = cloud.balancers.post(cloud.url("loadbalancers"), json={"loadbalancer": wish("odd", **asked)})
    assert answer.status_code == 501
    assert f"load balancer option {name}" in answer.text
    assert "the network backend external does not support it" in answer.text


def test_the_ids_of_the_refused_options_exist(cloud):
    """The objects of the previous test exist, so the refusal is not Octavia's own."""
    group = cloud.connection.network.find_security_group("web")
    assert uuid.UUID(group.id) == uuid.UUID(topology.derive_id("web"))
    assert cloud.connection.network.find_qos_policy("ten-megabit").id == topology.derive_id("ten-megabit")
