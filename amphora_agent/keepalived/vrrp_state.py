# SPDX-License-Identifier: Apache-2.0
"""Whether this amphora has the VIPs, as the kernel sees it.

Invariant: keepalived is not asked and not believed: the first VIP is on the interface or it is not. Who wants to know
of a change is told when the kernel announces it; nothing is polled.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from amphora_agent.errors import AgentError
from amphora_agent.keepalived import stale_vips
from amphora_agent.keepalived.configuration import Pair
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

_log = logging.getLogger(__name__)
_NETLINK_ROUTE = 0
_LINK, _IPV4_ADDRESS, _IPV6_ADDRESS = 0x1, 0x10, 0x100
_RETRY_SECONDS = 5.0


class Role:
    """The thread that listens to the kernel's announcements of addresses in the inner namespace.

    Args:
        pair: what this amphora takes part in at the moment; None if it is on its own.
        changed: called when the role has changed, in that thread.
    """

    def __init__(self, inner: Namespace, pair: Callable[[], Pair | None], changed: Callable[[], None]) -> None:
        self._inner = inner
        self._pair = pair
        self._changed = changed
        self._holds: bool | None = None
        self._lock = threading.Lock()
        self._announcements = inner.run(_listen)
        self._thread = threading.Thread(target=self._run, name="role", daemon=True)

    @property
    def holds_vip(self) -> bool | None:
        """Whether the VIPs are here; None on an amphora that is on its own."""
        return self._holds

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Look again: what this amphora takes part in may be another thing now."""
        with self._lock:
            pair, before = self._pair(), self._holds
            self._holds = None if pair is None else self._inner.run(_has, pair)
            changed = self._holds != before
            if changed and pair is not None and not self._holds:
                self._tidy(pair)
        if changed:
            _log.info("VIPs: %s", {None: "on its own", True: "here", False: "with a partner"}[self._holds])
            self._changed()

    def _tidy(self, pair: Pair) -> None:
        """Take away what keepalived has not let go of with the rest: it died before it had read its new file."""
        try:
            self._inner.run(stale_vips.take_away, pair)
        except NetlinkError as error:
            _log.warning("Taking former VIPs away: %s", error)

    def _run(self) -> None:
        patience: float | None = 0.0
        while True:
            select.select([self._announcements], [], [], patience)
            try:
                _drain(self._announcements)
                self.look()
                patience = None
            except (AgentError, OSError, NetlinkError) as error:
                _log.warning("Looking for the VIPs: %s", error)
                patience = _RETRY_SECONDS


def _listen() -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE)
    opened.bind((0, _LINK | _IPV4_ADDRESS | _IPV6_ADDRESS))
    return opened


def _drain(announcements: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            try:
                announcements.recv(65536)
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # some were lost: whoever looks now sees more than they would say
                    raise


def _has(pair: Pair) -> bool:
    family, attribute = (socket.AF_INET, "IFA_LOCAL") if pair.first.version == 4 else (socket.AF_INET6, "IFA_ADDRESS")
    try:
        index = socket.if_nametoindex(pair.vrrp.interface)
    except OSError:
        return False  # the interface is not there yet, or not any more
    with IPRoute() as route:
        return any(
            message["index"] == index and ipaddress.ip_address(message.get_attr(attribute)) == pair.first
            for message in route.get_addr(family=family, index=index)
        )
