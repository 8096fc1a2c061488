# SPDX-License-Identifier: Apache-2.0
"""The networks that an amphora needs."""

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import PoolProtocol
from amphora_driver.model.loadbalancer import LoadBalancer, Member, Pool, Vip
from amphora_driver.model.network import Subnet
from amphora_driver.reconcile.reconciler import needed_networks


class OneSubnet:
    """A network backend that knows the subnet s2."""

    def subnet(self, subnet_id, project_id=None):
        if subnet_id != "s2":
            raise UnsupportedOption(f"look up subnet {subnet_id}", "there is no such subnet")
        return Subnet(id="s2", network_id="n2", cidr="192.0.2.0/24", gateway=None)


def tree(*subnets):
    members = tuple(
        Member(id=f"m{number}", pool_id="p", address=f"192.0.2.{number}", protocol_port=80, subnet_id=subnet_id)
        for number, subnet_id in enumerate(subnets, start=11)
    )
    return LoadBalancer(
        id="lb",
        project_id="demo",
        vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1"),
        additional_vips=(Vip(address="2001:db8:1::10", subnet_id="s1v6", network_id="n1", port_id="p1"),),
        pools=(Pool(id="p", loadbalancer_id="lb", protocol=PoolProtocol.HTTP, members=members),),
    )


def test_the_vip_network_with_all_its_subnets_is_first():
    assert needed_networks(tree("s2", None, "s2"), (), OneSubnet()) == ({"n1": ("s1", "s1v6"), "n2": ("s2",)}, {})


def test_a_deleted_subnet_fails_only_its_member():
    needed, failed = needed_networks(tree("s2", "gone"), (), OneSubnet())
    assert needed == {"n1": ("s1", "s1v6"), "n2": ("s2",)}
    assert list(failed) == ["m12"]
    assert "gone" in failed["m12"]
