# SPDX-License-Identifier: Apache-2.0
"""Deployments with different flavors, zones and backends."""

import msgspec

from amphora_driver.model.enums import Topology
from amphora_driver.validation.backend_capabilities import Backend, Deployment

NETNS = Backend(name="netns", supports=frozenset({"compute_flavor", "compute_zone", "compute_zones"}), wiring="bridge")
CLOUD = Backend(
    name="cloud",
    supports=frozenset(
        {"compute_flavor", "amp_image_tag", "compute_zone", "compute_zones", "volume_zone", "management_network"}
    ),
    wiring="cloud",
)
IMAGES = msgspec.structs.replace(CLOUD, name="images", wiring="bridge")
LOCAL = Backend(name="local", wiring="bridge")
ELSEWHERE = Backend(name="elsewhere", wiring="bridge")


def deployment(*compute, network=(LOCAL,), **more):
    compute = compute or (NETNS,)
    values = {
        "topologies": ("SINGLE",),
        "compute": {one.name: one for one in compute},
        "network": {one.name: one for one in network},
        "default_topology": Topology.SINGLE,
        "default_compute": compute[0].name,
        "default_network": network[0].name,
    }
    return Deployment(**{**values, **more})
