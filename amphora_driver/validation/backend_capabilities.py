# SPDX-License-Identifier: Apache-2.0
"""What a deployment has to choose from: its backends, what each of them can fulfil, and the defaults.

Invariant: plain values. Who finds the backends fills this in, so that everything decided from it is a pure function.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import Topology


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """What a compute or network backend says of itself.

    Args:
        name: its entry point.
        supports: keys of flavors and availability zones it can fulfil.
        wiring: how ports become interfaces: a compute and a network backend with the same word fit together.
    """

    name: str
    supports: frozenset[str] = frozenset()
    wiring: str = ""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What may be chosen, by name, and what is chosen where nobody says anything.

    Args:
        topologies: topologies that are served.
        compute: compute backends that are enabled.
        network: network backends that are enabled.
        process_connection_limit: the configured one, None where there is none.
        tls_minimum_version: likewise.
        tls_ciphers: likewise.
        connection_logging: likewise.
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
