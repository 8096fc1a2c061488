# SPDX-License-Identifier: Apache-2.0
"""Who may open a connection to which port, as nftables rules.

Invariant: pure. What is rendered is exactly how nft lists it (numbers instead of names, the fewest ranges, in order),
so that text can be compared with what the kernel holds (in what versions of nft differ, `nftables` evens it out). Where
they differ for any reason the rules are replaced, as a whole and in one transaction. A set is named after what is in
it: it is there before a rule asks it (`nftables`), and never changes.

Only what begins a connection is looked at (SYN without ACK, RFC 9293 section 3.5): no connection is tracked, and those
of clients that lose their permission go on. Who may not come in is answered with a reset, as by a port where nobody
listens: it knows at once, instead of trying for two minutes and taking the load balancer for dead.
Families are apart: networks of IPv4 let nobody in by IPv6. The responder on the loopback is HAProxy's and stays open.

Of UDP and SCTP the first packet of a flow is looked at, before a member is found for it (`virtual_servers/ruleset`):
flows that are known go on. TCP stays untracked then, too. Who forwards for virtual servers is no router: but for their
flows, nothing passes from one network to another.

Advertisements of VRRP, and entries of stick tables, come from the partners alone.

Fragments are reassembled before the rules see a packet (RFC 8200, section 4.5). The kernel reassembles IPv6 in front of
the rules only in a namespace that tracks connections. Therefore one rule asks for the state of connections, and the
chains `untracked` keep all packets out of connection tracking.

Partners that speak IPv6 ask clients for segments that fit into the tunnel between them (`detour`): Linux takes a packet
of IPv6 that is too large for its way apart for nobody but a socket, and no client would hear of it. Over IPv4 it does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from amphora_agent.bundle import Bundle, Host, Interface, Network, Vrrp

FAMILY, TABLE = "inet", "amphora"
PEERS_PORT = 1025
FORWARDED = 0x616D
"""The mark of packets that an engine lets through (`virtual_servers/ruleset`)."""
Ranges = tuple[tuple[int, int], ...]
_TCP = "tcp"
# Two of one name are noticed (`nftables`).
_DIGEST_BYTES = 4
_BITS = {4: 32, 6: 128}
_WORDS = {4: "ip", 6: "ip6"}
_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
# linux/netfilter.h
_NFPROTO = {4: 2, 6: 10}
_REFUSE = "counter reject with tcp reset"
_HEAD = """table inet amphora {
"""
_ARRIVING = """	chain arriving {
		type filter hook input priority 0; policy accept;
"""
# The first rule changes nothing: with it the kernel reassembles fragments in front of all chains of the namespace.
# A fragment inside of a reassembled packet would be reassembled once more behind the rules.
_REASSEMBLING = """		ct state 0x1 counter
		exthdr frag 1 counter drop
"""
_BEGINNING = """		tcp flags 0x2 / 0x1,0x2,0x4,0x10 goto beginning
	}

	chain beginning {
		iif "lo" ip daddr 127.0.0.0/8 accept
		iif "lo" ip6 daddr ::1 accept
"""
_LEAVING = """	}

	chain leaving {
		type filter hook output priority 0; policy accept;
"""
# A refusal of its own: where the family is known, versions of nft differ in how they list one.
_ENTERING = """	}

	chain refusing {
		counter reject
	}

	chain entering {
		type nat hook prerouting priority -101; policy accept;
"""
_UNTRACKED = """	}

	chain untracked {
		type filter hook prerouting priority -300; policy accept;
		notrack
	}

	chain untracked-own {
		type filter hook output priority -300; policy accept;
		notrack
"""
_FORWARDING = f"""	}}

	chain untracked {{
		type filter hook prerouting priority -300; policy accept;
		meta l4proto != {{ 1, 17, 58, 132 }} notrack
	}}

	chain untracked-own {{
		type filter hook output priority -300; policy accept;
		meta l4proto != {{ 1, 17, 58, 132 }} notrack
		icmpv6 type 137 drop
	}}

	chain forwarding {{
		type filter hook forward priority 200; policy drop;
		meta mark {FORWARDED:#010x} accept
"""
_TAIL = """	}
}
"""
# In front of a client's packet in the tunnel: headers of IPv6, UDP, VXLAN (RFC 7348, section 5) and Ethernet.
_TUNNEL_BYTES = 40 + 8 + 8 + 14
# Headers that are no part of a segment (RFC 9293, section 3.7.1).
_HEADER_BYTES = {4: 20 + 20, 6: 40 + 20}


@dataclass(frozen=True)
class Port:
    """Who may reach a port: first and last address of each range, in order and apart."""

    port: int
    ipv4: Ranges
    ipv6: Ranges
    protocol: str = _TCP

    @property
    def key(self) -> tuple[bool, str, int]:
        """Which one it is; in order, TCP's come first."""
        return self.protocol != _TCP, self.protocol, self.port

    def ranges(self, version: int) -> Ranges:
        return self.ipv4 if version == 4 else self.ipv6


@dataclass(frozen=True)
class Pair:
    """This amphora's address among its partners, and theirs; all of one family.

    ``mtu`` is that of the network they are on, in bytes; None if it is not known.
    """

    local: Host
    peers: tuple[Host, ...]
    mtu: int | None = None


@dataclass(frozen=True)
class Restrictions:
    """Everything that is shut out. A port that is not named is open.

    ``forwards`` is whether the amphora has a VIP and forwards packets for virtual servers.
    """

    ports: tuple[Port, ...] = ()
    pair: Pair | None = None
    forwards: bool = False


OPEN = Restrictions()


def restrictions_of(bundle: Bundle) -> Restrictions:
    """What a bundle says about it."""
    ports = [Port(one.port, _ranges(one.networks, 4), _ranges(one.networks, 6), one.protocol) for one in bundle.allowed]
    has_vip = any(interface.vips for interface in bundle.interfaces)
    return Restrictions(
        tuple(sorted(ports, key=lambda one: one.key)),
        None if bundle.vrrp is None else _pair(bundle.vrrp, bundle.interfaces),
        has_vip and bool(bundle.virtual_servers),
    )


def _pair(vrrp: Vrrp, interfaces: Iterable[Interface]) -> Pair:
    mtu = next((each.mtu for each in interfaces if each.name == vrrp.interface), None)
    return Pair(vrrp.local.address, tuple(sorted((peer.address for peer in vrrp.peers), key=int)), mtu)


def _ranges(networks: Iterable[Network], version: int) -> Ranges:
    """Networks of a family, with what touches joined."""
    found: list[tuple[int, int]] = []
    bounds = ((int(one.network_address), int(one.broadcast_address)) for one in networks if one.version == version)
    for first, last in sorted(bounds):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def tighter(one: Restrictions, other: Restrictions) -> Restrictions:
    """What both let in, for the moment in which a configuration takes the place of another one.

    A port belongs to one listener before and perhaps to another one after it: neither is open to the other's clients.
    """
    mine, theirs = ({port.key: port for port in each.ports} for each in (one, other))
    ports = [
        Port(key[2], _common(mine.get(key), theirs.get(key), 4), _common(mine.get(key), theirs.get(key), 6), key[1])
        for key in sorted(mine.keys() | theirs.keys())
    ]
    return Restrictions(tuple(ports), other.pair or one.pair, one.forwards or other.forwards)


def _common(one: Port | None, other: Port | None, version: int) -> Ranges:
    if one is None or other is None:
        return next(port.ranges(version) for port in (one, other) if port is not None)
    found = []
    left, right = list(one.ranges(version)), list(other.ranges(version))
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            found.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(before: Restrictions, after: Restrictions) -> str:
    """For a person: which ports' clients changed; empty if none did."""
    mine, theirs = ({port.key: port for port in each.ports} for each in (before, after))
    ports = [_said(key) for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if not ports:
        return ""
    return f"who may reach port {ports[0]} changed" + (f", and {len(ports) - 1} more" if ports[1:] else "")


def _said(key: tuple[bool, str, int]) -> str:
    is_other, protocol, port = key
    return f"{port} ({protocol.upper()})" if is_other else str(port)


# -- text -----------------------------------------------------------------------------------------------------------


def render(wanted: Restrictions) -> str:
    """The table as nft lists it; empty if nobody is shut out."""
    if wanted == OPEN:
        return ""
    sets = [text for port in wanted.ports for version in (4, 6) for text in _set(port, version)]
    pair = list(_vrrp(wanted.pair)) if wanted.pair is not None else []
    rules = list(_peers(wanted.pair)) if wanted.pair is not None else []
    rules += [rule for port in wanted.ports if port.protocol == _TCP for rule in _rules(port)]
    entering = [rule for port in wanted.ports if port.protocol != _TCP for rule in _rules(port)]
    further = [
        text
        for head, lines in (
            (_LEAVING, list(_fitting(wanted.pair))),
            (_ENTERING, entering),
        )
        if lines
        for text in (head, *map(_line, lines))
    ]
    arriving = [_ARRIVING, _REASSEMBLING, *map(_line, pair), _BEGINNING, *map(_line, rules)]
    return "".join([_HEAD, *sets, *arriving, *further, _FORWARDING if wanted.forwards else _UNTRACKED, _TAIL])


def _line(rule: str) -> str:
    return f"\t\t{rule}\n"


def _name(port: Port, version: int) -> str:
    digest = hashlib.blake2s(_elements(port, version).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{'port' if port.protocol == _TCP else port.protocol}-{port.port}-ipv{version}-{digest}"


def _elements(port: Port, version: int) -> str:
    return ", ".join(_range(first, last, version) for first, last in port.ranges(version))


def _everybody(ranges: Ranges, version: int) -> bool:
    return ranges == ((0, 2 ** _BITS[version] - 1),)


def _set(port: Port, version: int) -> Iterator[str]:
    ranges = port.ranges(version)
    if ranges and not _everybody(ranges, version):
        yield (
            f"\tset {_name(port, version)} {{\n\t\ttype {_TYPES[version]}\n\t\tflags interval\n"
            f"\t\telements = {{ {_elements(port, version)} }}\n\t}}\n\n"
        )


def _rules(port: Port) -> Iterator[str]:
    to_port = f"{port.protocol} dport {port.port}"
    refuse = _REFUSE if port.protocol == _TCP else "goto refusing"
    for version in (4, 6):
        ranges = port.ranges(version)
        if not ranges:
            yield f"meta nfproto {_NFPROTO[version]} {to_port} {refuse}"
        elif not _everybody(ranges, version):
            yield f"{to_port} {_WORDS[version]} saddr != @{_name(port, version)} {refuse}"


def _range(first: int, last: int, version: int) -> str:
    """A range in nft's words: an address, a network if it is one, both ends otherwise."""
    size = last - first + 1
    if size == 1:
        return _address(first, version)
    if size & (size - 1) == 0 and first % size == 0:
        return f"{_address(first, version)}/{_BITS[version] + 1 - size.bit_length()}"
    return f"{_address(first, version)}-{_address(last, version)}"


def _address(value: int, version: int) -> str:
    """As the C library writes it, which for ::ffff:0:0/96 is not how Python does."""
    if version == 4:
        return str(ipaddress.IPv4Address(value))
    return socket.inet_ntop(socket.AF_INET6, value.to_bytes(16, "big"))


def _among(hosts: Iterable[Host]) -> str:
    """One address as it is, several as a set, in order."""
    words = [_address(int(host), host.version) for host in sorted({*hosts}, key=int)]
    return words[0] if len(words) == 1 else f"{{ {', '.join(words)} }}"


def _vrrp(pair: Pair) -> Iterator[str]:
    """RFC 9568, section 9: who forges an advertisement takes the VIPs. Nobody else waits for an answer."""
    if pair.peers:
        yield f"meta l4proto 112 {_WORDS[pair.local.version]} saddr {_among(pair.peers)} accept"
    yield "meta l4proto 112 counter drop"


def _fitting(pair: Pair | None) -> Iterator[str]:
    """What we say in a SYN with ACK is lowered, and never raised: a client may have a reason of its own."""
    if pair is not None and pair.mtu is not None and pair.local.version == 6:
        for version, header in _HEADER_BYTES.items():
            size = pair.mtu - _TUNNEL_BYTES - header
            yield (f"meta nfproto {_NFPROTO[version]} tcp flags 0x2,0x10 / 0x2,0x10 tcp option maxseg size set {size}")


def _peers(pair: Pair) -> Iterator[str]:
    """HAProxy hands its tables to the process that takes its place over the same address."""
    to_us = f"{_WORDS[pair.local.version]} daddr {_address(int(pair.local), pair.local.version)} tcp dport {PEERS_PORT}"
    yield f"{to_us} {_WORDS[pair.local.version]} saddr {_among((pair.local, *pair.peers))} accept"
    yield f"{to_us} {_REFUSE}"
