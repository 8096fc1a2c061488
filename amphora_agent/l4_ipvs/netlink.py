# SPDX-License-Identifier: Apache-2.0
"""IPVS as the kernel tells of it: generic netlink, family "IPVS" (linux/ip_vs.h, linux/genetlink.h).

Invariant: reads, and takes all of it away if asked; what is to be served keepalived tells the kernel. Standard library
only. Each call asks in the network namespace of its thread, with a socket of its own.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from amphora_agent.errors import MachineError
from amphora_agent.l4.model import Host

_NETLINK_GENERIC = 16
_REQUEST, _ACKNOWLEDGE, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_HEADER, _GENERIC, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBH"), struct.Struct("=HH")
_TYPE_BITS = 0x3FFF
_CONTROLLER, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2
_VERSION = 1
_GET_SERVICE, _GET_DESTINATION, _FLUSH = 4, 8, 17
# Attributes of a message, of a service, of a destination, and of the counters of both.
_SERVICE = 1
_DESTINATION = 2
_AF, _PROTOCOL, _ADDRESS, _PORT, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK, _STATS64 = 1, 2, 3, 4, 6, 7, 8, 9, 12
_TO_ADDRESS, _TO_PORT, _TO_METHOD, _TO_WEIGHT = 1, 2, 3, 4
_TO_ACTIVE, _TO_INACTIVE, _TO_FAMILY, _TO_STATS64 = 7, 8, 11, 12
_CONNECTIONS, _BYTES_IN, _BYTES_OUT = 1, 4, 5
_PROTOCOLS = {socket.IPPROTO_UDP: "UDP", socket.IPPROTO_SCTP: "SCTP", socket.IPPROTO_TCP: "TCP"}
_SECONDS = 10.0
_REMEDY = "Load the kernel's module ip_vs, or have virtual servers forwarded by nftables."

Attributes = dict[int, bytes]
Key = tuple[str, Host, int]


class NoIpvsError(MachineError):
    """The kernel has no IPVS, or does not say what it has."""


@dataclass(frozen=True)
class Destination:
    """A member as the kernel has it, with the flows of now and all there were."""

    address: Host
    port: int
    weight: int
    active: int
    inactive: int
    connections: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class Service:
    """One address and port, with what came in and went out since it was made."""

    protocol: str
    address: Host
    port: int
    scheduler: str
    flags: int
    timeout: int
    connections: int
    bytes_in: int
    bytes_out: int
    destinations: tuple[Destination, ...]

    @property
    def key(self) -> Key:
        return self.protocol, self.address, self.port


def available() -> bool:
    """Whether the kernel knows IPVS in this namespace; one that has it as a module loads it when it is asked."""
    try:
        with _Link() as link:
            return link.family() != 0
    except OSError:
        return False


def services() -> tuple[Service, ...]:
    """All there are, with their members.

    Raises:
        NoIpvsError: the kernel does not tell.
    """
    try:
        with _Link() as link:
            family = link.family()
            found = [_attributes(each[_SERVICE]) for each in link.ask(family, _GET_SERVICE, b"", _DUMP)]
            return tuple(_service(each, tuple(_destinations(link, family, each))) for each in found)
    except (OSError, KeyError, struct.error, ValueError) as error:
        raise NoIpvsError("learn what IPVS does", str(error) or repr(error), _REMEDY) from error


def flush() -> None:
    """Take away all services of this namespace.

    Raises:
        NoIpvsError: the kernel refuses.
    """
    try:
        with _Link() as link:
            list(link.ask(link.family(), _FLUSH, b"", _ACKNOWLEDGE))
    except OSError as error:
        raise NoIpvsError("take away what IPVS does", str(error), _REMEDY) from error


class _Link:
    """A socket to the kernel."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_GENERIC)
        self._socket.settimeout(_SECONDS)
        self._number = 0

    def __enter__(self) -> _Link:
        self._socket.bind((0, 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def family(self) -> int:
        """The number of IPVS.

        Raises:
            OSError: there is none.
        """
        name = _attribute(_FAMILY_NAME, b"IPVS\0")
        for answer in self.ask(_CONTROLLER, _GET_FAMILY, name, _ACKNOWLEDGE):
            return int.from_bytes(answer[_FAMILY_ID], "little" if _is_little() else "big")
        return 0

    def ask(self, family: int, command: int, body: bytes, flags: int) -> Iterator[Attributes]:
        """The attributes of each message of the answer."""
        self._number += 1
        content = _GENERIC.pack(command, _VERSION, 0) + body
        head = _HEADER.pack(_HEADER.size + len(content), family, _REQUEST | flags, self._number, 0)
        self._socket.send(head + content)
        while True:
            data = self._socket.recv(1 << 20)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, number, _ = _HEADER.unpack_from(data, offset)
                message = data[offset + _HEADER.size : offset + length]
                offset += (length + 3) & ~3
                if number != self._number:
                    continue
                if kind in (_ERROR, _DONE):
                    result = struct.unpack_from("=i", message)[0] if len(message) >= 4 else 0
                    if result < 0:
                        raise OSError(-result, os.strerror(-result))
                    return
                yield _attributes(message[_GENERIC.size :])


def _is_little() -> bool:
    return struct.pack("=H", 1) == b"\x01\x00"


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _attributes(data: bytes) -> Attributes:
    found, offset = {}, 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            raise ValueError("an attribute without an end")
        found[kind & _TYPE_BITS] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found


def _destinations(link: _Link, family: int, service: Attributes) -> Iterator[Destination]:
    named = b"".join(_attribute(kind, service[kind]) for kind in (_AF, _PROTOCOL, _ADDRESS, _PORT))
    for answer in link.ask(family, _GET_DESTINATION, _attribute(_SERVICE, named), _DUMP):
        found = _attributes(answer[_DESTINATION])
        counted = _attributes(found[_TO_STATS64])
        yield Destination(
            address=_host(found.get(_TO_FAMILY, service[_AF]), found[_TO_ADDRESS]),
            port=int.from_bytes(found[_TO_PORT], "big"),
            weight=_number(found[_TO_WEIGHT]),
            active=_number(found[_TO_ACTIVE]),
            inactive=_number(found[_TO_INACTIVE]),
            connections=_number(counted[_CONNECTIONS]),
            bytes_in=_number(counted[_BYTES_IN]),
            bytes_out=_number(counted[_BYTES_OUT]),
        )


def _service(found: Attributes, destinations: tuple[Destination, ...]) -> Service:
    counted = _attributes(found[_STATS64])
    protocol = _number(found[_PROTOCOL])
    return Service(
        protocol=_PROTOCOLS.get(protocol, str(protocol)),
        address=_host(found[_AF], found[_ADDRESS]),
        port=int.from_bytes(found[_PORT], "big"),
        scheduler=found[_SCHEDULER].rstrip(b"\0").decode("ascii", "replace"),
        flags=_number(found[_FLAGS][:4]),
        timeout=_number(found[_TIMEOUT]),
        connections=_number(counted[_CONNECTIONS]),
        bytes_in=_number(counted[_BYTES_IN]),
        bytes_out=_number(counted[_BYTES_OUT]),
        destinations=destinations,
    )


def _host(family: bytes, address: bytes) -> Host:
    if _number(family) == socket.AF_INET6:
        return ipaddress.IPv6Address(address[:16])
    return ipaddress.IPv4Address(address[:4])


def _number(value: bytes) -> int:
    """In the machine's own order of bytes, whatever its length."""
    return int.from_bytes(value, "little" if _is_little() else "big")
