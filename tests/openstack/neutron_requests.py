# SPDX-License-Identifier: Apache-2.0
"""Requests to the network backend `neutron`, and the objects that they create."""

import uuid
from concurrent.futures import ThreadPoolExecutor

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


def race(call, backends):
    with ThreadPoolExecutor(len(backends)) as threads:
        return list(threads.map(call, backends))
