# SPDX-License-Identifier: Apache-2.0
"""What an operator's flavor may say about load balancers of this provider.

Invariant: what `supported` lists, `validate` accepts (with the backend that serves it, where there are several), and
nothing else; the caller's metadata is never changed. A flavor that contradicts itself is refused when it is made, not
when somebody uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.validation import log_format
from amphora_driver.validation.backend_capabilities import Deployment
from amphora_driver.validation.metadata_schema import NOT_YET, Schema, Terms

SCHEMA = Schema("flavor", "flavor.json")
# What a compute or a network backend has to fulfil.
COMPUTE_KEYS = ("compute_flavor", "amp_image_tag")
NETWORK_KEYS = ("sriov_vip", "allow_member_sriov")
_REMEDY = "Correct the flavor."


def supported(deployment: Deployment) -> dict[str, str]:
    """Flavor keys that are served, each with a description without commas."""
    return SCHEMA.supported(_terms(deployment, {}, any_backend=True))


def validate(metadata: Mapping[str, object] | None, deployment: Deployment) -> Mapping[str, object]:
    """Check flavor metadata.

    Args:
        metadata: the flavor's expanded metadata; None or empty is fine.
        deployment: what there is to choose from.

    Raises:
        UnsupportedOption: naming the key that is unknown, ill-typed, not served, or contradicts another.
    """
    named = metadata if isinstance(metadata, Mapping) else {}
    checked = SCHEMA.validate(metadata, _terms(deployment, named))
    _check_limits(checked, deployment)
    _check_tls(checked, deployment)
    _check_logging(checked, deployment)
    _check_topology(checked)
    return checked


def _terms(deployment: Deployment, named: Mapping[str, object], *, any_backend: bool = False) -> dict[str, Terms]:
    """The terms for a flavor that names these backends, or (`any_backend`) may still name any."""
    topologies = tuple(one.value for one in Topology if one.value in deployment.topologies)
    terms = {
        "loadbalancer_topology": Terms(values=topologies),
        "compute_driver": _choice("compute", deployment.compute),
        "network_driver": _choice("network", deployment.network),
    }
    for kind, keys, backends, default in (
        ("compute", COMPUTE_KEYS, deployment.compute, deployment.default_compute),
        ("network", NETWORK_KEYS, deployment.network, deployment.default_network),
    ):
        name = named.get(f"{kind}_driver", default)
        those = [one for one in backends.values() if any_backend or one.name == name]
        for key in keys:
            if not any(key in one.supports for one in those):
                anywhere = any(key in one.supports for one in backends.values())
                refusal = f"the {kind} backend {name} does not serve it" if anywhere or kind == "compute" else NOT_YET
                terms[key] = Terms(refusal=refusal)
    named_network = named.get("network_driver", deployment.default_network)
    those = [one for one in deployment.network.values() if any_backend or one.name == named_network]
    if not any("client_address" in one.supports for one in those):
        otherwise = f"the network backend {named_network} lets no packet out that has another sender"
        terms["client_address"] = Terms(values=("hidden",), otherwise=otherwise)
    return terms


def _choice(kind: str, backends: Mapping[str, object]) -> Terms:
    return Terms(values=tuple(backends), otherwise=f"no such {kind} backend is enabled in this deployment")


def _check_limits(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    # A configured limit for each listener may well be above the flavor's for all: it is never reached then.
    one = flavor.get("connection_limit")
    all_together = flavor.get("process_connection_limit", deployment.process_connection_limit)
    if one is not None and all_together is not None and all_together < one:
        raise UnsupportedOption(
            f"let a listener have {one} connections at once (connection_limit)",
            f"its amphora takes only {all_together} (process_connection_limit)",
            _remedy(flavor, "connection_limit", "process_connection_limit"),
        )


def _check_tls(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    oldest = flavor.get("tls_minimum_version", deployment.tls_minimum_version)
    ciphers = flavor.get("tls_ciphers", deployment.tls_ciphers)
    if not {"tls_minimum_version", "tls_ciphers"} & flavor.keys() or oldest != "TLSv1.3" or not ciphers:
        return
    if not any(one.startswith("TLS_") for one in str(ciphers).split(":")):
        raise UnsupportedOption(
            f"use the TLS ciphers {str(ciphers)[:80]} (tls_ciphers)",
            "none of them is for TLS 1.3, and no older version is allowed (tls_minimum_version)",
            _remedy(flavor, "tls_ciphers", "tls_minimum_version"),
        )


def _check_logging(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    if "log_format" not in flavor:
        return
    log_format.check(str(flavor["log_format"]))
    if not flavor.get("connection_logging", deployment.connection_logging):
        raise UnsupportedOption(
            "use the flavor key 'log_format'",
            "connections are not logged (connection_logging)",
            _remedy(flavor, "log_format", "connection_logging"),
        )


def _check_topology(flavor: Mapping[str, Any]) -> None:
    if "vrrp_advert_interval" in flavor and flavor.get("loadbalancer_topology") == Topology.SINGLE:
        raise UnsupportedOption(
            "use the flavor key 'vrrp_advert_interval'",
            "a load balancer with one amphora has nobody who would take over (loadbalancer_topology)",
            _REMEDY,
        )


def _remedy(flavor: Mapping[str, object], *keys: str) -> str:
    configured = [key for key in keys if key not in flavor]
    return f"{_REMEDY[:-1]}; {configured[0]} is the configured one." if configured else _REMEDY
