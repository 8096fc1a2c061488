# SPDX-License-Identifier: Apache-2.0
"""The checks of flavors and availability zones against Nova, Glance and Neutron."""

import pytest
from nova_answers import refused

from amphora_driver.errors import ComputeError, NetworkError, UnsupportedOption

ZONES = (
    "GET /os-availability-zone",
    {
        "availabilityZoneInfo": [
            {"zoneName": one, "zoneState": {"available": True}, "hosts": None} for one in ("a", "b")
        ]
    },
)
FLAVOR = ("GET /flavors/x", {"flavor": {"id": "x"}})
GONE = refused(404, "Flavor x could not be found.", "itemNotFound")
FLAVORS = ("GET /flavors?is_public=None&limit=1000", {"flavors": [{"id": "1", "name": "y"}]})


@pytest.mark.parametrize(
    ("metadata", "answers", "options"),
    [
        ({}, [], {}),
        ({"compute_flavor": "x"}, [FLAVOR], {}),
        ({"compute_flavor": "y"}, [("GET /flavors/y", GONE), FLAVORS], {}),
        ({"amp_image_tag": "x"}, [], {}),
        ({"compute_zone": "a"}, [ZONES], {}),
        ({"compute_zones": ["b", "a"]}, [ZONES], {}),
        ({"management_network": "n"}, [], {}),
        ({"volume_zone": "a", "compute_zone": "a"}, [ZONES], {"boot_volume_size": 4}),
        ({"volume_zone": "a"}, [], {"boot_volume_size": 4, "zones": "a"}),
        # Keys of other parts of the driver.
        ({"loadbalancer_topology": "SINGLE", "valid_vip_networks": ["v"]}, [], {}),
    ],
)
def test_existing_objects_are_accepted(make_nova, metadata, answers, options):
    made = make_nova(*answers, **options)
    made.validate_profile(metadata)
    assert made.script.requests == [one for one, _ in answers]


@pytest.mark.parametrize(
    ("metadata", "answers", "images", "options", "message"),
    [
        ({"compute_flavor": "x"}, [("GET /flavors/x", GONE), FLAVORS], ["i"], {}, "'x' as compute_flavor.*no flavor"),
        ({"amp_image_tag": "x"}, [], [None], {}, "'x' as amp_image_tag.*tag 'x' and the owner owner"),
        ({"compute_zone": "c"}, [ZONES], ["i"], {}, "'c' as compute_zone: Nova has no availability zone c.*a, b"),
        ({"compute_zones": ["a", "c"]}, [ZONES], ["i"], {}, "as compute_zones: Nova has no availability zone c"),
        ({"volume_zone": "a", "compute_zone": "a"}, [], ["i"], {}, "'a' as volume_zone.*no boot volume"),
        ({"volume_zone": "a", "compute_zones": ["a", "b"]}, [], ["i"], {"boot_volume_size": 4}, "cross_az_attach"),
        ({"volume_zone": "a"}, [], ["i"], {"boot_volume_size": 4}, "cross_az_attach"),
    ],
)
def test_missing_objects_are_named_with_their_key(make_nova, metadata, answers, images, options, message):
    made = make_nova(*answers, images=images, **options)
    with pytest.raises(UnsupportedOption, match=message):
        made.validate_profile(metadata)


def test_a_missing_network_is_named_with_its_key(make_nova):
    made = make_nova()
    made.ports.missing = UnsupportedOption("read network n", "network n does not exist")
    with pytest.raises(UnsupportedOption, match="'n' as management_network: network n does not exist"):
        made.validate_profile({"management_network": "n"})


def test_what_exists_is_cached(make_nova):
    made = make_nova(FLAVOR, ZONES)
    for _ in range(2):
        made.validate_profile({"compute_flavor": "x", "compute_zone": "a"})
    assert made.script.requests == [FLAVOR[0], ZONES[0]]


def test_what_is_missing_is_read_again(make_nova):
    made = make_nova(("GET /flavors/x", GONE), FLAVORS, FLAVOR)
    with pytest.raises(UnsupportedOption):
        made.validate_profile({"compute_flavor": "x"})
    made.validate_profile({"compute_flavor": "x"})
    made = make_nova((ZONES[0], {"availabilityZoneInfo": []}))
    with pytest.raises(UnsupportedOption):
        made.validate_profile({"compute_zone": "a"})
    made.script.continue_with(ZONES)
    made.validate_profile({"compute_zone": "a"})


@pytest.mark.parametrize("metadata", [{"compute_flavor": "x"}, {"compute_zone": "a"}])
def test_a_service_that_does_not_answer_refuses_nothing(make_nova, metadata):
    path = "GET /flavors/x" if "compute_flavor" in metadata else ZONES[0]
    with pytest.raises(ComputeError, match="no answer"):
        make_nova((path, NetworkError("GET", "no answer"))).validate_profile(metadata)
