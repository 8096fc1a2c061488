# SPDX-License-Identifier: Apache-2.0
"""Objects as octavia-api passes them to the driver, with every field that the API sets."""

from octavia_lib.api.drivers import data_models

NETWORK, SUBNET, SUBNET6 = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2, 3))
LB, LISTENER, POOL, MEMBER, MONITOR = (f"10000000-0000-4000-8000-00000000000{n}" for n in range(1, 6))


def load_balancer(**more):
    values = {
        "loadbalancer_id": LB,
        "project_id": "demo",
        "name": "lb",
        "admin_state_up": True,
        "flavor": {},
        "availability_zone": {},
        "vip_address": "198.51.100.10",
        "vip_network_id": NETWORK,
        "vip_subnet_id": SUBNET,
        "vip_port_id": "20000000-0000-4000-8000-000000000001",
        "additional_vips": [],
    }
    return data_models.LoadBalancer(**{**values, **more})


def listener(**more):
    values = {
        "listener_id": LISTENER,
        "loadbalancer_id": LB,
        "project_id": "demo",
        "protocol": "HTTP",
        "protocol_port": 80,
        "admin_state_up": True,
        "connection_limit": -1,
        "timeout_client_data": 50000,
        "timeout_member_connect": 5000,
        "timeout_member_data": 50000,
        "timeout_tcp_inspect": 0,
        "insert_headers": {},
        "client_authentication": "NONE",
    }
    return data_models.Listener(**{**values, **more})


def pool(**more):
    values = {
        "pool_id": POOL,
        "loadbalancer_id": LB,
        "listener_id": LISTENER,
        "project_id": "demo",
        "protocol": "HTTP",
        "lb_algorithm": "ROUND_ROBIN",
        "admin_state_up": True,
        "tls_enabled": False,
        "session_persistence": None,
    }
    return data_models.Pool(**{**values, **more})


def member(number=1, **more):
    values = {
        "member_id": f"30000000-0000-4000-8000-{number:012d}",
        "pool_id": POOL,
        "address": f"192.0.2.{number}",
        "protocol_port": 8080,
        "weight": 1,
        "backup": False,
        "admin_state_up": True,
        "project_id": "demo",
    }
    return data_models.Member(**{**values, **more})
