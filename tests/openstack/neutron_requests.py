# SPDX-License-Identifier: Apache-2.0
"""Requests to the network backend `neutron`, and the objects that they create."""

import uuid

from amphora_driver.model.network import VipRequest
from amphora_driver.network.interface import PortPurpose, PortRequest


def new_id():
    return str(uuid.uuid4())


def take(backend, tenant, *wanted, load_balancer_id=None):
    requests = [VipRequest(**one) for one in wanted or ({"subnet_id": tenant.v4.id},)]
    return backend.allocate_vip(load_balancer_id or new_id(), tenant.project_id, requests)


def vip_port_request(tenant, load_balancer_id=None, amphora_id=None, **more):
    wanted = {
        "amphora_id": amphora_id or new_id(),
        "network_id": tenant.network.id,
        "subnet_ids": (tenant.v4.id,),
        "purpose": PortPurpose.VIP,
        "load_balancer_id": load_balancer_id or new_id(),
        "project_id": tenant.project_id,
        "vips": ("198.51.100.200", "2001:db8::200"),
    }
    return PortRequest(**{**wanted, **more})


def ports_on(admin, tenant):
    return list(admin.ports(network_id=tenant.network.id))


def groups_of(admin, deployment):
    return list(admin.security_groups(description=f"octavia-amphora-driver deployment {deployment}"))


def group_named(admin, deployment, name):
    (found,) = [one for one in groups_of(admin, deployment) if one.name == name]
    return found


def rules_of_groups(admin, deployment):
    """The numbers of rules of the groups with a name, the oldest group first."""
    found = {}
    for one in sorted(groups_of(admin, deployment), key=lambda group: (group.created_at, group.id)):
        found.setdefault(one.name, []).append(len(one.security_group_rules))
    return found
