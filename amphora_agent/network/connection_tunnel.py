# SPDX-License-Identifier: Apache-2.0
"""Tunnel to the former holder of the VIPs, for packets of connections that it accepted.

Invariant: a packet of a connection that this amphora does not know goes to the partner unchanged, in a tunnel that only
the two amphorae use. A new connection stays here. The state is one interface and two nftables tables. Called in the
inner namespace.

    client ── VIP ──▶ new holder ── VXLAN (RFC 7348) ──▶ former holder

The answers go back through the tunnel (tunnel_answers), or directly where the kernel cannot do that.

A tunnel is necessary, because networks drop packets with a source address of another machine. Both amphorae have
the VIPs on the tunnel's interface: the kernel accepts packets for them and answers no ARP or neighbour request for
them. So the former holder keeps the addresses when keepalived removes them from the other interface. The new holder
accepts the first packet to an IPv6 VIP, which keepalived has announced before the kernel is ready for the address.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from amphora_agent.bundle import Host, VrrpInstance
from amphora_agent.network import nft_apply
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

NAME = "handover0"
PORT = 4789
# MAC address of both ends, so that no end has to learn it. Locally administered.
_MAC = "0a:00:00:00:00:01"
# Source address of redirected packets, whose answers this version accepts (tunnel_answers).
RETURNS = "0a:00:00:00:00:02"
_TABLE = "amphora_handover"
# Limits for known connections, and for connections of which only the SYN was seen, with their time-out. They are apart,
# because a flood of SYNs with forged sources must not displace established connections.
MOST_CONNECTIONS = 1_000_000
_MOST_BEGUN, _BEGUN_SECONDS = 262_144, 10
# linux/if_addr.h
_NODAD, _TENTATIVE = 0x02, 0x40
_READY_SECONDS, _POLL_SECONDS = 2.0, 0.001
_FOREVER = 0xFFFFFFFF
_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 1, 3, 4, 5, 8, 9, 11
_LIVING = {_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING}
WORDS = {4: ("ip", "ipv4_addr"), 6: ("ip6", "ipv6_addr")}
# Path MTU messages: RFC 1191 and RFC 4443, 3.2
_TOO_LARGE = {4: "icmp type destination-unreachable icmp code 4", 6: "icmpv6 type packet-too-big"}


@dataclass(frozen=True)
class Connection:
    """A connection of a client to a VIP."""

    client: Host
    client_port: int
    vip: Host
    port: int


def list_connections(instance: VrrpInstance) -> list[Connection]:
    """Return the open connections to VIPs of this amphora."""
    vips = {vip.ip for vip in instance.vips}
    return [found for version in (4, 6) for found in _sockets(version, {vip for vip in vips if vip.version == version})]


def _sockets(version: int, vips: Collection[Host]) -> Iterator[Connection]:
    """Read /proc/net/tcp (proc(5))."""
    if not vips:
        return
    with Path(f"/proc/thread-self/net/tcp{'' if version == 4 else '6'}").open(encoding="ascii") as lines:
        next(lines)
        for line in lines:
            _, local, remote, word, *_, inode = line.split(None, 10)[:10]
            state = int(word, 16)
            # FIN_WAIT_2 without a process: the client has received everything. The kernel only waits for the FIN, for
            # a minute, because the FIN may have been lost when the VIPs moved.
            if state in _LIVING and not (state == _FIN_WAIT_2 and inode == "0"):
                vip, port = _endpoint(local)
                if vip in vips:
                    yield Connection(*_endpoint(remote), vip, port)


def _endpoint(text: str) -> tuple[Host, int]:
    """Parse an address of /proc/net/tcp: words of 32 bits in host byte order."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)), int(port, 16)


# -- the tunnel -----------------------------------------------------------------------------------------------------


def create_tunnel(instance: VrrpInstance) -> None:
    """Create the tunnel to the partner. A tunnel to another peer is removed, with its redirect rules.

    Raises:
        NetlinkError: the kernel has no VXLAN, for example.
        FirewallError: the redirect rules cannot be removed.
    """
    local, remote = instance.vrrp.local.address, instance.vrrp.peers[0].address
    more = {"vxlan_local": str(local), "vxlan_group": str(remote)}
    if local.version == 6:
        more = {f"{key}6": value for key, value in more.items()}
    with IPRoute() as route:
        found = route.link_lookup(ifname=NAME)
        if found and _peer(route, found[0]) != remote:
            stop_redirect()  # the rules contain the interface index, which changes with the new tunnel
            route.link("del", index=found[0])
            found = ()
        if not found:
            route.link(
                "add",
                ifname=NAME,
                kind="vxlan",
                vxlan_id=instance.vrrp.router_id,
                vxlan_port=PORT,
                vxlan_learning=0,
                address=_MAC,
                mtu=instance.mtu,
                **more,
            )
        route.link("set", index=_index(route), state="up")


def add_vips(instance: VrrpInstance) -> None:
    """Add the VIPs to the tunnel's interface; returns when the kernel accepts packets to them.

    Raises:
        NetlinkError: the kernel refused an address, or an address was not ready in time.
    """
    with IPRoute() as route:
        index = _index(route)
        for vip in instance.vips:
            more = {"flags": _NODAD, "preferred_lft": 0, "valid_lft": _FOREVER} if vip.version == 6 else {}
            route.addr("replace", index=index, address=str(vip.ip), prefixlen=vip.max_prefixlen, **more)
        deadline = time.monotonic() + _READY_SECONDS
        # An IPv6 address is tentative for a moment, even without duplicate address detection.
        while any(message["flags"] & _TENTATIVE for message in route.get_addr(family=socket.AF_INET6, index=index)):
            if time.monotonic() > deadline:
                raise NetlinkError(errno.ETIMEDOUT, "an IPv6 address is not ready")
            time.sleep(_POLL_SECONDS)


def tunnel_peer() -> Host | None:
    """Return the address of the far end of the tunnel; None without a tunnel."""
    with IPRoute() as route:
        indexes = route.link_lookup(ifname=NAME)
        return _peer(route, indexes[0]) if indexes else None


def _peer(route: IPRoute, index: int) -> Host | None:
    data = route.get_links(index)[0].get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA")
    peer = data and (data.get_attr("IFLA_VXLAN_GROUP") or data.get_attr("IFLA_VXLAN_GROUP6"))
    return ipaddress.ip_address(peer) if peer else None


def remove_tunnel() -> None:
    """Remove the tunnel, and with it the VIPs on its interface."""
    with IPRoute() as route:
        for index in route.link_lookup(ifname=NAME):
            route.link("del", index=index)


def _index(route: IPRoute) -> int:
    return int(route.link_lookup(ifname=NAME)[0])


# -- the rules ------------------------------------------------------------------------------------------------------


def add_guard(instance: VrrpInstance) -> None:
    """Drop tunnel packets that do not come from the partner."""
    nft_apply.execute(_delete_table("inet") + guard_rules(instance))


def start_redirect(instance: VrrpInstance) -> None:
    """Redirect packets to the partner, except those of connections that are open or begin here."""
    rules = redirect_rules(instance, list_connections(instance), _read_mac(instance.vrrp.interface))
    nft_apply.execute(_delete_table("netdev") + rules)


def _read_mac(interface: str) -> str:
    with IPRoute() as route:
        return str(route.get_links(*route.link_lookup(ifname=interface))[0].get_attr("IFLA_ADDRESS"))


def stop_redirect() -> None:
    """Redirect nothing any more."""
    _remove("netdev")


def remove_guard() -> None:
    """Remove the guard of the tunnel. Called after the tunnel is removed."""
    _remove("inet")


def _remove(family: str) -> None:
    """Delete the table if it exists. Without a table neither libnftables nor nf_tables is needed."""
    if nft_apply.table_exists(family, _TABLE):
        nft_apply.execute(_delete_table(family))


def _delete_table(family: str) -> str:
    return f"table {family} {_TABLE}\ndelete table {family} {_TABLE}\n"


def guard_rules(instance: VrrpInstance) -> str:
    """Return the table that accepts tunnel packets from the partner only. Pure."""
    word = WORDS[instance.vrrp.local.address.version][0]
    return (
        f"table inet {_TABLE} {{\n chain arriving {{\n  type filter hook input priority -1; policy accept;\n"
        f"  udp dport {PORT} {word} saddr {instance.vrrp.peers[0].address} accept\n  udp dport {PORT} drop\n }}\n}}\n"
    )


def redirect_rules(instance: VrrpInstance, known: Collection[Connection], mac: str) -> str:
    """Return the table that redirects packets and sends their answers. Pure.

    Answers that return through the tunnel leave with the MAC address of this amphora.

    There is no connection tracking; the table remembers only that a connection began here. It remembers a SYN for some
    seconds, and the connection when the client has sent a second packet. If there is no room for a SYN, the partner
    gets the whole connection and serves it while it can: if only the SYN stayed here, later packets would be redirected
    and answered with a reset. A connection that finds no room later stays here until it is silent.
    """
    device = instance.vrrp.interface
    sets, chain, returning = [], [], []
    for version, (word, kind) in WORDS.items():
        vips = ", ".join(str(vip.ip) for vip in instance.vips if vip.version == version)
        if not vips:
            continue
        elements = ", ".join(
            f"{one.client} . {one.client_port} . {one.vip} . {one.port}" for one in known if one.vip.version == version
        )
        flows = f"  type {kind} . inet_service . {kind} . inet_service\n"
        sets.append(
            f" set own{version} {{\n{flows}  size {MOST_CONNECTIONS}\n  flags dynamic\n"
            + (f"  elements = {{ {elements} }}\n" if elements else "")
            + f" }}\n set begun{version} {{\n{flows}  size {_MOST_BEGUN}\n  flags dynamic, timeout\n"
            f"  timeout {_BEGUN_SECONDS}s\n }}\n"
        )
        flow = f"{word} saddr . tcp sport . {word} daddr . tcp dport"
        to_vip = f"{word} daddr {{ {vips} }}"
        own, begun = f"@own{version}", f"@begun{version}"
        chain += [
            f"  {to_vip} meta l4proto tcp {flow} {own} accept\n",
            f"  {to_vip} tcp flags & (syn | ack) == syn update {begun} {{ {flow} }} accept\n",
            f"  {to_vip} meta l4proto tcp {flow} {begun} add {own} {{ {flow} }} accept\n",
            f"  {to_vip} meta l4proto tcp {flow} {begun} update {begun} {{ {flow} }} accept\n",
            f'  {to_vip} meta l4proto tcp ether saddr set {RETURNS} ether daddr set {_MAC} fwd to "{NAME}"\n',
            # The message may belong to a connection of either amphora, so both get it.
            f'  {to_vip} {_TOO_LARGE[version]} ether daddr set {_MAC} dup to "{NAME}"\n',
        ]
        returning.append(f'  {word} saddr {{ {vips} }} meta l4proto tcp ether saddr set {mac} fwd to "{device}"\n')
    chains = "".join(
        f' chain {name} {{\n  type filter hook ingress device "{on}" priority 0; policy accept;\n{"".join(rules)} }}\n'
        for name, on, rules in (("arriving", device, chain), ("returning", NAME, returning))
    )
    return f"table netdev {_TABLE} {{\n{''.join(sets)}{chains}}}\n"
