# SPDX-License-Identifier: Apache-2.0
"""Conntrack events for ended flows (linux/netfilter/nfnetlink_conntrack.h)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from amphora_agent.l4.netlink import FIRST_ATTRIBUTE, attributes

DELETED = 1 << 8 | 2
UDP, SCTP = 17, 132
_TUPLE_ORIG, _TUPLE_REPLY, _STATUS, _PROTOCOL_INFO = 1, 2, 3, 4
_COUNTERS_ORIG, _COUNTERS_REPLY, _TIMES = 9, 10, 20
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PACKETS, _BYTES, _BEGIN, _END = 1, 2, 1, 2
_PORTS = (UDP, SCTP)
_INFO_SCTP, _SCTP_STATE = 3, 1
_ASSURED = 1 << 2
_ADDRESSES = {socket.AF_INET: (1, 2), socket.AF_INET6: (3, 4)}


@dataclass(frozen=True)
class FlowCounters:
    """Packets and bytes in one direction."""

    packets: int
    bytes: int


@dataclass(frozen=True)
class EndedFlow:
    """An ended flow from a client to a destination, and its member. Times are nanoseconds since 1970.

    ``ended`` is the time when the kernel deleted the flow. ``assured`` is whether the flow had more than a request and
    a reply. ``state`` is the number of an SCTP state. Both determine the kernel's time-out for a silent flow.
    """

    protocol: int
    client: tuple[str, int]
    destination: tuple[str, int]
    member: tuple[str, int]
    assured: bool
    state: int
    received: FlowCounters | None
    sent: FlowCounters | None
    began: int | None
    ended: int | None


def parse_events(messages: bytes) -> Iterator[EndedFlow]:
    """Yield the ended UDP and SCTP flows of received messages."""
    at = 0
    while at + FIRST_ATTRIBUTE <= len(messages):
        size, kind = struct.unpack_from("=IH", messages, at)
        if size < FIRST_ATTRIBUTE or at + size > len(messages):
            return
        if kind == DELETED and (found := _parse_event(messages[at : at + size])) is not None:
            yield found
        at += (size + 3) & ~3


def _parse_event(message: bytes) -> EndedFlow | None:
    family = message[16]
    if family not in _ADDRESSES:
        return None
    try:
        found = attributes(message, FIRST_ATTRIBUTE)
        source, target, protocol, port, local_port = _parse_tuple(family, found[_TUPLE_ORIG])
        if protocol not in _PORTS:
            return None
        member, _, _, member_port, _ = _parse_tuple(family, found[_TUPLE_REPLY])
        times, info = attributes(found.get(_TIMES, b"")), attributes(found.get(_PROTOCOL_INFO, b""))
        return EndedFlow(
            protocol,
            (source, port),
            (target, local_port),
            (member, member_port),
            bool(int.from_bytes(found.get(_STATUS, b""), "big") & _ASSURED),
            attributes(info.get(_INFO_SCTP, b"")).get(_SCTP_STATE, b"\0")[0],
            _parse_counters(found.get(_COUNTERS_ORIG)),
            _parse_counters(found.get(_COUNTERS_REPLY)),
            *(int.from_bytes(times.get(kind, b""), "big") or None for kind in (_BEGIN, _END)),
        )
    except (KeyError, IndexError, ValueError, OSError):
        return None


def _parse_tuple(family: int, data: bytes) -> tuple[str, str, int, int, int]:
    """Return source, destination, protocol, source port and destination port."""
    parts = attributes(data)
    source, target = _ADDRESSES[socket.AddressFamily(family)]
    addresses, ports = attributes(parts[_TUPLE_IP]), attributes(parts[_TUPLE_PROTO])
    return (
        socket.inet_ntop(family, addresses[source]),
        socket.inet_ntop(family, addresses[target]),
        ports[1][0],
        int.from_bytes(ports.get(2, b""), "big"),
        int.from_bytes(ports.get(3, b""), "big"),
    )


def _parse_counters(data: bytes | None) -> FlowCounters | None:
    if data is None:
        return None
    found = attributes(data)
    return FlowCounters(int.from_bytes(found[_PACKETS], "big"), int.from_bytes(found[_BYTES], "big"))
