# SPDX-License-Identifier: Apache-2.0
"""The load-balancing policy and the load balancer that it creates (policy.py)."""

import pytest

from amphora_cluster.policy import MonitorPolicy, PolicySpec, PoolPolicy, VipPolicy, from_mapping, names, to_create_body
from amphora_driver.errors import RequestError

LEAST = {"pool": {"subnet": "members"}, "vip": {"subnet": "front"}}


def test_defaults():
    assert from_mapping(LEAST) == PolicySpec(pool=PoolPolicy(subnet="members"), vip=VipPolicy(subnet="front"))
    spec = from_mapping({**LEAST, "health_monitor": {}})
    assert spec.health_monitor == MonitorPolicy()
    assert (spec.lb_status_timeout, spec.creates_load_balancer) == (300, True)


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", 1.3])
def test_the_document_of_senlin(version):
    document = {"type": "senlin.policy.loadbalance", "version": version, "properties": LEAST}
    assert from_mapping(document) == from_mapping(LEAST)
    assert from_mapping({"properties": LEAST}) == from_mapping(LEAST)


def test_texts_for_numbers_and_truth_values():
    spec = from_mapping(
        {
            "pool": {"subnet": "m", "protocol_port": "8080", "admin_state_up": "no"},
            "vip": {"subnet": 7, "connection_limit": " -1 ", "admin_state_up": "True"},
            "health_monitor": {"delay": "20"},
        }
    )
    assert (spec.pool.protocol_port, spec.pool.admin_state_up) == (8080, False)
    assert (spec.vip.subnet, spec.vip.connection_limit, spec.vip.admin_state_up) == ("7", -1, True)
    assert spec.health_monitor.delay == 20


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"pool": {}}, "pool.subnet"),
        ({"pool": {"subnet": ""}}, "pool.subnet"),
        ({"pool": {"subnet": None}}, "pool.subnet"),
        ({"pool": {"subnet": ["m"]}}, "pool.subnet"),
        ({"pool": "m"}, "pool"),
        ({"pools": {}}, "pools"),
        ({"pool": {"subnet": "m", "weight": 1}}, "pool.weight"),
        ({"pool": {"subnet": "m", "protocol": "UDP"}}, "pool.protocol"),
        ({"pool": {"subnet": "m", "protocol": None}}, "pool.protocol"),
        ({"pool": {"subnet": "m", "protocol_port": 0}}, "pool.protocol_port"),
        ({"pool": {"subnet": "m", "protocol_port": 65536}}, "pool.protocol_port"),
        ({"pool": {"subnet": "m", "protocol_port": True}}, "pool.protocol_port"),
        ({"pool": {"subnet": "m", "protocol_port": 80.5}}, "pool.protocol_port"),
        ({"pool": {"subnet": "m", "protocol_port": "eighty"}}, "pool.protocol_port"),
        ({"pool": {"subnet": "m", "lb_method": "SOURCE_IP_PORT"}}, "pool.lb_method"),
        ({"pool": {"subnet": "m", "admin_state_up": "maybe"}}, "pool.admin_state_up"),
        ({"pool": {"subnet": "m", "session_persistence": {"type": "COOKIE"}}}, "pool.session_persistence.type"),
        ({"pool": {"subnet": "m", "session_persistence": {"kind": 1}}}, "pool.session_persistence.kind"),
        (
            {"pool": {"subnet": "m", "session_persistence": {"type": "APP_COOKIE"}}},
            "pool.session_persistence.cookie_name",
        ),
        (
            {"pool": {"subnet": "m", "session_persistence": {"type": "SOURCE_IP", "cookie_name": "c"}}},
            "pool.session_persistence.cookie_name",
        ),
        ({"pool": {"subnet": "m", "id": "p"}}, "pool.id"),
        ({"loadbalancer": "lb"}, "pool.id"),
        ({"vip": {}}, "vip"),
        ({"vip": {"subnet": "f", "address": "10.0.0.256"}}, "vip.address"),
        ({"vip": {"subnet": "f", "connection_limit": -2}}, "vip.connection_limit"),
        ({"vip": {"subnet": "f", "connection_limit": 2**31}}, "vip.connection_limit"),
        ({"health_monitor": {"type": "UDP-CONNECT"}}, "health_monitor.type"),
        ({"health_monitor": {"delay": 0}}, "health_monitor.delay"),
        ({"health_monitor": {"timeout": 0}}, "health_monitor.timeout"),
        ({"health_monitor": {"max_retries": 11}}, "health_monitor.max_retries"),
        ({"health_monitor": {"type": "HTTP", "http_method": "PATCH"}}, "health_monitor.http_method"),
        ({"health_monitor": {"type": "HTTP", "url_path": "health"}}, "health_monitor.url_path"),
        ({"health_monitor": {"type": "HTTP", "expected_codes": "20"}}, "health_monitor.expected_codes"),
        ({"health_monitor": {"type": "TCP", "url_path": "/"}}, "health_monitor.url_path"),
        ({"lb_status_timeout": 0}, "lb_status_timeout"),
        ({"flavor_id": ""}, "flavor_id"),
        ({"availability_zone": {}}, "availability_zone"),
    ],
)
def test_a_refusal_names_the_path(changes, path):
    for document, prefix in (({**LEAST, **changes}, ""), ({"properties": {**LEAST, **changes}}, "properties.")):
        with pytest.raises(RequestError) as caught:
            from_mapping(document)
        assert caught.value.happened.startswith(f"{prefix}{path}: "), caught.value


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ([], "policy"),
        ("pool", "policy"),
        ({}, "pool"),
        ({"type": "senlin.policy.scaling", "properties": LEAST}, "type"),
        ({"type": "senlin.policy.loadbalance", "version": "2.0", "properties": LEAST}, "version"),
        ({"type": "senlin.policy.loadbalance", "properties": None}, "properties"),
        ({"type": "senlin.policy.loadbalance", "name": "x", "properties": LEAST}, "name"),
        ({"type": "senlin.policy.loadbalance"}, "properties.pool"),
    ],
)
def test_refused_documents(document, path):
    with pytest.raises(RequestError) as caught:
        from_mapping(document)
    assert caught.value.happened.startswith(f"{path}: ")


def test_an_existing_pool():
    spec = from_mapping({"loadbalancer": "lb", "pool": {"subnet": "m", "id": "p"}})
    assert (spec.creates_load_balancer, spec.loadbalancer, spec.pool.id) == (False, "lb", "p")
    assert names(spec) == (("subnet", "m"), ("loadbalancer", "lb"))


def test_the_smallest_load_balancer():
    assert to_create_body(from_mapping(LEAST), "web") == {
        "loadbalancer": {
            "name": "web",
            "admin_state_up": True,
            "vip_subnet_id": "front",
            "listeners": [
                {
                    "name": "web-listener",
                    "protocol": "HTTP",
                    "protocol_port": 80,
                    "connection_limit": -1,
                    "admin_state_up": True,
                    "default_pool": {
                        "name": "web-pool",
                        "protocol": "HTTP",
                        "lb_algorithm": "ROUND_ROBIN",
                        "admin_state_up": True,
                    },
                }
            ],
        }
    }


def test_each_property_reaches_the_load_balancer():
    spec = from_mapping(
        {
            "pool": {
                "subnet": "members",
                "protocol": "TCP",
                "protocol_port": 8080,
                "lb_method": "LEAST_CONNECTIONS",
                "admin_state_up": False,
                "session_persistence": {"type": "APP_COOKIE", "cookie_name": "sid"},
            },
            "vip": {
                "subnet": "front",
                "network": "net",
                "address": "192.0.2.9",
                "connection_limit": 100,
                "protocol": "HTTPS",
                "protocol_port": 443,
                "admin_state_up": False,
            },
            "health_monitor": {
                "type": "HTTP",
                "delay": 20,
                "timeout": 9,
                "max_retries": 2,
                "admin_state_up": False,
                "http_method": "POST",
                "url_path": "/up?x=1",
                "expected_codes": "200-204",
            },
            "lb_status_timeout": 60,
            "availability_zone": "az1",
            "flavor_id": "flavor",
        }
    )
    ids = {("subnet", "front"): "subnet-id", ("network", "net"): "network-id"}
    assert to_create_body(spec, "web", ids=ids, provider="haproxy", tags=("t",)) == {
        "loadbalancer": {
            "name": "web",
            "admin_state_up": False,
            "vip_subnet_id": "subnet-id",
            "vip_network_id": "network-id",
            "vip_address": "192.0.2.9",
            "availability_zone": "az1",
            "flavor_id": "flavor",
            "provider": "haproxy",
            "tags": ["t"],
            "listeners": [
                {
                    "name": "web-listener",
                    "protocol": "HTTPS",
                    "protocol_port": 443,
                    "connection_limit": 100,
                    "admin_state_up": False,
                    "tags": ["t"],
                    "default_pool": {
                        "name": "web-pool",
                        "protocol": "TCP",
                        "lb_algorithm": "LEAST_CONNECTIONS",
                        "admin_state_up": False,
                        "tags": ["t"],
                        "session_persistence": {"type": "APP_COOKIE", "cookie_name": "sid"},
                        "healthmonitor": {
                            "name": "web-monitor",
                            "type": "HTTP",
                            "delay": 20,
                            "timeout": 9,
                            "max_retries": 2,
                            "admin_state_up": False,
                            "http_method": "POST",
                            "url_path": "/up?x=1",
                            "expected_codes": "200-204",
                            "tags": ["t"],
                        },
                    },
                }
            ],
        }
    }


@pytest.mark.parametrize("persistence", [{}, {"type": "NONE"}, {"type": None}])
def test_no_persistence(persistence):
    spec = from_mapping({**LEAST, "pool": {"subnet": "m", "session_persistence": persistence}})
    body = to_create_body(spec, "web")
    assert "session_persistence" not in body["loadbalancer"]["listeners"][0]["default_pool"]
