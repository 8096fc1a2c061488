# SPDX-License-Identifier: Apache-2.0
"""Validation of the metadata of availability zones.

Invariant: `validate_metadata` accepts exactly the keys that `list_supported_keys` returns, and never changes the
caller's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.validation.backend_capabilities import Deployment
from amphora_driver.validation.metadata_schema import KeySupport, MetadataSchema

SCHEMA = MetadataSchema("availability zone", "availability_zone.json")
COMPUTE_KEYS = ("compute_zone", "compute_zones", "volume_zone", "management_network")
"""Keys that the compute backend must support."""


def list_supported_keys(deployment: Deployment) -> dict[str, str]:
    """Return the supported keys of availability zones, each with a description without commas."""
    return SCHEMA.describe_supported(_key_support(deployment))


def validate_metadata(metadata: Mapping[str, object] | None, deployment: Deployment) -> Mapping[str, object]:
    """Check the expanded metadata of an availability zone. Raise UnsupportedOption with the refused key.

    At least one compute backend must support a key. The flavor, not the zone, selects the backend.
    """
    return SCHEMA.validate(metadata, _key_support(deployment))


def check_zone_vips(metadata: Mapping[str, object] | None, vips: Iterable[Vip]) -> None:
    """Refuse VIPs on networks that the zone does not allow. Raise UnsupportedOption with the network."""
    allowed = cast("list[str] | None", (metadata or {}).get("valid_vip_networks"))
    if allowed is None:
        return
    for vip in vips:
        if vip.network_id not in allowed:
            raise UnsupportedOption(
                f"use the VIP {vip.address} on network {vip.network_id}",
                "the availability zone does not allow VIPs on this network (valid_vip_networks)",
                f"Use one of the networks {', '.join(allowed)}, or another availability zone.",
            )


def _key_support(deployment: Deployment) -> dict[str, KeySupport]:
    known = frozenset().union(*(backend.supports for backend in deployment.compute.values()))
    names = ", ".join(sorted(deployment.compute))
    return {
        key: KeySupport(refusal=f"no compute backend of this deployment supports it ({names})")
        for key in COMPUTE_KEYS
        if key not in known
    }
