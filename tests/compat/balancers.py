# SPDX-License-Identifier: Apache-2.0
"""Load balancers in the format of the worker's program, with defaults."""

from __future__ import annotations

import uuid

from amphora_lab import MAC, MEMBERS, VIP, VIP6

LB = "1b000000-0000-4000-8000-000000000001"
WEB, TLS, TCP, METRICS = (f"11500000-0000-4000-8000-00000000000{n}" for n in range(1, 5))
POOL, POOL2 = (f"b0010000-0000-4000-8000-00000000000{n}" for n in (1, 2))
SUBNET = {"cidr": "198.51.100.0/24", "gateway": "198.51.100.1"}
ADDITIONAL = [{"ip_address": VIP6, "cidr": "2001:db8:1::/64"}]


def member(name, **more):
    return {"id": str(uuid.uuid5(uuid.UUID(LB), name)), "ip_address": MEMBERS[name], **more}


def pool(*members, **more):
    return {"id": POOL, "protocol": "HTTP", "members": list(members), **more}


def listener(**more):
    return {"id": WEB, "protocol": "HTTP", "protocol_port": 80, "pool": POOL, **more}


def balancer(*parts, **more):
    return {
        "id": LB,
        "vip": VIP,
        "additional_vips": [VIP6],
        "listeners": [part for part in parts if "protocol_port" in part],
        "pools": [part for part in parts if "protocol_port" not in part],
        **more,
    }


def plug(worker, mac: str = MAC) -> None:
    """Run Octavia's flow for a new load balancer, without its listeners."""
    assert worker("check") == "1.0"
    worker("plug_vip", balancer(), {"mac": mac, "mtu": 1500}, SUBNET, ADDITIONAL)
