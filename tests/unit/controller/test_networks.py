# SPDX-License-Identifier: Apache-2.0
"""The networks that an amphora needs."""

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import PoolProtocol
from amphora_driver.model.loadbalancer import LoadBalancer, Member, Pool, Profile, Vip
from amphora_driver.model.network import Subnet
from amphora_driver.reconcile.reconciler import NeededNetworks, needed_networks


class TwoSubnets:
    """A network backend that knows the subnets s2 and s3 of one network."""

    def subnet(self, subnet_id, project_id=None):
        if subnet_id not in ("s2", "s3"):
            raise UnsupportedOption(f"look up subnet {subnet_id}", "there is no such subnet")
        return Subnet(id=subnet_id, network_id="n2", cidr="192.0.2.0/24", gateway=None)


def tree(*subnets, profile=Profile(), direct=()):  # noqa: B008 - an immutable value
    """A member on each subnet; those with a number of `direct` request SR-IOV."""
    members = tuple(
        Member(
            id=f"m{number}", pool_id="p", address=f"192.0.2.{number}", protocol_port=80, subnet_id=subnet_id,
            vnic_type="direct" if number in direct else "normal",
        )
        for number, subnet_id in enumerate(subnets, start=11)
    )  # fmt: skip
    return LoadBalancer(
        id="lb",
        project_id="demo",
        vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1"),
        additional_vips=(Vip(address="2001:db8:1::10", subnet_id="s1v6", network_id="n1", port_id="p1"),),
        pools=(Pool(id="p", loadbalancer_id="lb", protocol=PoolProtocol.HTTP, members=members),),
        profile=profile,
    )


def test_the_vip_network_with_all_its_subnets_is_first():
    found = needed_networks(tree("s2", None, "s2"), (), TwoSubnets())
    assert found == NeededNetworks(ordinary={"n1": ("s1", "s1v6"), "n2": ("s2",)})
    assert list(found.ordinary) == ["n1", "n2"]


def test_a_deleted_subnet_fails_only_its_member():
    found = needed_networks(tree("s2", "gone"), (), TwoSubnets())
    assert found.ordinary == {"n1": ("s1", "s1v6"), "n2": ("s2",)}
    assert list(found.failed) == ["m12"]
    assert "gone" in found.failed["m12"]


VIPS = {"n1": ("s1", "s1v6")}
PERMITTED = Profile(allow_member_sriov=True)


@pytest.mark.parametrize(
    ("subnets", "direct", "profile", "ordinary", "sr_iov"),
    [
        # A network has a port of each type that its members request, whatever port it had before.
        (("s2", "s2"), {12}, PERMITTED, {**VIPS, "n2": ("s2",)}, {"n2": ("s2",)}),
        (("s2", "s3"), {12}, PERMITTED, {**VIPS, "n2": ("s2",)}, {"n2": ("s3",)}),
        (("s2", "s3"), {11, 12}, PERMITTED, VIPS, {"n2": ("s2", "s3")}),
        (("s2", "s3"), (), PERMITTED, {**VIPS, "n2": ("s2", "s3")}, {}),
        # The network of the VIPs: their port serves members of its own type.
        (("s1", "s1"), {12}, PERMITTED, VIPS, {"n1": ("s1",)}),
        (("s1", "s1"), {12}, Profile(allow_member_sriov=True, sriov_vip=True), VIPS, {}),
        # Octavia refuses such a member, but the flavor decides here as well.
        (("s2", "s2"), {12}, Profile(), {**VIPS, "n2": ("s2",)}, {}),
    ],
)
def test_each_member_has_a_port_of_its_type(subnets, direct, profile, ordinary, sr_iov):
    found = needed_networks(tree(*subnets, profile=profile, direct=direct), (), TwoSubnets())
    assert found == NeededNetworks(ordinary=ordinary, sr_iov=sr_iov)
