# SPDX-License-Identifier: Apache-2.0
"""Choosing the profile of a new load balancer.

Invariant: pure. The flavor beats the configuration; wishes that contradict each other are refused in a sentence, never
resolved in silence. What is chosen here stays with the load balancer: topology and backends for good, and of the rest
what the flavor said. What nobody said stays open (None) and follows the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.validation import availability_zones, flavors
from amphora_driver.validation.backend_capabilities import Backend, Deployment
from amphora_driver.validation.metadata_schema import NOT_YET

_WHOLE_NUMBERS = (
    "timeout_client_data",
    "timeout_member_connect",
    "timeout_member_data",
    "timeout_tunnel",
    "timeout_http_request",
    "connection_limit",
    "process_connection_limit",
    "process_threads",
    "warm_spares",
)
_SAME_NAME = (
    "compute_flavor",
    "tls_minimum_version",
    "tls_ciphers",
    "connection_logging",
    "log_format",
    "client_address",
)


def choose(
    flavor: Mapping[str, object] | None,
    zone: Mapping[str, object] | None,
    deployment: Deployment,
    *,
    vip_network: str | None = None,
) -> Profile:
    """The profile of a load balancer with this flavor in this availability zone.

    Args:
        flavor: the flavor's metadata.
        zone: the availability zone's metadata.
        deployment: what there is to choose from, and the defaults.
        vip_network: the network backend its VIPs were taken from already, before any flavor was known.

    Raises:
        UnsupportedOption: a wish that cannot be fulfilled, or not together with the others.
    """
    wishes: Mapping[str, Any] = flavors.validate(flavor, deployment)
    place: Mapping[str, Any] = availability_zones.validate(zone, deployment)
    compute = _backend("compute", wishes.get("compute_driver", deployment.default_compute), deployment.compute)
    allocator = vip_network or deployment.default_network
    network = _backend("network", wishes.get("network_driver", allocator), deployment.network)
    if network.name != allocator:
        raise UnsupportedOption(
            f"use the network backend {network.name} (flavor key network_driver)",
            f"the VIP was taken from {allocator}, which is asked before the flavor is known",
            f"Make {network.name} the default ([network] driver), or use another flavor.",
        )
    if wishes.get("client_address") == "preserved" and "client_address" not in network.supports:
        raise UnsupportedOption(
            "show members the addresses of clients (flavor key client_address)",
            f"the network backend {network.name} lets no packet out that has another sender",
            "Choose another flavor.",
        )
    if compute.wiring != network.wiring:
        raise UnsupportedOption(
            f"boot amphorae with the compute backend {compute.name}",
            f"it cannot plug ports of the network backend {network.name}",
            "Choose another flavor.",
        )
    for key in availability_zones.COMPUTE_KEYS:
        if key in place and key not in compute.supports:
            raise UnsupportedOption(
                f"use the availability zone key '{key}'",
                f"the compute backend {compute.name} does not serve it",
                "Choose another availability zone, or a flavor with another compute backend.",
            )
    chosen: dict[str, Any] = {
        **{key: place.get(key) for key in availability_zones.COMPUTE_KEYS},
        # JSON says 5.0 for a whole number too.
        **{key: int(wishes[key]) for key in _WHOLE_NUMBERS if key in wishes},
        **{key: wishes[key] for key in _SAME_NAME if key in wishes},
    }
    return Profile(
        topology=_topology(wishes.get("loadbalancer_topology"), deployment),
        compute=compute.name,
        network=network.name,
        image_tag=wishes.get("amp_image_tag"),
        vrrp_advert_interval=float(interval) if (interval := wishes.get("vrrp_advert_interval")) else None,
        **chosen,
    )


def _topology(wish: str | None, deployment: Deployment) -> Topology:
    chosen = Topology(wish) if wish else deployment.default_topology
    if chosen.value not in deployment.topologies:
        raise UnsupportedOption(
            f"use the configured topology {chosen}",
            NOT_YET,
            f"An operator can change [controller] loadbalancer_topology to {' or '.join(deployment.topologies)}.",
        )
    return chosen


def _backend(kind: str, name: str, backends: Mapping[str, Backend]) -> Backend:
    """The backend with this name; a flavor's was looked at already, but one that has a VIP may be disabled since."""
    if name not in backends:
        raise UnsupportedOption(
            f"use the {kind} backend {name}",
            "it is not enabled in this deployment, or cannot be loaded",
            f"What can be used is {', '.join(backends) or 'none'}; the log of Octavia's API says more.",
        )
    return backends[name]
