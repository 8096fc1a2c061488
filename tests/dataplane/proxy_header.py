# SPDX-License-Identifier: Apache-2.0
"""Parses PROXY protocol headers, as a member does.

Invariant: exactly the header is read from the connection; the following bytes stay for the member. (Specification:
HAProxy's doc/proxy-protocol.txt.)
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


@dataclass
class Proxied:
    """A PROXY protocol header."""

    version: int
    source: list
    destination: list
    extensions: dict[str, str] = field(default_factory=dict)


_EXTENSIONS = {0x01: "alpn", 0x02: "authority", 0x20: "ssl"}


def read_proxy_header(connection: socket.socket) -> Proxied:
    """Read the PROXY header, version 1 or 2, at the start of a connection.

    Raises:
        ValueError: the connection does not begin with a PROXY header.
    """
    start = _exactly(connection, 6)
    if start == b"PROXY ":
        return _version_1(connection)
    if start + _exactly(connection, 6) != _SIGNATURE:
        raise ValueError(f"not a PROXY header: {start!r}")
    _, family, length = struct.unpack("!BBH", _exactly(connection, 4))
    rest = _exactly(connection, length)
    size, kind = {1: (4, socket.AF_INET), 2: (16, socket.AF_INET6)}.get(family >> 4, (0, None))
    if kind is None:
        return Proxied(2, [], [])
    source, destination = rest[:size], rest[size : 2 * size]
    ports = struct.unpack("!HH", rest[2 * size : 2 * size + 4])
    left, extensions = rest[2 * size + 4 :], {}
    while len(left) >= 3:
        number, length = struct.unpack("!BH", left[:3])
        extensions[_EXTENSIONS.get(number, str(number))] = left[3 : 3 + length].decode("latin-1")
        left = left[3 + length :]
    return Proxied(
        2,
        [socket.inet_ntop(kind, source), ports[0]],
        [socket.inet_ntop(kind, destination), ports[1]],
        extensions,
    )


def _version_1(connection: socket.socket) -> Proxied:
    line = b""
    while not line.endswith(b"\r\n"):
        line += _exactly(connection, 1)
    _, source, destination, source_port, destination_port = line.decode().split()
    return Proxied(1, [source, int(source_port)], [destination, int(destination_port)])


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        data = connection.recv(length - len(found))
        if not data:
            raise EOFError("the connection ended in a PROXY header")
        found += data
    return found
