# SPDX-License-Identifier: Apache-2.0
"""What the forwarding engine supports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from amphora_agent.errors import ConfigurationRefused
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_nftables.conntrack_marks import MAX_MEMBERS, MAX_SERVERS


def check_servers(servers: Sequence[VirtualServer]) -> None:
    """Refuse virtual servers that the rules do not support; raises ConfigurationRefused."""
    if len(servers) > MAX_SERVERS:
        raise ConfigurationRefused(
            "serve the UDP and SCTP listeners",
            f"the load balancer has {len(servers)} of them, and an amphora serves at most {MAX_SERVERS}",
        )
    for server in servers:
        if server.algorithm == "LEAST_CONNECTIONS" and server.persistence is not None:
            raise ConfigurationRefused(
                f"serve listener {server.id}",
                "with session persistence, the client's address selects the member, so LEAST_CONNECTIONS has no effect",
                "Choose the algorithm SOURCE_IP, or remove the session persistence.",
                object_id=server.id,
            )
        if len(server.members) > MAX_MEMBERS:
            raise ConfigurationRefused(
                f"serve listener {server.id}", f"it has more than {MAX_MEMBERS} members", object_id=server.id
            )
