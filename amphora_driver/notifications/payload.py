# SPDX-License-Identifier: Apache-2.0
"""The content of a notification about a load balancer."""

from __future__ import annotations

from typing import Any

from amphora_driver.model.loadbalancer import LoadBalancer


def build_payload(tree: LoadBalancer) -> dict[str, Any]:
    """Return the payload with the keys of the notifications of Octavia's provider `amphora`.

    The keys are those of octavia_lib's load balancer without its lists. Octavia omits a flavor that is not set. Octavia
    passes the details of an availability zone to a provider driver, but not its name, so `availability_zone` is None.
    """
    payload: dict[str, Any] = {
        "loadbalancer_id": tree.id,
        "name": tree.name,
        "description": tree.description,
        "project_id": tree.project_id,
        "admin_state_up": tree.admin_state_up,
        "availability_zone": None,
        "vip_address": tree.vip.address or None,
        "vip_network_id": tree.vip.network_id or None,
        "vip_port_id": tree.vip.port_id or None,
        "vip_subnet_id": tree.vip.subnet_id or None,
        "vip_qos_policy_id": tree.vip_qos_policy_id,
    }
    if tree.flavor is not None:
        payload["flavor"] = tree.flavor
    return payload
