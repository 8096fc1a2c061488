# SPDX-License-Identifier: Apache-2.0
"""Metadata of flavors and availability zones: valid and invalid values of every key, and the listing."""

from __future__ import annotations

import copy

import pytest
from deployments import CLOUD, ELSEWHERE, IMAGES, LOCAL, NETNS, deployment

from amphora_driver.errors import UnsupportedOption
from amphora_driver.validation import availability_zones, flavors

# A valid value for every key of the schemas.
GOOD = {
    "loadbalancer_topology": "SINGLE",
    "compute_driver": "netns",
    "network_driver": "local",
    "compute_flavor": "m1.small",
    "amp_image_tag": "amphora",
    "sriov_vip": True,
    "allow_member_sriov": True,
    "timeout_client_data": 60000,
    "timeout_member_connect": 1,
    "timeout_member_data": 2_073_600_000,
    "timeout_client_data_minimum": 1,
    "timeout_client_data_maximum": 2_073_600_000,
    "timeout_member_connect_minimum": 1,
    "timeout_member_connect_maximum": 1,
    "timeout_member_data_minimum": 600_000,
    "timeout_member_data_maximum": 2_073_600_000,
    "timeout_tunnel": 3_600_000,
    "timeout_http_request": 10_000,
    "connection_limit": 1000,
    "process_connection_limit": 100_000,
    "process_threads": 2,
    "tls_minimum_version": "TLSv1.2",
    "tls_ciphers": "ECDHE+AESGCM:!aNULL:@SECLEVEL=2:TLS_AES_128_GCM_SHA256",
    "connection_logging": False,
    "log_format": '%ci:%cp [%tr] "%{+Q}r" %[ssl_c_verify] 100%%',
    "admin_log_targets": ["udp://192.0.2.9:514", "tcp://[2001:db8::9]:601"],
    "tenant_log_targets": [],
    "vrrp_advert_interval": 0.2,
    "warm_spares": 1,
    "client_address": "hidden",
    "compute_zone": "nova",
    "compute_zones": ["nova", "north"],
    "volume_zone": "ssd",
    "management_network": "9c0b5d0e-5ad6-4ef5-9d0c-1d3b0a6ee9f4",
    "valid_vip_networks": ["n1", "n2"],
}
PLAIN = deployment()
RICH = deployment(NETNS, IMAGES, network=(LOCAL, ELSEWHERE))


@pytest.mark.parametrize("here", [PLAIN, RICH, deployment(CLOUD), deployment(IMAGES, NETNS)])
@pytest.mark.parametrize("module", [flavors, availability_zones])
def test_listed_keys_equal_accepted_keys(module, here):
    assert set(module.SCHEMA.properties) <= set(GOOD), "the test has each key"
    listed = module.list_supported_keys(here)
    assert all(text and "," not in text for text in listed.values())
    for key in module.SCHEMA.properties:
        accepted = False
        for name in here.compute:
            metadata = {key: GOOD[key]}
            if key == "compute_driver":
                metadata = {key: name}
            elif module is flavors:
                metadata["compute_driver"] = name
            accepted |= _accepted(module, metadata, here)
        assert accepted == (key in listed), key


def _accepted(module, metadata, here):
    try:
        module.validate_metadata(metadata, here)
    except UnsupportedOption:
        return False
    return True


def test_empty_metadata_is_accepted():
    for module in (flavors, availability_zones):
        assert module.validate_metadata(None, PLAIN) == {}
        assert module.validate_metadata({}, PLAIN) == {}


def test_the_listing_names_the_available_values():
    assert flavors.list_supported_keys(RICH)["compute_driver"].endswith("Served: netns or images.")
    assert flavors.list_supported_keys(RICH)["loadbalancer_topology"].endswith("Served: SINGLE.")


@pytest.mark.parametrize(
    ("module", "metadata", "key", "reason"),
    [
        (flavors, {"loadbalancer_topology": "ACTIVE_STANDBY"}, "loadbalancer_topology", "not support"),
        (flavors, {"loadbalancer_topology": "TRIPLE"}, "loadbalancer_topology", "SINGLE, ACTIVE_STANDBY"),
        (flavors, {"loadbalancer_topology": None}, "loadbalancer_topology", "type string"),
        (flavors, {"compute_driver": "nova"}, "compute_driver", "no compute backend of this name"),
        (flavors, {"network_driver": "neutron"}, "network_driver", "no network backend of this name"),
        (flavors, {"compute_flavor": 5}, "compute_flavor", "type string"),
        (flavors, {"compute_flavor": ""}, "compute_flavor", "empty"),
        (flavors, {"compute_flavor": "x" * 256}, "compute_flavor", "longer than 255"),
        (flavors, {"amp_image_tag": "t"}, "amp_image_tag", "compute backend netns does not support it"),
        (flavors, {"sriov_vip": False}, "sriov_vip", "not support"),
        (flavors, {"sriov_vip": "yes"}, "sriov_vip", "type boolean"),
        (flavors, {"allow_member_sriov": True}, "allow_member_sriov", "not support"),
        (flavors, {"timeout_tunnel": 0}, "timeout_tunnel", "1 or more"),
        (flavors, {"timeout_tunnel": 2_073_600_001}, "timeout_tunnel", "2073600000 or less"),
        (flavors, {"timeout_tunnel": "5s"}, "timeout_tunnel", "type integer"),
        (flavors, {"timeout_tunnel": True}, "timeout_tunnel", "type integer"),
        (flavors, {"timeout_tunnel": 1.5}, "timeout_tunnel", "type integer"),
        (flavors, {"connection_limit": -1}, "connection_limit", "1 or more"),
        (flavors, {"process_threads": 65}, "process_threads", "64 or less"),
        (flavors, {"tls_minimum_version": "SSLv3"}, "tls_minimum_version", "TLSv1, TLSv1.1, TLSv1.2, TLSv1.3"),
        (flavors, {"tls_ciphers": "AES256 AES128"}, "tls_ciphers", "OpenSSL cipher string"),
        (flavors, {"tls_ciphers": "AES256\n"}, "tls_ciphers", "OpenSSL cipher string"),
        (flavors, {"connection_logging": "no"}, "connection_logging", "type boolean"),
        (flavors, {"log_format": "%ci\nglobal"}, "log_format", "one line"),
        (flavors, {"log_format": "%ci\n"}, "log_format", "one line"),
        (flavors, {"log_format": "%ci\0"}, "log_format", "one line"),
        (flavors, {"log_format": "%nosuch"}, "log_format", "no variable %nosuch"),
        (flavors, {"vrrp_advert_interval": 0.01}, "vrrp_advert_interval", "0.05 or more"),
        (flavors, {"vrrp_advert_interval": 41}, "vrrp_advert_interval", "40 or less"),
        (flavors, {"vrrp_advert_interval": True}, "vrrp_advert_interval", "type number"),
        (flavors, {"admin_log_targets": "udp://192.0.2.9:514"}, "admin_log_targets", "type array"),
        (flavors, {"admin_log_targets": [5]}, "admin_log_targets", "its item 5 must be of type string"),
        (flavors, {"admin_log_targets": ["udp://192.0.2.9:1"] * 2}, "admin_log_targets", "twice"),
        (flavors, {"admin_log_targets": ["udp://[::1]:1", "udp://[0::1]:01"]}, "admin_log_targets", "[::1]:1 twice"),
        (flavors, {"admin_log_targets": ["udp://a.example:1"]}, "admin_log_targets", "with an IP address and a port"),
        (flavors, {"admin_log_targets": ["tls://192.0.2.9:6514"]}, "admin_log_targets", "no CA certificate"),
        (flavors, {"tenant_log_targets": ["relp://192.0.2.9:1"]}, "tenant_log_targets", "udp://, tcp://"),
        (flavors, {"unknown": 1}, "unknown", "key is unknown"),
        (flavors, {7: 1}, "7", "key is unknown"),
        (flavors, ["x"], "flavor", "not a JSON object"),
        (
            availability_zones,
            {"volume_zone": "v"},
            "volume_zone",
            "no compute backend of this deployment supports it (netns)",
        ),
        (availability_zones, {"management_network": "n"}, "management_network", "no compute backend"),
        (availability_zones, {"valid_vip_networks": "n"}, "valid_vip_networks", "type array"),
        (availability_zones, {"valid_vip_networks": []}, "valid_vip_networks", "empty"),
        (
            availability_zones,
            {"valid_vip_networks": ["n", 7]},
            "valid_vip_networks",
            "its item 7 must be of type string",
        ),
        (availability_zones, {"valid_vip_networks": ["n", "n"]}, "valid_vip_networks", "twice"),
        (availability_zones, {"compute_zone": ["a"]}, "compute_zone", "type string"),
        (availability_zones, "zone-1", "zone-1", "not a JSON object"),
    ],
)
def test_invalid_values_are_refused(module, metadata, key, reason):
    before = copy.deepcopy(metadata)
    with pytest.raises(UnsupportedOption) as caught:
        module.validate_metadata(metadata, PLAIN)
    assert key in str(caught.value)
    assert reason in str(caught.value)
    assert metadata == before


@pytest.mark.parametrize(
    ("flavor", "words"),
    [
        ({"connection_limit": 2000, "process_connection_limit": 1000}, ["2000", "connection_limit", "only 1000"]),
        ({"tls_minimum_version": "TLSv1.3", "tls_ciphers": "AES256-SHA:ECDHE+AESGCM"}, ["tls_ciphers", "TLS 1.3"]),
        ({"connection_logging": False, "log_format": "%ci"}, ["log_format", "connection_logging"]),
        ({"loadbalancer_topology": "SINGLE", "vrrp_advert_interval": 1}, ["vrrp_advert_interval", "one amphora"]),
        (
            {"connection_logging": False, "tenant_log_targets": ["udp://192.0.2.9:1"]},
            ["tenant_log_targets", "connection_logging"],
        ),
        (
            {"timeout_client_data_minimum": 2, "timeout_client_data_maximum": 1},
            ["timeout_client_data_minimum", "timeout_client_data_maximum"],
        ),
        (
            {"timeout_member_data_minimum": 2, "timeout_member_data": 1, "timeout_member_data_maximum": 3},
            ["timeout_member_data_minimum", "timeout_member_data", "2", "1"],
        ),
        (
            {"timeout_member_connect": 4, "timeout_member_connect_maximum": 3},
            ["timeout_member_connect", "timeout_member_connect_maximum"],
        ),
    ],
)
def test_a_contradictory_flavor_is_refused(flavor, words):
    with pytest.raises(UnsupportedOption) as caught:
        flavors.validate_metadata(flavor, PLAIN)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("flavor", "configured"),
    [
        ({"connection_limit": 2000}, {"process_connection_limit": 1000}),
        ({"tls_ciphers": "AES256-SHA"}, {"tls_minimum_version": "TLSv1.3"}),
        ({"tls_minimum_version": "TLSv1.3"}, {"tls_ciphers": "AES256-SHA"}),
        ({"log_format": "%ci"}, {"connection_logging": False}),
        ({"tenant_log_targets": ["udp://192.0.2.9:1"]}, {"connection_logging": False}),
    ],
)
def test_a_flavor_that_contradicts_the_configuration_is_refused(flavor, configured):
    with pytest.raises(UnsupportedOption, match=f"{next(iter(configured))} comes from the configuration"):
        flavors.validate_metadata(flavor, deployment(**configured))
    flavors.validate_metadata({}, deployment(**configured))


@pytest.mark.parametrize(
    "flavor",
    [
        {"connection_limit": 1000, "process_connection_limit": 1000},
        {"process_connection_limit": 10},
        {"tls_minimum_version": "TLSv1.3", "tls_ciphers": "AES256-SHA:TLS_AES_128_GCM_SHA256"},
        {"tls_minimum_version": "TLSv1.2", "tls_ciphers": "AES256-SHA"},
        {"connection_logging": True, "log_format": "%ci"},
        {"timeout_client_data_minimum": 2, "timeout_client_data": 2, "timeout_client_data_maximum": 2},
        {"timeout_member_data_minimum": 2, "timeout_client_data_maximum": 1},
    ],
)
def test_compatible_keys_are_accepted(flavor):
    assert flavors.validate_metadata(flavor, PLAIN) == flavor


def test_the_objects_of_the_caller_do_not_change():
    omitted = ("connection_logging", "amp_image_tag", "vrrp_advert_interval")
    flavor = {key: GOOD[key] for key in flavors.list_supported_keys(RICH) if key not in omitted}
    zone = {key: GOOD[key] for key in availability_zones.list_supported_keys(RICH)}
    assert "valid_vip_networks" in zone
    before = copy.deepcopy((flavor, zone))
    flavors.validate_metadata(flavor, RICH)
    availability_zones.validate_metadata(zone, RICH)
    assert (flavor, zone) == before
