# SPDX-License-Identifier: Apache-2.0
"""Answers of the former holder of the VIPs through the tunnel. Called in the inner namespace.

Invariant: an answer takes the way of the client's packets. While these arrive through the tunnel, the answer leaves
through the tunnel, and the new holder sends it on. When they arrive directly again, the answer leaves directly.

    client ── VIP ──▶ new holder ── VXLAN ──▶ former holder
    client ◀── VIP ── new holder ◀── VXLAN ── former holder

A stateful security group drops packets of a connection of which it sees one direction only. With this way both
directions pass the port of the new holder. The complete frame goes through the tunnel, with the MAC address of the
client or of its router. The new holder replaces the source address by its own, which port security expects.

The new holder marks the packets that it redirects with the source address `RETURNS`. A new holder of an earlier version
does not, and receives no answers.
"""

from __future__ import annotations

from amphora_agent.bundle import VrrpInstance
from amphora_agent.network import libnftables, nft_apply
from amphora_agent.network.connection_tunnel import MOST_CONNECTIONS, NAME, RETURNS, WORDS

_TABLE = "amphora_answers"


def start_answers(instance: VrrpInstance) -> None:
    """Send answers through the tunnel, for the connections whose packets arrive through it.

    Raises:
        FirewallError: the kernel has no egress hook (Linux 5.16), for example.
    """
    nft_apply.execute(_delete_table() + answer_rules(instance))


def stop_answers() -> None:
    """Send all answers directly. Called before the tunnel is removed."""
    if libnftables.table_exists("netdev", _TABLE):
        nft_apply.execute(_delete_table())


def _delete_table() -> str:
    return f"table netdev {_TABLE}\ndelete table netdev {_TABLE}\n"


def answer_rules(instance: VrrpInstance) -> str:
    """Return the table of the former holder."""
    device = instance.vrrp.interface
    sets, tunnelled, direct, leaving = [], [], [], []
    for version, (word, kind) in WORDS.items():
        vips = ", ".join(str(vip.ip) for vip in instance.vips if vip.version == version)
        if not vips:
            continue
        sets.append(
            f" set answered{version} {{\n  type {kind} . inet_service . {kind} . inet_service\n"
            f"  size {MOST_CONNECTIONS}\n  flags dynamic\n }}\n"
        )
        answered, to_vip = f"@answered{version}", f"{word} daddr {{ {vips} }} meta l4proto tcp"
        flow = f"{word} saddr . tcp sport . {word} daddr . tcp dport"
        reverse = f"{word} daddr . tcp dport . {word} saddr . tcp sport"
        tunnelled.append(f"  ether saddr {RETURNS} {to_vip} update {answered} {{ {flow} }}\n")
        direct.append(f"  {to_vip} delete {answered} {{ {flow} }}\n")
        leaving.append(f'  {word} saddr {{ {vips} }} {reverse} {answered} fwd to "{NAME}"\n')
    chains = (
        ("tunnelled", "ingress", NAME, 0, tunnelled),
        # If the VIPs move back, a redirect rule with priority 0 sends packets to the partner. Priority -1 lets the
        # chain "direct" see these packets first.
        ("direct", "ingress", device, -1, direct),
        ("leaving", "egress", device, 0, leaving),
    )
    text = "".join(
        f' chain {name} {{\n  type filter hook {hook} device "{on}" priority {priority}; policy accept;\n'
        f"{''.join(rules)} }}\n"
        for name, hook, on, priority, rules in chains
    )
    return f"table netdev {_TABLE} {{\n{''.join(sets)}{text}}}\n"
