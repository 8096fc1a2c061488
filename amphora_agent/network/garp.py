# SPDX-License-Identifier: Apache-2.0
"""Announcement of added addresses: gratuitous ARP and unsolicited neighbour advertisements."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_ETH_P_ARP = 0x0806
_BROADCAST = b"\xff" * 6
_REQUEST, _REPLY = 1, 2
_NEIGHBOUR_ADVERTISEMENT = 136
_OVERRIDE = 0x20000000
_TARGET_LINK_LAYER_ADDRESS = 2
_ALL_NODES = "ff02::1"


def announce(interface: str, mac: str, addresses: Iterable[IPAddress]) -> None:
    """Announce addresses in the current namespace: ARP for IPv4, neighbour advertisements for IPv6."""
    hardware = bytes.fromhex(mac.replace(":", ""))
    for address in addresses:
        if address.version == 4:
            _arp(interface, hardware, address.packed)
        else:
            _advertisement(interface, hardware, address)


def _arp(interface: str, hardware: bytes, address: bytes) -> None:
    """Send a request and a reply: some neighbours learn from requests only, others from replies only."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ARP)) as link:
        link.bind((interface, _ETH_P_ARP))
        for operation, target in ((_REQUEST, b"\0" * 6), (_REPLY, _BROADCAST)):
            header = _BROADCAST + hardware + struct.pack("!H", _ETH_P_ARP)
            body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
            link.send(header + body + hardware + address + target + address)


def _advertisement(interface: str, hardware: bytes, address: IPAddress) -> None:
    """Send a neighbour advertisement. Receivers require hop limit 255; the kernel adds the checksum."""
    index = socket.if_nametoindex(interface)
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as link:
        link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        link.bind((str(address), 0, 0, 0))
        message = struct.pack("!BBHI", _NEIGHBOUR_ADVERTISEMENT, 0, 0, _OVERRIDE) + address.packed
        message += struct.pack("!BB", _TARGET_LINK_LAYER_ADDRESS, 1) + hardware
        link.sendto(message, (_ALL_NODES, 0, 0, index))
