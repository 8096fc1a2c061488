# SPDX-License-Identifier: Apache-2.0
"""Selection of the profile of a load balancer, at its creation and at a resize.

Invariant: the flavor overrides the configuration. The load balancer keeps its backends for its lifetime, and its
topology and all values of the flavor until a resize. A value that the flavor does not set is None and follows the
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.validation import availability_zones, flavors
from amphora_driver.validation.backend_capabilities import Backend, Deployment
from amphora_driver.validation.unsupported import NOT_SUPPORTED

_TIMEOUTS = ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tunnel")
_LIMITS = ("connection_limit", "process_connection_limit", "process_threads", "warm_spares")
_WHOLE_NUMBERS = (*_TIMEOUTS, *flavors.TIMEOUT_LIMITS, "timeout_http_request", *_LIMITS)
_TLS = ("tls_minimum_version", "tls_ciphers")
_SAME_NAME = ("compute_flavor", *_TLS, "connection_logging", "log_format", "client_address", *flavors.NETWORK_KEYS)


# A change of these values needs new machines or ports. Other changes need only a push to the amphorae.
_OF_AMPHORAE = ("topology", "compute_flavor", "image_tag", *availability_zones.COMPUTE_KEYS, *flavors.NETWORK_KEYS)


def choose_profile(
    flavor: Mapping[str, object] | None,
    zone: Mapping[str, object] | None,
    deployment: Deployment,
    *,
    vip_network: str | None = None,
) -> Profile:
    """Return the profile of a load balancer with the metadata of its flavor and its availability zone.

    Raise UnsupportedOption for an unsupported value or a contradiction.

    Args:
        vip_network: the network backend that has allocated the VIPs before the flavor is known.
    """
    wanted: Mapping[str, Any] = flavors.validate_metadata(flavor, deployment)
    zone_values: Mapping[str, Any] = availability_zones.validate_metadata(zone, deployment)
    compute = _backend("compute", wanted.get("compute_driver", deployment.default_compute), deployment.compute)
    allocator = vip_network or deployment.default_network
    network = _backend("network", wanted.get("network_driver", allocator), deployment.network)
    if network.name != allocator:
        raise UnsupportedOption(
            f"use the network backend {network.name} (flavor key network_driver)",
            f"the network backend {allocator} has allocated the VIP before the flavor is known",
            f"Use another flavor, or ask the operator to set [amp_network] driver = {network.name}.",
        )
    if wanted.get("client_address") == "preserved" and "client_address" not in network.supports:
        raise UnsupportedOption(
            "preserve the addresses of clients (flavor key client_address)",
            f"the network backend {network.name} drops packets with a source address that is not the port's",
            "Use another flavor.",
        )
    if compute.wiring != network.wiring:
        raise UnsupportedOption(
            f"boot amphorae with the compute backend {compute.name}",
            f"it cannot attach ports of the network backend {network.name}",
            "Use another flavor.",
        )
    for key in availability_zones.COMPUTE_KEYS:
        if key in zone_values and key not in compute.supports:
            raise UnsupportedOption(
                f"use the availability zone key '{key}'",
                f"the compute backend {compute.name} does not support it",
                "Use another availability zone, or a flavor with another compute backend.",
            )
    chosen: dict[str, Any] = {
        **{key: zone_values.get(key) for key in availability_zones.COMPUTE_KEYS},
        "compute_zones": None if (zones := zone_values.get("compute_zones")) is None else tuple(zones),
        # JSON may contain a whole number as 5.0, so the values are converted to int.
        **{key: int(wanted[key]) for key in _WHOLE_NUMBERS if key in wanted},
        **{key: wanted[key] for key in _SAME_NAME if key in wanted},
        **{key: tuple(wanted[key]) for key in flavors.LOG_KEYS if key in wanted},
    }
    return Profile(
        topology=_topology(wanted.get("loadbalancer_topology"), deployment),
        compute=compute.name,
        network=network.name,
        image_tag=wanted.get("amp_image_tag"),
        vrrp_advert_interval=float(interval) if (interval := wanted.get("vrrp_advert_interval")) else None,
        **chosen,
    )


def choose_resized_profile(
    former: Profile,
    flavor: Mapping[str, object] | None,
    zone: Mapping[str, object] | None,
    deployment: Deployment,
) -> Profile:
    """Return the profile of an existing load balancer with another flavor or availability zone.

    The metadata replace the former metadata completely. Topology and backends are the exception: without a value in
    the flavor, the load balancer keeps the present ones instead of the configured defaults.

    Raise UnsupportedOption as `choose_profile` does, and for another backend.
    """
    present = {
        "compute": former.compute or deployment.default_compute,
        "network": former.network or deployment.default_network,
    }
    for kind, name in present.items():
        named = flavor.get(f"{kind}_driver", name) if isinstance(flavor, Mapping) else name
        if named != name:
            raise UnsupportedOption(
                f"change the {kind} backend to {named} (flavor key {kind}_driver)",
                f"the load balancer uses the {kind} backend {name}, and keeps it for its lifetime",
                f"Remove the key {kind}_driver, or create a load balancer.",
            )
    kept = msgspec.structs.replace(
        deployment,
        default_compute=present["compute"],
        default_network=present["network"],
        default_topology=former.topology,
    )
    return choose_profile(flavor, zone, kept, vip_network=present["network"])


def changed_values(former: Profile, new: Profile) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two profiles: former and new value, by field."""
    pairs = {name: (getattr(former, name), getattr(new, name)) for name in Profile.__struct_fields__}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def needs_new_amphorae(former: Profile, new: Profile) -> bool:
    """Return whether the change of a profile needs other machines or ports."""
    return not changed_values(former, new).keys().isdisjoint(_OF_AMPHORAE)


def _topology(name: str | None, deployment: Deployment) -> Topology:
    chosen = Topology(name) if name else deployment.default_topology
    if chosen.value not in deployment.topologies:
        raise UnsupportedOption(
            f"use the configured topology {chosen}",
            NOT_SUPPORTED,
            f"An operator can change [amp_controller] loadbalancer_topology to {' or '.join(deployment.topologies)}.",
        )
    return chosen


def _backend(kind: str, name: str, backends: Mapping[str, Backend]) -> Backend:
    # The operator may have disabled the backend of an existing load balancer.
    if name not in backends:
        raise UnsupportedOption(
            f"use the {kind} backend {name}",
            "it is not enabled in this deployment, or cannot be loaded",
            f"Enabled backends: {', '.join(backends) or 'none'}. The log of octavia-api has the details.",
        )
    return backends[name]
