# SPDX-License-Identifier: Apache-2.0
"""Change notifications of the kernel for the interfaces or the nftables rules of a namespace."""

from __future__ import annotations

import errno
import socket

from amphora_agent.l4 import netlink
from amphora_agent.network.namespace import Namespace

_LINK, _IPV4_ADDRESS, _IPV4_ROUTE, _IPV4_RULE = 0x1, 0x10, 0x40, 0x80
_IPV6_ADDRESS, _IPV6_ROUTE, _IPV6_RULE = 0x100, 0x400, 0x40000
_NFTABLES = 0x40


class NetlinkWatch:
    """Announcements of one namespace. No thread reads them; they wait in the socket until the next call."""

    def __init__(self, announcements: socket.socket | None) -> None:
        self._announcements = announcements

    def fileno(self) -> int:
        """Return the descriptor of the socket for select(2); -1 without announcements."""
        return -1 if self._announcements is None else self._announcements.fileno()

    def has_changed(self) -> bool:
        """Return whether anything may have changed since the last call, or since the start."""
        found = False
        while self._announcements is not None:
            try:
                self._announcements.recv(65536)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
            found = True
        return found

    def close(self) -> None:
        if self._announcements is not None:
            self._announcements.close()


def watch_interfaces(inner: Namespace) -> NetlinkWatch:
    """Watch interfaces, addresses, routes and rules."""
    groups = _LINK | _IPV4_ADDRESS | _IPV4_ROUTE | _IPV4_RULE | _IPV6_ADDRESS | _IPV6_ROUTE | _IPV6_RULE
    return NetlinkWatch(inner.run(netlink.open_socket, netlink.ROUTE, groups, 0))


def watch_addresses(inner: Namespace) -> NetlinkWatch:
    """Watch interfaces and addresses."""
    return NetlinkWatch(inner.run(netlink.open_socket, netlink.ROUTE, _LINK | _IPV4_ADDRESS | _IPV6_ADDRESS, 0))


def watch_nftables(inner: Namespace) -> NetlinkWatch:
    """Watch nftables. Without nf_tables in the kernel there are no announcements."""
    try:
        return NetlinkWatch(inner.run(netlink.open_socket, netlink.NETFILTER, _NFTABLES, 0))
    except OSError:
        return NetlinkWatch(None)
