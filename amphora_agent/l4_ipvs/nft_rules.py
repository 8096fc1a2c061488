# SPDX-License-Identifier: Apache-2.0
"""The rules that IPVS needs beside it: limits, and hidden addresses of clients.

Invariant: pure. It is a table as `ruleset` has them, under the same name: of two engines one has it. IPVS takes a
packet when it is delivered to the VIP (priority 98 of the input hook), behind these rules; what it makes of it leaves
as the machine's own.

    limiting        the first packet of a flow finds its virtual server, and is marked if its sender is to be hidden
    limited-ID      refuses it if there are too many
    leaving         the client's address becomes ours, where it is to be hidden
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_nftables.ruleset import Chain, Map, Table

_NUMBERS = {"UDP": 17, "SCTP": 132}
_WORDS = {4: "ip", 6: "ip6"}
_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_NEW = 0x8
HIDDEN = 0x616D
"""The mark of flows whose members are not to see the client."""


def table_of(servers: Sequence[VirtualServer]) -> Table:
    """What these need."""
    limited = [server for server in servers if server.connection_limit]
    chains = {
        "limiting": Chain(
            "type filter hook input priority -10; policy accept;",
            (
                *(
                    f"ct state {_NEW:#x} {word} daddr . meta l4proto . th dport @hidden-{version} "
                    f"ct mark set {HIDDEN:#x}"
                    for version, word in _WORDS.items()
                ),
                *(
                    f"ct state {_NEW:#x} {word} daddr . meta l4proto . th dport vmap @limits-{version}"
                    for version, word in _WORDS.items()
                ),
            ),
        ),
        "leaving": Chain(
            "type nat hook postrouting priority 100; policy accept;", (f"ct mark {HIDDEN:#x} masquerade",)
        ),
    }
    for server in limited:
        chains[f"limited-{server.id}"] = Chain(
            "", (f"ct count over {server.connection_limit} goto refused-{server.id}",)
        )
        chains[f"refused-{server.id}"] = Chain(
            "", (f'counter name "refused-{server.id}" reject with icmpx port-unreachable',)
        )
    return Table(frozenset(f"refused-{server.id}" for server in limited), dict(_maps(servers)), chains)


def _maps(servers: Sequence[VirtualServer]) -> Iterator[tuple[str, Map]]:
    for version, kind in _TYPES.items():
        key = f"{kind} . inet_proto . inet_service"
        limits = {
            where: f"goto limited-{server.id}"
            for server in servers
            if server.connection_limit
            for where in _places(server, version)
        }
        hidden = {
            where: "" for server in servers if server.client_address == "hidden" for where in _places(server, version)
        }
        yield f"limits-{version}", Map(f"type {key} : verdict;", limits)
        yield f"hidden-{version}", Map(f"type {key};", hidden, "set")


def _places(server: VirtualServer, version: int) -> Iterator[str]:
    for address in server.addresses:
        if address.version == version:
            yield f"{address} . {_NUMBERS[server.protocol]} . {server.port}"
