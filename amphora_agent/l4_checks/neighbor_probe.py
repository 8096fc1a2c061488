# SPDX-License-Identifier: Apache-2.0
"""Let the kernel verify that a host on a connected network is still there.

The kernel considers a neighbour reachable for up to a minute after the last contact (arp(7), `base_reachable_time`). If
the host has failed meanwhile, packets to it are lost without a message. After a probe the kernel sends three requests
(ARP or neighbour solicitation), one a second. Without an answer the kernel reports "host unreachable"
(`amphora_agent.l4_checks.icmp_errors`). Meanwhile the kernel sends packets of clients as before.

Invariant: the probe changes only neighbour entries that the kernel has learned, and only their state. No call waits:
the kernel answers at once.
"""

from __future__ import annotations

import socket
import struct
import sys
from ipaddress import ip_address
from typing import NamedTuple

from amphora_agent.l4 import netlink

# Netlink messages and attributes for routes and neighbours (linux/rtnetlink.h).
_GET_ROUTE, _NEW_ROUTE, _GET_NEIGHBOUR, _NEW_NEIGHBOUR = 26, 24, 30, 28
_ROUTE_TO, _ROUTE_LINK, _ROUTE_GATEWAY, _ROUTE_VIA = 1, 4, 5, 18
_NEIGHBOUR_ADDRESS = 1
_INCOMPLETE, _REACHABLE, _STALE, _DELAY, _PROBE, _FAILED = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_USABLE, _UNRESOLVED = _REACHABLE | _STALE | _DELAY, _INCOMPLETE | _FAILED
# Flags NTF_SELF and NTF_EXT_LEARNED of neighbour entries that do not come from ARP or neighbour discovery.
_NOT_LEARNED = 0x02 | 0x10
_UNICAST = 1
_ANSWER_SECONDS, _LARGEST = 0.2, 8192


class _Entry(NamedTuple):
    family: int
    address: bytes
    interface: int
    state: int
    flags: int


class NeighborProbe:
    """A netlink socket in the network namespace in which the object was created."""

    def __init__(self) -> None:
        self._link = netlink.open_socket(netlink.ROUTE, timeout=_ANSWER_SECONDS)
        self._number = 0

    def probe(self, address: str) -> bool:
        """Start a probe of a host; returns False if the kernel has no usable entry for the host."""
        found = self._entry(address)
        if found is None or not found.state & _USABLE or found.flags & _NOT_LEARNED:
            return False
        try:
            entry = _neighbour(found.family, found.address, found.interface, _PROBE)
            self._send(_NEW_NEIGHBOUR, netlink.REPLACE, entry)
        except OSError:
            return False
        return True

    def is_unresolved(self, address: str) -> bool:
        """Return whether the kernel has no link-layer address for a host, so that packets to it still wait."""
        found = self._entry(address)
        return found is not None and bool(found.state & _UNRESOLVED)

    def _entry(self, address: str) -> _Entry | None:
        """Return the neighbour entry of a host; None without an entry, or for a host behind a router."""
        packed, family = ip_address(address).packed, socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            interface = self._interface(family, packed)
            if not interface:
                return None
            answer = self._request(_GET_NEIGHBOUR, _neighbour(family, packed, interface, 0), _NEW_NEIGHBOUR)
        except OSError:
            return None
        return None if answer is None else _Entry(family, packed, interface, *struct.unpack_from("=HB", answer, 8))

    def _interface(self, family: int, packed: bytes) -> int:
        """Return the index of the interface that connects a host; 0 if it is behind a router."""
        body = struct.pack("=BBBBBBBBI", family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
        answer = self._request(_GET_ROUTE, body + netlink.attribute(_ROUTE_TO, packed), _NEW_ROUTE)
        # The eighth byte of struct rtmsg is the type of the route. Only a unicast route leads to a member's host.
        if answer is None or answer[7] != _UNICAST:
            return 0
        found = netlink.attributes(answer, 12)
        if _ROUTE_GATEWAY in found or _ROUTE_VIA in found:
            return 0
        return int.from_bytes(found.get(_ROUTE_LINK, b""), sys.byteorder)

    def _request(self, kind: int, body: bytes, wanted: int) -> bytes | None:
        """Return the body of the kernel's answer; None for an error, or for another message type."""
        number = self._send(kind, 0, body)
        while True:
            answer = self._link.recv(_LARGEST)
            size, found, _, about = struct.unpack_from("=IHHI", answer)
            if about == number:
                return answer[16:size] if found == wanted else None

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._number = self._number % 0xFFFFFFFF + 1
        self._link.send(netlink.message(kind, flags, body, self._number))
        return self._number

    def close(self) -> None:
        self._link.close()


def _neighbour(family: int, packed: bytes, interface: int, state: int) -> bytes:
    head = struct.pack("=BBHiHBB", family, 0, 0, interface, state, 0, 0)
    return head + netlink.attribute(_NEIGHBOUR_ADDRESS, packed)
