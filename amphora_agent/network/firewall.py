# SPDX-License-Identifier: Apache-2.0
"""nftables rules that say which clients may open connections to which ports.

Invariant: the text is exactly what nft lists, so `nft_apply` can compare it with the table in the kernel. The name of a
set contains a digest of its elements: the set exists before a rule uses it, and it never changes.

The rules match only the first packet of a connection (SYN without ACK, RFC 9293 section 3.5). The kernel does not track
TCP connections, so connections of clients that lose their permission continue. A refused client gets a reset and knows
the result at once. The families are separate: an IPv4 network permits no IPv6 client. HAProxy alone uses the responder
on the loopback, so the loopback stays open.

For UDP and SCTP the rules match the first packet of a flow, before the engine selects a member (`l4_nftables.ruleset`).
An amphora that forwards is not a router: no other packets pass from one network to another.

The kernel reassembles fragments before the rules see a packet (RFC 8200, section 4.5). For IPv6 the kernel does so only
in a namespace with connection tracking. Therefore one rule uses the state of connections, and the chains `untracked`
exclude all packets from connection tracking.

Amphorae with IPv6 partners send and request TCP segments that fit into the tunnel (`connection_tunnel`). Linux
fragments an IPv6 packet that is too large only for a local socket, and the client would get no message.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from amphora_agent.bundle import Bundle, Host, Interface, Network, Vrrp
from amphora_agent.services.template_files import load_template

FAMILY, TABLE = "inet", "amphora"
PEERS_PORT = 1025
FORWARDED = 0x616D
"""Mark of forwarded packets that may pass (`l4_nftables.ruleset`)."""
Ranges = tuple[tuple[int, int], ...]
_TCP = "tcp"
# Bytes of the digest in the name of an nftables set. Equal digests of different sets are harmless, because `nft_apply`
# compares the elements, too.
_DIGEST_BYTES = 4
_BITS = {4: 32, 6: 128}
_WORDS = {4: "ip", 6: "ip6"}
_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_NFPROTO = {4: 2, 6: 10}
_REFUSE = "counter reject with tcp reset"
# TCP flags and masks in the notation of nft: a client's SYN, and a server's SYN-ACK.
_SYN, _SYN_ACK = "0x2 / 0x2,0x10", "0x2,0x10 / 0x2,0x10"
# Bytes that the hand-over tunnel adds to a packet: headers of IPv6, UDP, VXLAN (RFC 7348, section 5) and Ethernet.
_TUNNEL_BYTES = 40 + 8 + 8 + 14
# Bytes of the headers of IP and TCP, which TCP's maximum segment size does not include (RFC 9293, section 3.7.1).
_HEADER_BYTES = {4: 20 + 20, 6: 40 + 20}


@dataclass(frozen=True)
class Port:
    """The clients of a port: first and last address of each range, sorted and disjoint."""

    port: int
    ipv4: Ranges
    ipv6: Ranges
    protocol: str = _TCP

    @property
    def key(self) -> tuple[bool, str, int]:
        """The sort key and identity of a port. TCP ports come first."""
        return self.protocol != _TCP, self.protocol, self.port

    def ranges(self, version: int) -> Ranges:
        return self.ipv4 if version == 4 else self.ipv6


@dataclass(frozen=True)
class VrrpPeers:
    """The addresses of this amphora and its partners, all of one family, and the MTU of their network."""

    local: Host
    peers: tuple[Host, ...]
    mtu: int | None = None


@dataclass(frozen=True)
class Restrictions:
    """All restrictions; other ports are open. ``forwards``: the amphora has a VIP and forwards packets."""

    ports: tuple[Port, ...] = ()
    vrrp_peers: VrrpPeers | None = None
    forwards: bool = False


UNRESTRICTED = Restrictions()


def restrictions_of(bundle: Bundle) -> Restrictions:
    """Return the restrictions of a bundle."""
    ports = [Port(one.port, _ranges(one.networks, 4), _ranges(one.networks, 6), one.protocol) for one in bundle.allowed]
    has_vip = any(interface.vips for interface in bundle.interfaces)
    return Restrictions(
        tuple(sorted(ports, key=lambda one: one.key)),
        None if bundle.vrrp is None else _vrrp_peers(bundle.vrrp, bundle.interfaces),
        has_vip and bool(bundle.virtual_servers),
    )


def _vrrp_peers(vrrp: Vrrp, interfaces: Iterable[Interface]) -> VrrpPeers:
    mtu = next((each.mtu for each in interfaces if each.name == vrrp.interface), None)
    return VrrpPeers(vrrp.local.address, tuple(sorted((peer.address for peer in vrrp.peers), key=int)), mtu)


def _ranges(networks: Iterable[Network], version: int) -> Ranges:
    """Return the networks of one family as ranges; adjacent networks are merged."""
    found: list[tuple[int, int]] = []
    bounds = ((int(one.network_address), int(one.broadcast_address)) for one in networks if one.version == version)
    for first, last in sorted(bounds):
        if found and first <= found[-1][1] + 1:
            first, last = found[-1][0], max(found.pop()[1], last)  # noqa: PLW2901 (one range that contains both)
        found.append((first, last))
    return tuple(found)


def intersect(one: Restrictions, other: Restrictions) -> Restrictions:
    """Return restrictions that permit only the clients that both permit.

    They apply while one configuration replaces another. A port may belong to another listener afterwards, and neither
    listener may be open to the clients of the other.
    """
    mine, theirs = ({port.key: port for port in each.ports} for each in (one, other))
    ports = [
        Port(key[2], _common(mine.get(key), theirs.get(key), 4), _common(mine.get(key), theirs.get(key), 6), key[1])
        for key in sorted(mine.keys() | theirs.keys())
    ]
    return Restrictions(tuple(ports), other.vrrp_peers or one.vrrp_peers, one.forwards or other.forwards)


def _common(one: Port | None, other: Port | None, version: int) -> Ranges:
    if one is None or other is None:
        return next(port.ranges(version) for port in (one, other) if port is not None)
    found, left, right = [], deque(one.ranges(version)), deque(other.ranges(version))
    while left and right:
        first, last = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        if first <= last:
            found.append((first, last))
        (left if left[0][1] < right[0][1] else right).popleft()
    return tuple(found)


def describe_change(before: Restrictions, after: Restrictions) -> str:
    """Return a text that names a port with changed clients and counts the others; empty without a change."""
    mine, theirs = ({port.key: port for port in each.ports} for each in (before, after))
    changed = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if not changed:
        return ""
    is_other, protocol, port = changed[0]
    text = f"allowed clients of port {port}" + (f" ({protocol.upper()})" if is_other else "") + " changed"
    return text + (f", and {len(changed) - 1} more" if changed[1:] else "")


def render(wanted: Restrictions) -> str:
    """Return the table as nft lists it; empty without restrictions."""
    if wanted == UNRESTRICTED:
        return ""
    peers = wanted.vrrp_peers
    tcp, other = ([port for port in wanted.ports if (port.protocol == _TCP) is is_tcp] for is_tcp in (True, False))
    return load_template("firewall.nft.j2").render(
        sets=[found for port in wanted.ports for version in (4, 6) for found in _set(port, version)],
        vrrp_rules=[*([] if peers is None else _advertisement_rules(peers)), *_segment_size_rules(peers, _SYN)],
        beginning=[
            *([] if peers is None else _stick_table_rules(peers)),
            *(rule for port in tcp for rule in _rules(port)),
        ],
        leaving=list(_segment_size_rules(peers, _SYN_ACK)),
        entering=[rule for port in other for rule in _rules(port)],
        forwards=wanted.forwards,
        mark=f"{FORWARDED:#010x}",
    )


def _name(port: Port, version: int) -> str:
    digest = hashlib.blake2s(_elements(port, version).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{'port' if port.protocol == _TCP else port.protocol}-{port.port}-ipv{version}-{digest}"


def _elements(port: Port, version: int) -> str:
    return ", ".join(_range(first, last, version) for first, last in port.ranges(version))


def _is_unlimited(ranges: Ranges, version: int) -> bool:
    return ranges == ((0, 2 ** _BITS[version] - 1),)


def _set(port: Port, version: int) -> Iterator[dict[str, str]]:
    ranges = port.ranges(version)
    if ranges and not _is_unlimited(ranges, version):
        yield {"name": _name(port, version), "type": _TYPES[version], "elements": _elements(port, version)}


def _rules(port: Port) -> Iterator[str]:
    to_port = f"{port.protocol} dport {port.port}"
    refuse = _REFUSE if port.protocol == _TCP else "goto refusing"
    for version in (4, 6):
        ranges = port.ranges(version)
        if not ranges:
            yield f"meta nfproto {_NFPROTO[version]} {to_port} {refuse}"
        elif not _is_unlimited(ranges, version):
            yield f"{to_port} {_WORDS[version]} saddr != @{_name(port, version)} {refuse}"


def _range(first: int, last: int, version: int) -> str:
    """Return a range in nft syntax: an address, a network, or both ends."""
    size = last - first + 1
    if size == 1:
        return _address(first, version)
    if size & (size - 1) == 0 and first % size == 0:
        return f"{_address(first, version)}/{_BITS[version] + 1 - size.bit_length()}"
    return f"{_address(first, version)}-{_address(last, version)}"


def _address(value: int, version: int) -> str:
    """Return an address as the C library writes it; Python differs for ::ffff:0:0/96."""
    if version == 4:
        return str(ipaddress.IPv4Address(value))
    return socket.inet_ntop(socket.AF_INET6, value.to_bytes(16, "big"))


def _host_set(hosts: Iterable[Host]) -> str:
    words = [_address(int(host), host.version) for host in sorted({*hosts}, key=int)]
    return words[0] if len(words) == 1 else f"{{ {', '.join(words)} }}"


def _advertisement_rules(peers: VrrpPeers) -> Iterator[str]:
    """Accept VRRP from the partners only: a forged advertisement would take the VIPs (RFC 9568, 9)."""
    if peers.peers:
        yield f"meta l4proto 112 {_WORDS[peers.local.version]} saddr {_host_set(peers.peers)} accept"
    yield "meta l4proto 112 counter drop"


def _segment_size_rules(peers: VrrpPeers | None, flags: str) -> Iterator[str]:
    """Lower the maximum segment size in packets with these flags. nft never raises the size."""
    if peers is not None and peers.mtu is not None and peers.local.version == 6:
        for version, header in _HEADER_BYTES.items():
            size = peers.mtu - _TUNNEL_BYTES - header
            yield f"meta nfproto {_NFPROTO[version]} tcp flags {flags} tcp option maxseg size set {size}"


def _stick_table_rules(peers: VrrpPeers) -> Iterator[str]:
    """Accept the peers and this amphora: an old HAProxy process sends its tables to a new one."""
    word = _WORDS[peers.local.version]
    to_us = f"{word} daddr {_address(int(peers.local), peers.local.version)} tcp dport {PEERS_PORT}"
    yield f"{to_us} {word} saddr {_host_set((peers.local, *peers.peers))} accept"
    yield f"{to_us} {_REFUSE}"
