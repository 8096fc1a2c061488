# SPDX-License-Identifier: Apache-2.0
"""What the controller requests from the network backend for each port of an amphora."""

import msgspec
import pytest
from test_plan import TREE, wanted

from amphora_driver.model.enums import Algorithm, PoolProtocol
from amphora_driver.model.loadbalancer import Member, Pool, Profile, Vip
from amphora_driver.network.interface import PortPurpose
from amphora_driver.reconcile.steps import Plug
from amphora_driver.reconcile.vip_allocation import request_port


def tree(profile):
    member = Member(id="m", pool_id="p", address="192.0.2.1", protocol_port=80, subnet_id="s2")
    pool = Pool(
        id="p",
        loadbalancer_id="lb",
        protocol=PoolProtocol.HTTP,
        lb_algorithm=Algorithm.ROUND_ROBIN,
        members=(member,),
    )
    more = (Vip(address="2001:db8::1", subnet_id="s6", network_id="n1", port_id="p1"),)
    return msgspec.structs.replace(TREE, profile=profile, pools=(pool,), additional_vips=more)


def asked(tree, network_id, *subnet_ids, sr_iov=False):
    step = Plug(amphora_id="a", network_id=network_id, subnet_ids=subnet_ids, sr_iov=sr_iov, reason="")
    return request_port(step, wanted(tree=tree))


def test_a_port_on_the_network_of_the_vips_may_use_all_of_them():
    found = asked(tree(Profile()), "n1", "s1", "s6")
    assert (found.purpose, found.vips) == (PortPurpose.VIP, ("198.51.100.10", "2001:db8::1"))
    assert (found.load_balancer_id, found.project_id, found.vnic_type) == ("lb", "demo", "normal")


@pytest.mark.parametrize(("profile", "vip"), [(Profile(), "normal"), (Profile(sriov_vip=True), "direct")])
def test_the_flavor_selects_the_type_of_the_vips_port(profile, vip):
    assert asked(tree(profile), "n1", "s1").vnic_type == vip
    found = asked(tree(profile), "n2", "s2")
    assert (found.purpose, found.vnic_type, found.vips) == (PortPurpose.MEMBER, "normal", ())


@pytest.mark.parametrize("network_id", ["n1", "n2"])
def test_the_additional_port_for_members_has_no_vip(network_id):
    found = asked(tree(Profile(allow_member_sriov=True)), network_id, "s1", sr_iov=True)
    assert (found.purpose, found.vnic_type, found.vips) == (PortPurpose.MEMBER, "direct", ())
