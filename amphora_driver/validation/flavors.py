# SPDX-License-Identifier: Apache-2.0
"""Validation of the metadata of flavors.

Invariant: `validate_metadata` accepts exactly the keys that `list_supported_keys` returns, if the flavor names a
backend that supports them, and never changes the caller's metadata. An operator cannot create a flavor with a
contradiction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from amphora_agent.log_settings import ENCRYPTED, parse_endpoint
from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.validation import log_format
from amphora_driver.validation.backend_capabilities import Deployment
from amphora_driver.validation.metadata_schema import KeySupport, MetadataSchema
from amphora_driver.validation.unsupported import NOT_SUPPORTED

SCHEMA = MetadataSchema("flavor", "flavor.json")
# Keys that need support in the compute backend (COMPUTE_KEYS) or in the network backend (NETWORK_KEYS).
COMPUTE_KEYS = ("compute_flavor", "amp_image_tag")
NETWORK_KEYS = ("sriov_vip", "allow_member_sriov")
LOG_KEYS = ("admin_log_targets", "tenant_log_targets")
# Each of these time-outs has the keys NAME_minimum and NAME_maximum, which limit the values of users.
LIMITED_TIMEOUTS = ("timeout_client_data", "timeout_member_connect", "timeout_member_data")
TIMEOUT_LIMITS = tuple(f"{name}_{end}" for name in LIMITED_TIMEOUTS for end in ("minimum", "maximum"))
_REMEDY = "Correct the flavor."


def list_supported_keys(deployment: Deployment) -> dict[str, str]:
    """Return the supported keys of flavors, each with a description without commas."""
    return SCHEMA.describe_supported(_key_support(deployment, {}, any_backend=True))


def validate_metadata(metadata: Mapping[str, object] | None, deployment: Deployment) -> Mapping[str, object]:
    """Check the expanded metadata of a flavor.

    Raise UnsupportedOption for an unknown or unsupported key, an invalid value, or a contradiction.
    """
    named = metadata if isinstance(metadata, Mapping) else {}
    checked = SCHEMA.validate(metadata, _key_support(deployment, named))
    _check_limits(checked, deployment)
    _check_timeouts(checked)
    _check_tls(checked, deployment)
    _check_logging(checked, deployment)
    _check_log_targets(checked, deployment)
    if "vrrp_advert_interval" in checked and checked.get("loadbalancer_topology") == Topology.SINGLE:
        raise UnsupportedOption(
            "use the flavor key 'vrrp_advert_interval'",
            "a load balancer with one amphora has no standby (loadbalancer_topology)",
            _REMEDY,
        )
    return checked


def _key_support(
    deployment: Deployment, named: Mapping[str, object], *, any_backend: bool = False
) -> dict[str, KeySupport]:
    """Return the support of the keys for the named backends, or (`any_backend`) for any enabled backend."""
    topologies = tuple(one.value for one in Topology if one.value in deployment.topologies)
    support = {"loadbalancer_topology": KeySupport(values=topologies)}
    for kind, keys, backends, default in (
        ("compute", COMPUTE_KEYS, deployment.compute, deployment.default_compute),
        ("network", NETWORK_KEYS, deployment.network, deployment.default_network),
    ):
        otherwise = f"no {kind} backend of this name is enabled in this deployment"
        support[f"{kind}_driver"] = KeySupport(values=tuple(backends), otherwise=otherwise)
        name = named.get(f"{kind}_driver", default)
        chosen: set[str] = set().union(*(one.supports for one in backends.values() if any_backend or one.name == name))
        everything: set[str] = set().union(*(one.supports for one in backends.values()))
        for key in keys:
            if key not in chosen:
                anywhere = key in everything or kind == "compute"
                refusal = f"the {kind} backend {name} does not support it" if anywhere else NOT_SUPPORTED
                support[key] = KeySupport(refusal=refusal)
        if kind == "network" and "client_address" not in chosen:
            otherwise = f"the network backend {name} drops packets with a source address that is not the port's"
            support["client_address"] = KeySupport(values=("hidden",), otherwise=otherwise)
    return support


def _check_limits(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    # A flavor's connection_limit must not exceed the connection limit of the whole amphora. The configured default
    # needs no check, because HAProxy applies the lower of both limits.
    one = flavor.get("connection_limit")
    all_together = flavor.get("process_connection_limit", deployment.process_connection_limit)
    if one is not None and all_together is not None and all_together < one:
        raise UnsupportedOption(
            f"allow {one} concurrent connections to a listener (connection_limit)",
            f"its amphora accepts only {all_together} (process_connection_limit)",
            _remedy(flavor, "connection_limit", "process_connection_limit"),
        )


def _check_timeouts(flavor: Mapping[str, Any]) -> None:
    for name in LIMITED_TIMEOUTS:
        present = [key for key in (f"{name}_minimum", name, f"{name}_maximum") if key in flavor]
        for lower, upper in itertools.pairwise(present):
            if flavor[lower] > flavor[upper]:
                raise UnsupportedOption(
                    f"use the flavor key '{lower}' with {flavor[lower]}",
                    f"it is more than the value of '{upper}', {flavor[upper]}",
                    _REMEDY,
                )


def _check_tls(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    oldest = flavor.get("tls_minimum_version", deployment.tls_minimum_version)
    ciphers = flavor.get("tls_ciphers", deployment.tls_ciphers)
    if not {"tls_minimum_version", "tls_ciphers"} & flavor.keys() or oldest != "TLSv1.3" or not ciphers:
        return
    if not any(one.startswith("TLS_") for one in str(ciphers).split(":")):
        raise UnsupportedOption(
            f"use the TLS ciphers {str(ciphers)[:80]} (tls_ciphers)",
            "none of them is a cipher of TLS 1.3, and older versions are not allowed (tls_minimum_version)",
            _remedy(flavor, "tls_ciphers", "tls_minimum_version"),
        )


def _check_logging(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    if "log_format" not in flavor:
        return
    log_format.check_log_format(str(flavor["log_format"]))
    if not flavor.get("connection_logging", deployment.connection_logging):
        raise UnsupportedOption(
            "use the flavor key 'log_format'",
            "connections are not logged (connection_logging)",
            _remedy(flavor, "log_format", "connection_logging"),
        )


def _check_log_targets(flavor: Mapping[str, Any], deployment: Deployment) -> None:
    for key in LOG_KEYS:
        known: set[str] = set()
        for url in flavor.get(key, ()):
            try:
                endpoint = parse_endpoint(url)
            except ValueError as error:
                raise UnsupportedOption(f"use the flavor key '{key}'", str(error), _REMEDY) from error
            if str(endpoint) in known:
                raise UnsupportedOption(f"use the flavor key '{key}'", f"it has the target {endpoint} twice", _REMEDY)
            known.add(str(endpoint))
            if endpoint.scheme in ENCRYPTED and not deployment.log_authorities:
                raise UnsupportedOption(
                    f"use the flavor key '{key}'",
                    f"the deployment has no CA certificate for {endpoint} ([amp_logs] ca_certificate)",
                    _REMEDY,
                )
    if flavor.get("tenant_log_targets") and not flavor.get("connection_logging", deployment.connection_logging):
        raise UnsupportedOption(
            "use the flavor key 'tenant_log_targets'",
            "connections are not logged (connection_logging)",
            _remedy(flavor, "tenant_log_targets", "connection_logging"),
        )


def _remedy(flavor: Mapping[str, object], *keys: str) -> str:
    configured = [key for key in keys if key not in flavor]
    return f"{_REMEDY[:-1]}; the value of {configured[0]} comes from the configuration." if configured else _REMEDY
