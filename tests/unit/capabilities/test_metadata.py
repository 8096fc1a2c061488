# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy

import pytest

from amphora_driver.capabilities import flavors, zones
from amphora_driver.errors import UnsupportedOption


@pytest.mark.parametrize(
    ("module", "keys"),
    [(flavors, {"loadbalancer_topology", "compute_flavor"}), (zones, {"compute_zone"})],
)
def test_supported(module, keys):
    supported = module.supported()
    assert set(supported) == keys
    assert all(text and "," not in text for text in supported.values())


@pytest.mark.parametrize(
    ("module", "metadata"),
    [
        (flavors, None),
        (flavors, {}),
        (flavors, {"loadbalancer_topology": "SINGLE", "compute_flavor": "m1"}),
        (zones, None),
        (zones, {}),
        (zones, {"compute_zone": "nova"}),
    ],
)
def test_valid(module, metadata):
    before = copy.deepcopy(metadata)
    module.validate(metadata)
    assert metadata == before


@pytest.mark.parametrize(
    ("module", "metadata", "key", "reason"),
    [
        (flavors, {"loadbalancer_topology": "ACTIVE_STANDBY"}, "loadbalancer_topology", "not serve"),
        (flavors, {"loadbalancer_topology": "TRIPLE"}, "loadbalancer_topology", "SINGLE, ACTIVE_STANDBY"),
        (flavors, {"loadbalancer_topology": None}, "loadbalancer_topology", "type string"),
        (flavors, {"compute_flavor": 5}, "compute_flavor", "type string"),
        (flavors, {"compute_flavor": ""}, "compute_flavor", "empty"),
        (flavors, {"amp_image_tag": "t"}, "amp_image_tag", "not serve"),
        (flavors, {"sriov_vip": False}, "sriov_vip", "not serve"),
        (flavors, {"sriov_vip": "yes"}, "sriov_vip", "type boolean"),
        (flavors, {"allow_member_sriov": True}, "allow_member_sriov", "not serve"),
        (flavors, {"unknown": 1}, "unknown", "no such key"),
        (flavors, {7: 1}, "7", "no such key"),
        (flavors, ["x"], "flavor", "not an object"),
        (zones, {"volume_zone": "v"}, "volume_zone", "not serve"),
        (zones, {"management_network": "n"}, "management_network", "not serve"),
        (zones, {"valid_vip_networks": ["n"]}, "valid_vip_networks", "not serve"),
        (zones, {"valid_vip_networks": "n"}, "valid_vip_networks", "type array"),
        (zones, {"compute_zone": ["a"]}, "compute_zone", "type string"),
    ],
)
def test_refused(module, metadata, key, reason):
    before = copy.deepcopy(metadata)
    with pytest.raises(UnsupportedOption) as caught:
        module.validate(metadata)
    assert key in str(caught.value)
    assert reason in str(caught.value)
    assert metadata == before
