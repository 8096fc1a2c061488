# SPDX-License-Identifier: Apache-2.0
"""Notice that somebody touched the interfaces of a namespace.

Invariant: whatever the kernel announces about interfaces, addresses or routes after one call of `changed` makes
the next call say so; when in doubt (announcements were lost), it says so too.
"""

from __future__ import annotations

import errno
import socket

from amphora_agent.network.namespace import Namespace

_NETLINK_ROUTE = 0
_LINK, _IPV4_ADDRESS, _IPV4_ROUTE, _IPV6_ADDRESS, _IPV6_ROUTE = 0x1, 0x10, 0x40, 0x100, 0x400


class Watch:
    """The kernel's announcements in one namespace. No thread reads them: they wait until somebody asks."""

    def __init__(self, inner: Namespace) -> None:
        self._announcements = inner.run(_listen)

    def changed(self) -> bool:
        """Whether anything may have changed since the last call, or since the start."""
        found = False
        while True:
            try:
                self._announcements.recv(65536)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
            found = True

    def close(self) -> None:
        self._announcements.close()


def _listen() -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE)
    opened.bind((0, _LINK | _IPV4_ADDRESS | _IPV4_ROUTE | _IPV6_ADDRESS | _IPV6_ROUTE))
    return opened
