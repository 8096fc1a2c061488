# SPDX-License-Identifier: Apache-2.0
"""Tunnel to the former holder of the VIPs, for packets of connections that it accepted.

Invariant: a packet of a connection that this amphora does not know goes to the partner unchanged, in a tunnel that only
the two amphorae use. A new connection stays here. The state is one interface and two nftables tables. All functions run
in the inner namespace.

    client ── VIP ──▶ new holder ── VXLAN (RFC 7348) ──▶ former holder

The answers go back through the tunnel (tunnel_answers), or directly where the kernel cannot do that.

A tunnel is necessary, because networks drop packets with a source address of another machine. Both amphorae have the
VIPs on the tunnel's interface. For these addresses the kernel accepts packets and answers no ARP or neighbour request.
So the former holder keeps the addresses when keepalived removes them from the other interface. The new holder accepts
the first packet to an IPv6 VIP, which keepalived has announced before the kernel is ready for the address.
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
from amphora_agent.network import libnftables, nft_apply
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError
from amphora_agent.services.template_files import load_template

NAME = "handover0"
PORT = 4789
# Both ends of the hand-over tunnel use this locally administered MAC address, so that no end has to learn the address
# of the other end.
_MAC = "0a:00:00:00:00:01"
# Source MAC address of packets that the new VIP holder redirects through the tunnel. The former holder sends their
# answers through the tunnel, too (tunnel_answers).
RETURNS = "0a:00:00:00:00:02"
_TABLE = "amphora_handover"
# Maximum numbers of established connections, and of connections with a SYN only. Separate limits prevent a flood of
# SYNs from displacing established connections.
MOST_CONNECTIONS = 1_000_000
_MOST_BEGUN, _BEGUN_SECONDS = 262_144, 10
_NODAD, _TENTATIVE = 0x02, 0x40
_READY_SECONDS, _POLL_SECONDS = 2.0, 0.001
_FOREVER = 0xFFFFFFFF
_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 1, 3, 4, 5, 8, 9, 11
_LIVING = {_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING}
WORDS = {4: ("ip", "ipv4_addr"), 6: ("ip6", "ipv6_addr")}
# ICMP messages of a router about a packet that is larger than a link's MTU, which path MTU discovery needs (RFC 1191;
# RFC 4443, section 3.2).
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
            # A connection in FIN_WAIT_2 without a process has no more data for the client, so it counts as ended.
            if state in _LIVING and not (state == _FIN_WAIT_2 and inode == "0"):
                vip, port = _endpoint(local)
                if vip in vips:
                    yield Connection(*_endpoint(remote), vip, port)


def _endpoint(text: str) -> tuple[Host, int]:
    """Parse an address of /proc/net/tcp: words of 32 bits in host byte order."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)), int(port, 16)


def create_tunnel(instance: VrrpInstance) -> None:
    """Create the tunnel to the partner in place of another peer's; raises NetlinkError or FirewallError."""
    local, remote = instance.vrrp.local.address, instance.vrrp.peers[0].address
    ends = {"vxlan_local": str(local), "vxlan_group": str(remote)}
    if local.version == 6:
        ends = {f"{key}6": value for key, value in ends.items()}
    tunnel = {"vxlan_id": instance.vrrp.router_id, "vxlan_port": PORT, "vxlan_learning": 0, **ends}
    with IPRoute() as route:
        found = route.link_lookup(ifname=NAME)
        if found and _peer(route, found[0]) != remote:
            # The redirect rules contain the interface index of the old tunnel, so they are removed before the tunnel is
            # replaced.
            stop_redirect()
            route.link("del", index=found[0])
            found = ()
        if not found:
            route.link("add", ifname=NAME, kind="vxlan", address=_MAC, mtu=instance.mtu, **tunnel)
        route.link("set", index=_index(route), state="up")


def add_vips(instance: VrrpInstance) -> None:
    """Add the VIPs to the tunnel's interface, and wait until the kernel is ready; raises NetlinkError."""
    with IPRoute() as route:
        index = _index(route)
        for vip in instance.vips:
            more = {"flags": _NODAD, "preferred_lft": 0, "valid_lft": _FOREVER} if vip.version == 6 else {}
            route.addr("replace", index=index, address=str(vip.ip), prefixlen=vip.max_prefixlen, **more)
        deadline = time.monotonic() + _READY_SECONDS
        # A new IPv6 address is tentative and unusable for a moment, even without duplicate address detection.
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
    """Remove the redirect rules."""
    _remove("netdev")


def remove_guard() -> None:
    """Remove the guard of the tunnel, after the removal of the tunnel."""
    _remove("inet")


def _remove(family: str) -> None:
    if libnftables.table_exists(family, _TABLE):
        nft_apply.execute(_delete_table(family))


def _delete_table(family: str) -> str:
    return f"table {family} {_TABLE}\ndelete table {family} {_TABLE}\n"


def guard_rules(instance: VrrpInstance) -> str:
    """Return the table that accepts tunnel packets from the partner only."""
    word = WORDS[instance.vrrp.local.address.version][0]
    return (
        f"table inet {_TABLE} {{\n chain arriving {{\n  type filter hook input priority -1; policy accept;\n"
        f"  udp dport {PORT} {word} saddr {instance.vrrp.peers[0].address} accept\n  udp dport {PORT} drop\n }}\n}}\n"
    )


def redirect_rules(instance: VrrpInstance, known: Collection[Connection], mac: str) -> str:
    """Return the table that redirects packets and sends their answers.

    Answers that return through the tunnel leave with this MAC address, the one of this amphora.

    The table remembers a SYN for some seconds, and the connection when the client has sent a second packet. If there is
    no room for a SYN, the partner gets the whole connection and serves it while it can. If only the SYN stayed here,
    the table would redirect later packets, and the partner would answer with a reset. A connection that finds no room
    later stays here until it is silent.
    """
    families = [
        {
            "version": version,
            "word": word,
            "type": kind,
            "vips": vips,
            "too_large": _TOO_LARGE[version],
            "elements": ", ".join(
                f"{one.client} . {one.client_port} . {one.vip} . {one.port}"
                for one in known
                if one.vip.version == version
            ),
        }
        for version, (word, kind) in WORDS.items()
        if (vips := ", ".join(str(vip.ip) for vip in instance.vips if vip.version == version))
    ]
    return load_template("handover.nft.j2").render(
        families=families,
        table=_TABLE,
        device=instance.vrrp.interface,
        tunnel=NAME,
        tunnel_mac=_MAC,
        redirected_mac=RETURNS,
        own_mac=mac,
        most_connections=MOST_CONNECTIONS,
        most_begun=_MOST_BEGUN,
        begun_seconds=_BEGUN_SECONDS,
    )
