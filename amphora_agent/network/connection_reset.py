# SPDX-License-Identifier: Apache-2.0
"""Reset of the open connections to VIPs that have left this amphora.

Invariant: called in the inner namespace, after the VIPs have moved. Each client receives a reset with the VIP as source
address. Without it a client that only receives waits for ever: the kernel sends nothing from an address that it has
lost, and the new holder of the VIPs resets a connection only when the client sends.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

from amphora_agent.bundle import VrrpInstance
from amphora_agent.network.connection_tunnel import Connection, list_connections
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

# The netlink request that resets a connection (linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h).
_SOCK_DIAG, _SOCK_DESTROY, _REQUEST, _ACKNOWLEDGE = 4, 21, 1, 4
_HEADER, _FAMILY, _PORTS = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("!HH")
_ALL_STATES, _ADDRESS_BYTES, _NO_COOKIE = 0xFFFFFFFF, 16, b"\xff" * 8
_ANSWER_SECONDS, _ANSWER_BYTES = 1.0, 8192
_NODAD = 0x02


def reset_connections(instance: VrrpInstance) -> int:
    """Reset the connections to the VIPs; returns their number.

    Raises:
        NetlinkError: the kernel refused an address.
        OSError: the kernel cannot reset connections (CONFIG_INET_DIAG_DESTROY).
    """
    connections = list_connections(instance)
    if not connections:
        return 0
    with IPRoute() as route:
        # To send a reset from a VIP, the kernel needs the VIP as a local address. A VIP on the loopback interface
        # causes no conflict, because the kernel answers no ARP request for the VIP.
        index = route.link_lookup(ifname="lo")[0]
        wanted = [{"index": index, "address": str(vip.ip), "prefixlen": vip.max_prefixlen} for vip in instance.vips]
        try:
            for address in wanted:
                route.addr("replace", **address, **({"flags": _NODAD} if ":" in address["address"] else {}))
            _destroy(connections)
            if left := set(connections).intersection(list_connections(instance)):
                raise OSError(errno.EOPNOTSUPP, f"{len(left)} of {len(connections)} connections are still open")
        finally:
            for address in wanted:
                with suppress(NetlinkError):
                    # A VIP that the kernel refused to add cannot be removed, so the error is ignored.
                    route.addr("del", **address)
    return len(connections)


def _destroy(connections: list[Connection]) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        for connection in connections:
            kernel.send(_destroy_request(connection))
            # The agent ignores the kernel's answer, because an error may only mean that the connection has already
            # ended.
            kernel.recv(_ANSWER_BYTES)


def _destroy_request(connection: Connection) -> bytes:
    """Return the netlink message that resets one connection."""
    family = socket.AF_INET if connection.vip.version == 4 else socket.AF_INET6
    body = (
        _FAMILY.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
        + _PORTS.pack(connection.port, connection.client_port)
        + connection.vip.packed.ljust(_ADDRESS_BYTES, b"\0")
        + connection.client.packed.ljust(_ADDRESS_BYTES, b"\0")
        # The four zero bytes are the interface index, and 0 means any network interface.
        + bytes(4)
        + _NO_COOKIE
    )
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DESTROY, _REQUEST | _ACKNOWLEDGE, 0, 0) + body
