# SPDX-License-Identifier: Apache-2.0
"""The way that packets of a connection take to the amphora that has it, after its VIP has moved to another one.

Invariant: what belongs to no connection of this amphora's own goes to the partner, unchanged, in a tunnel that only the
two use; what begins a connection stays. Everything here is one interface and two nftables tables, and gone with them.
Called in the inner namespace.

    client ── VIP ──▶ new holder ── VXLAN (RFC 7348) ──▶ former holder ── as the VIP ──▶ client

A tunnel, because networks drop packets whose sender is not one of the machine's own addresses. Both have the VIPs on
the tunnel's interface: they are the machine's own, and it answers no neighbour's question for them. So the former
holder keeps them when keepalived takes them off the other interface; and the new one takes the first packet to them,
where the kernel needs a while with an address of IPv6 that keepalived has added, and has announced already.
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

from amphora_agent.bundle import Host
from amphora_agent.keepalived.configuration import Pair
from amphora_agent.network import nft_apply
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

NAME = "handover0"
PORT = 4789
# Both ends have it: who sends does not have to learn whom he sends to. Locally administered.
_MAC = "0a:00:00:00:00:01"
_TABLE = "amphora_handover"
# Connections that are known to be here; and those of which there was a SYN and no more, with the seconds for which more
# of them is waited for. Anybody can send a SYN in anybody's name: a flood must not take the room of those that go on.
_MOST_CONNECTIONS = 1_000_000
_MOST_BEGUN, _BEGUN_SECONDS = 262_144, 10
# linux/if_addr.h
_NODAD, _TENTATIVE = 0x02, 0x40
_READY_SECONDS, _POLL_SECONDS = 2.0, 0.001
_FOREVER = 0xFFFFFFFF
_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 1, 3, 4, 5, 8, 9, 11
_LIVING = {_ESTABLISHED, _SYN_RECEIVED, _FIN_WAIT_1, _FIN_WAIT_2, _CLOSE_WAIT, _LAST_ACK, _CLOSING}
_WORDS = {4: ("ip", "ipv4_addr"), 6: ("ip6", "ipv6_addr")}
# "Too large for the way": RFC 1191 and RFC 4443, 3.2
_TOO_LARGE = {4: "icmp type destination-unreachable icmp code 4", 6: "icmpv6 type packet-too-big"}


@dataclass(frozen=True)
class Connection:
    """A connection of a client's to a VIP."""

    client: Host
    client_port: int
    vip: Host
    port: int


def connections(pair: Pair) -> list[Connection]:
    """Those that this amphora has."""
    vips = {vip.ip for vip in pair.vips}
    return [found for version in (4, 6) for found in _sockets(version, {vip for vip in vips if vip.version == version})]


def _sockets(version: int, vips: Collection[Host]) -> Iterator[Connection]:
    """From proc(5), /proc/net/tcp."""
    if not vips:
        return
    with Path(f"/proc/thread-self/net/tcp{'' if version == 4 else '6'}").open(encoding="ascii") as lines:
        next(lines)
        for line in lines:
            _, local, remote, word, *_, inode = line.split(None, 10)[:10]
            state = int(word, 16)
            # One that no process has any more, and whose client has received everything, has nothing to lose: it waits
            # for a minute for an end that may have got lost when the VIPs moved.
            if state in _LIVING and not (state == _FIN_WAIT_2 and inode == "0"):
                vip, port = _endpoint(local)
                if vip in vips:
                    yield Connection(*_endpoint(remote), vip, port)


def _endpoint(text: str) -> tuple[Host, int]:
    """An address as the kernel prints it: words of 32 bits in the machine's own order."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)), int(port, 16)


# -- the tunnel -----------------------------------------------------------------------------------------------------


def dig(pair: Pair) -> None:
    """Have the tunnel to the partner; one to somebody else goes, with the rules that lead into it.

    Raises:
        NetlinkError: the kernel has no VXLAN, for example.
        FirewallError: the rules cannot be taken away.
    """
    local, remote = pair.vrrp.local.address, pair.vrrp.peers[0].address
    more = {"vxlan_local": str(local), "vxlan_group": str(remote)}
    if local.version == 6:
        more = {f"{key}6": value for key, value in more.items()}
    with IPRoute() as route:
        found = route.link_lookup(ifname=NAME)
        if found and _end(route, found[0]) != remote:
            stop_leading()  # the rules know it by its number, and the next one has another
            route.link("del", index=found[0])
            found = ()
        if not found:
            route.link(
                "add",
                ifname=NAME,
                kind="vxlan",
                vxlan_id=pair.vrrp.router_id,
                vxlan_port=PORT,
                vxlan_learning=0,
                address=_MAC,
                mtu=pair.mtu,
                **more,
            )
        route.link("set", index=_index(route), state="up")


def keep(pair: Pair) -> None:
    """Have the VIPs as addresses of the tunnel; returns when packets to them are taken.

    Raises:
        NetlinkError: the kernel refused it, or is not done in time.
    """
    with IPRoute() as route:
        index = _index(route)
        for vip in pair.vips:
            more = {"flags": _NODAD, "preferred_lft": 0, "valid_lft": _FOREVER} if vip.version == 6 else {}
            route.addr("replace", index=index, address=str(vip.ip), prefixlen=vip.max_prefixlen, **more)
        deadline = time.monotonic() + _READY_SECONDS
        # Also without a search for duplicates an address of IPv6 begins in a queue of the kernel's.
        while any(message["flags"] & _TENTATIVE for message in route.get_addr(family=socket.AF_INET6, index=index)):
            if time.monotonic() > deadline:
                raise NetlinkError(errno.ETIMEDOUT, "an address of IPv6 is not ready")
            time.sleep(_POLL_SECONDS)


def leads_to() -> Host | None:
    """Where the tunnel ends; None without one."""
    with IPRoute() as route:
        indexes = route.link_lookup(ifname=NAME)
        return _end(route, indexes[0]) if indexes else None


def _end(route: IPRoute, index: int) -> Host | None:
    data = route.get_links(index)[0].get_nested("IFLA_LINKINFO", "IFLA_INFO_DATA")
    end = data and (data.get_attr("IFLA_VXLAN_GROUP") or data.get_attr("IFLA_VXLAN_GROUP6"))
    return ipaddress.ip_address(end) if end else None


def fill_in() -> None:
    """Without the tunnel, and the VIPs on it."""
    with IPRoute() as route:
        for index in route.link_lookup(ifname=NAME):
            route.link("del", index=index)


def _index(route: IPRoute) -> int:
    return int(route.link_lookup(ifname=NAME)[0])


# -- the rules ------------------------------------------------------------------------------------------------------


def guard(pair: Pair) -> None:
    """Take nothing out of the tunnel that does not come from the partner."""
    nft_apply.execute(_without("inet") + guard_rules(pair))


def lead(pair: Pair) -> None:
    """Send to the partner what belongs to no connection that this amphora has now, or that begins from now on."""
    nft_apply.execute(_without("netdev") + rules(pair, connections(pair)))


def stop_leading() -> None:
    """Keep every packet."""
    _remove("netdev")


def stop_guarding() -> None:
    """Without the guard: the tunnel is gone."""
    _remove("inet")


def _remove(family: str) -> None:
    """A kernel that has no such table needs no library, and no nf_tables, to be without it."""
    if nft_apply.exists(family, _TABLE):
        nft_apply.execute(_without(family))


def _without(family: str) -> str:
    return f"table {family} {_TABLE}\ndelete table {family} {_TABLE}\n"


def guard_rules(pair: Pair) -> str:
    """Pure: the table that guards the tunnel's end."""
    word = _WORDS[pair.vrrp.local.address.version][0]
    return (
        f"table inet {_TABLE} {{\n chain arriving {{\n  type filter hook input priority -1; policy accept;\n"
        f"  udp dport {PORT} {word} saddr {pair.vrrp.peers[0].address} accept\n  udp dport {PORT} drop\n }}\n}}\n"
    )


def rules(pair: Pair, known: Collection[Connection]) -> str:
    """Pure: the table that leads packets. No connection is tracked: that it began here is all that is remembered.

    Its SYN is remembered for some seconds, and it itself when its client has said more. One whose SYN finds no room is
    led as a whole, to who serves it as long as it is there. Were the SYN alone taken here, what comes after it would be
    led all the same, and be answered with a reset. One that finds no room later stays as long as it is not silent.
    """
    sets, chain = [], []
    for version, (word, kind) in _WORDS.items():
        vips = ", ".join(str(vip.ip) for vip in pair.vips if vip.version == version)
        if not vips:
            continue
        elements = ", ".join(
            f"{one.client} . {one.client_port} . {one.vip} . {one.port}" for one in known if one.vip.version == version
        )
        flows = f"  type {kind} . inet_service . {kind} . inet_service\n"
        sets.append(
            f" set own{version} {{\n{flows}  size {_MOST_CONNECTIONS}\n  flags dynamic\n"
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
            f'  {to_vip} meta l4proto tcp ether daddr set {_MAC} fwd to "{NAME}"\n',
            # It may be about a connection of either: both are told.
            f'  {to_vip} {_TOO_LARGE[version]} ether daddr set {_MAC} dup to "{NAME}"\n',
        ]
    head = f' chain arriving {{\n  type filter hook ingress device "{pair.vrrp.interface}" priority 0; policy accept;\n'
    return f"table netdev {_TABLE} {{\n{''.join(sets)}{head}{''.join(chain)} }}\n}}\n"
