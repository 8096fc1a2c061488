# SPDX-License-Identifier: Apache-2.0
"""What an operator's availability zone may say about load balancers of this provider.

Invariant: what `supported` lists, `validate` accepts, and nothing else; the caller's metadata is never
changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.validation.backend_capabilities import Deployment
from amphora_driver.validation.metadata_schema import Schema, Terms

SCHEMA = Schema("availability zone", "availability_zone.json")
# What a compute backend has to fulfil.
COMPUTE_KEYS = ("compute_zone", "volume_zone", "management_network")


def supported(deployment: Deployment) -> dict[str, str]:
    """Availability zone keys that are served, each with a description without commas."""
    return SCHEMA.supported(_terms(deployment))


def validate(metadata: Mapping[str, object] | None, deployment: Deployment) -> Mapping[str, object]:
    """Check availability zone metadata.

    A zone is good for every backend that can fulfil it: which one a load balancer gets, only its flavor says.

    Args:
        metadata: the zone's expanded metadata; None or empty is fine.
        deployment: what there is to choose from.

    Raises:
        UnsupportedOption: naming the key that is unknown, ill-typed or not served.
    """
    return SCHEMA.validate(metadata, _terms(deployment))


def check_vips(metadata: Mapping[str, object] | None, vips: Iterable[Vip]) -> None:
    """Refuse VIPs on networks that the zone does not allow.

    Raises:
        UnsupportedOption: naming the network.
    """
    allowed = cast("list[str] | None", (metadata or {}).get("valid_vip_networks"))
    for vip in vips if allowed is not None else ():
        if vip.network_id not in (allowed or ()):
            raise UnsupportedOption(
                f"use the VIP {vip.address} on network {vip.network_id}",
                "the availability zone does not allow VIPs on that network (valid_vip_networks)",
                f"Choose one of {', '.join(allowed or ())}, or another availability zone.",
            )


def _terms(deployment: Deployment) -> dict[str, Terms]:
    known = frozenset().union(*(backend.supports for backend in deployment.compute.values()))
    names = ", ".join(sorted(deployment.compute))
    return {
        key: Terms(refusal=f"no compute backend of this deployment serves it ({names})")
        for key in COMPUTE_KEYS
        if key not in known
    }
