# SPDX-License-Identifier: Apache-2.0
"""The profile of a new load balancer: the flavor overrides the configuration; contradictions are refused."""

import copy

import pytest
from deployments import CLOUD, ELSEWHERE, IMAGES, LOCAL, NETNS, deployment

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.model.loadbalancer import Profile, Vip
from amphora_driver.validation import availability_zones
from amphora_driver.validation.profile import choose_profile

HERE = deployment(NETNS, IMAGES, CLOUD, network=(LOCAL, ELSEWHERE))


def test_an_empty_profile_uses_the_configuration():
    plain = Profile(topology=Topology.SINGLE, compute="netns", network="local")
    assert choose_profile(None, None, HERE) == choose_profile({}, {}, HERE) == plain
    assert choose_profile({}, {}, deployment(IMAGES)).compute == "images"


def test_flavor_values_are_kept_and_others_stay_unset():
    flavor = {
        "timeout_tunnel": 60000.0,
        "timeout_client_data_minimum": 7.0,
        "connection_limit": 5,
        "tls_ciphers": "HIGH",
        "connection_logging": False,
    }
    zone = {"compute_zone": "z", "valid_vip_networks": ["n"]}
    before = copy.deepcopy((flavor, zone))
    found = choose_profile({**flavor, "compute_flavor": "m1"}, zone, HERE)
    assert found == Profile(
        topology=Topology.SINGLE,
        compute="netns",
        network="local",
        compute_flavor="m1",
        compute_zone="z",
        timeout_tunnel=60000,
        timeout_client_data_minimum=7,
        connection_limit=5,
        tls_ciphers="HIGH",
        connection_logging=False,
    )
    assert type(found.timeout_tunnel) is type(found.timeout_client_data_minimum) is int
    assert (flavor, zone) == before


def test_a_pair_is_chosen_by_flavor_or_configuration():
    both = deployment(topologies=("ACTIVE_STANDBY", "SINGLE"))
    found = choose_profile({"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 2}, {}, both)
    assert (found.topology, found.vrrp_advert_interval) == (Topology.ACTIVE_STANDBY, 2.0)
    assert type(found.vrrp_advert_interval) is float
    configured = deployment(topologies=both.topologies, default_topology=Topology.ACTIVE_STANDBY)
    assert choose_profile({}, {}, configured).topology is Topology.ACTIVE_STANDBY
    assert choose_profile({"loadbalancer_topology": "SINGLE"}, {}, configured).topology is Topology.SINGLE


def test_the_flavor_chooses_the_backend():
    found = choose_profile({"compute_driver": "images", "amp_image_tag": "new"}, {"volume_zone": "ssd"}, HERE)
    assert (found.compute, found.image_tag, found.volume_zone) == ("images", "new", "ssd")


def test_the_vip_keeps_its_network_backend():
    assert choose_profile({}, {}, HERE, vip_network="elsewhere").network == "elsewhere"
    assert choose_profile({"network_driver": "elsewhere"}, {}, HERE, vip_network="elsewhere").network == "elsewhere"


@pytest.mark.parametrize(
    ("flavor", "zone", "more", "words"),
    [
        ({}, {"volume_zone": "ssd"}, {}, ["volume_zone", "compute backend netns"]),
        ({"compute_driver": "cloud"}, {}, {}, ["cloud", "cannot attach ports of the network backend local"]),
        ({"network_driver": "elsewhere"}, {}, {}, ["elsewhere", "backend local has allocated", "network_driver"]),
        ({"network_driver": "local"}, {}, {"vip_network": "elsewhere"}, ["local", "backend elsewhere has allocated"]),
        ({}, {}, {"vip_network": "gone"}, ["gone", "not enabled"]),
        ({"compute_driver": "nowhere"}, {}, {}, ["compute_driver", "nowhere"]),
        ({"colour": "blue"}, {}, {}, ["colour"]),
        ({}, {"colour": "blue"}, {}, ["colour"]),
    ],
)
def test_contradictory_choices_are_refused(flavor, zone, more, words):
    with pytest.raises(UnsupportedOption) as caught:
        choose_profile(flavor, zone, HERE, **more)
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_unsupported_configured_topology_is_refused():
    here = deployment(default_topology=Topology.ACTIVE_STANDBY)
    with pytest.raises(UnsupportedOption, match="ACTIVE_STANDBY"):
        choose_profile({}, {}, here)
    assert choose_profile({"loadbalancer_topology": "SINGLE"}, {}, here).topology is Topology.SINGLE


def test_an_installed_topology_is_supported():
    here = deployment(topologies=("ACTIVE_STANDBY", "SINGLE"))
    assert choose_profile({"loadbalancer_topology": "ACTIVE_STANDBY"}, {}, here).topology is Topology.ACTIVE_STANDBY


def vip(network):
    return Vip(address="198.51.100.5", subnet_id="s", network_id=network, port_id="p")


def test_vips_must_be_on_networks_of_the_zone():
    availability_zones.check_zone_vips(None, [vip("n1")])
    availability_zones.check_zone_vips({"compute_zone": "z"}, [vip("n1")])
    availability_zones.check_zone_vips({"valid_vip_networks": ["n1", "n2"]}, [vip("n1"), vip("n2")])
    with pytest.raises(UnsupportedOption, match=r"n3.*valid_vip_networks.*n1, n2"):
        availability_zones.check_zone_vips({"valid_vip_networks": ["n1", "n2"]}, [vip("n1"), vip("n3")])
