# SPDX-License-Identifier: Apache-2.0
"""Notice that somebody touched the interfaces or the firewall of a namespace.

Invariant: whatever the kernel announces about interfaces, addresses, routes and rules (or about nftables) after one
call of `changed` makes the next call say so; when in doubt (announcements were lost), it says so too.
"""

from __future__ import annotations

import errno
import socket

from amphora_agent.network.namespace import Namespace

_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
_LINK, _IPV4_ADDRESS, _IPV4_ROUTE, _IPV4_RULE = 0x1, 0x10, 0x40, 0x80
_IPV6_ADDRESS, _IPV6_ROUTE, _IPV6_RULE = 0x100, 0x400, 0x40000
_NFTABLES = 0x40


class Watch:
    """The kernel's announcements in one namespace. No thread reads them: they wait until somebody asks."""

    def __init__(self, announcements: socket.socket | None) -> None:
        self._announcements = announcements

    def changed(self) -> bool:
        """Whether anything may have changed since the last call, or since the start."""
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


def of_interfaces(inner: Namespace) -> Watch:
    """Interfaces, addresses, routes and rules."""
    groups = _LINK | _IPV4_ADDRESS | _IPV4_ROUTE | _IPV4_RULE | _IPV6_ADDRESS | _IPV6_ROUTE | _IPV6_RULE
    return Watch(inner.run(_listen, _NETLINK_ROUTE, groups))


def of_firewall(inner: Namespace) -> Watch:
    """Everything in nftables. A kernel that has none of it has nothing to tell."""
    try:
        return Watch(inner.run(_listen, _NETLINK_NETFILTER, _NFTABLES))
    except OSError:
        return Watch(None)


def _listen(kind: int, groups: int) -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, kind)
    try:
        opened.bind((0, groups))
    except OSError:
        opened.close()
        raise
    return opened
