# SPDX-License-Identifier: Apache-2.0
"""The backends of a deployment, their capabilities, and the configured defaults.

Invariant: `plugins` sets these plain values, so all decisions that use the values are pure functions.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import Topology


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a compute or network backend: supported keys of flavors and availability zones.

    `wiring` is the method by which ports become interfaces. A compute and a network backend need the same value.
    """

    name: str
    supports: frozenset[str] = frozenset()
    wiring: str = ""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Supported topologies, enabled backends by name, and options of [amp_haproxy] (None if not set).

    `log_authorities`: the deployment has a CA certificate for log targets.
    """

    topologies: tuple[str, ...]
    compute: dict[str, Backend]
    network: dict[str, Backend]
    default_topology: Topology
    default_compute: str
    default_network: str
    process_connection_limit: int | None = None
    tls_minimum_version: str | None = None
    tls_ciphers: str | None = None
    connection_logging: bool = True
    log_authorities: bool = False
