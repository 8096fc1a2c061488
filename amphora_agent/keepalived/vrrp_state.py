# SPDX-License-Identifier: Apache-2.0
"""Whether this amphora has the VIPs, according to the kernel.

Invariant: the first VIP on the interface decides; the agent does not ask keepalived. The kernel announces a change of
addresses, and the thread reacts to the announcement. Nothing is polled.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable

from amphora_agent.bundle import Address, VrrpInstance
from amphora_agent.errors import AgentError
from amphora_agent.network import netlink_watch
from amphora_agent.network.interfaces import present_addresses
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 5.0


class VrrpState:
    """Thread that follows the kernel's announcements of addresses, and calls ``changed`` after a change."""

    def __init__(
        self, inner: Namespace, instance: Callable[[], VrrpInstance | None], changed: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._instance = instance
        self._changed = changed
        # None for a single amphora, which uses no VRRP.
        self.holds_vip: bool | None = None
        self._lock = threading.Lock()
        self._announcements = netlink_watch.watch_addresses(inner)
        self._thread = threading.Thread(target=self._run, name="role", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def refresh(self) -> None:
        """Read the state again, also after a change of the VRRP instance."""
        with self._lock:
            instance, before = self._instance(), self.holds_vip
            self.holds_vip = None if instance is None else self._inner.run(_has_first_vip, instance)
            changed = self.holds_vip != before
            if changed and instance is not None and not self.holds_vip:
                self._remove_stale_vips(instance)
        if changed:
            places = {None: "not under VRRP", True: "on this amphora", False: "on a partner"}
            _log.info(
                "The agent noticed a VRRP change, and reports the new place of the VIPs in its heartbeats: %s",
                places[self.holds_vip],
            )
            self._changed()

    def _remove_stale_vips(self, instance: VrrpInstance) -> None:
        try:
            self._inner.run(remove_stale_vips, instance)
        except NetlinkError as error:
            _log.warning(
                "The agent could not remove VIPs that now belong to the other amphora, and tries again at "
                "the next VRRP change: %s",
                error,
            )

    def _run(self) -> None:
        timeout: float | None = 0.0
        while True:
            select.select([self._announcements], [], [], timeout)
            try:
                self._announcements.has_changed()
                self.refresh()
                timeout = None
            except (AgentError, OSError, NetlinkError) as error:
                _log.warning(
                    "The agent cannot read whether this amphora has the VIPs, and retries in %.0f s: %s",
                    _RETRY_SECONDS,
                    error,
                )
                timeout = _RETRY_SECONDS


def _has_first_vip(instance: VrrpInstance) -> bool:
    vip = instance.first_vip
    family, attribute = (socket.AF_INET, "IFA_LOCAL") if vip.version == 4 else (socket.AF_INET6, "IFA_ADDRESS")
    try:
        index = socket.if_nametoindex(instance.vrrp.interface)
    except OSError:
        # Without the VRRP interface, the amphora cannot have a VIP.
        return False
    with IPRoute() as route:
        return any(
            message["index"] == index and ipaddress.ip_address(message.get_attr(attribute)) == vip
            for message in route.get_addr(family=family, index=index)
        )


def remove_stale_vips(instance: VrrpInstance) -> None:
    """Remove former VIPs that a keepalived left on the interface when it died, in the inner namespace.

    Called only while no keepalived runs, or right after it released the VIPs. A running holder removes a former VIP
    itself when it reads its new file. If another process removes the address, keepalived assumes that it lost its VIPs
    and releases all of them. A keepalived that starts removes only the addresses that its new file names.

    Raises NetlinkError if the kernel refuses the removal.
    """
    with IPRoute() as route:
        for index in route.link_lookup(ifname=instance.vrrp.interface):
            present = [address for place, address in present_addresses(route) if place == index]
            for address in stale_addresses(instance, present):
                try:
                    route.addr("del", index=index, address=str(address.ip), prefixlen=address.max_prefixlen)
                except NetlinkError as error:
                    # EADDRNOTAVAIL means that the kernel has already removed the VIP, so the error is ignored.
                    if error.code != errno.EADDRNOTAVAIL:
                        raise


def stale_addresses(instance: VrrpInstance, present: Iterable[Address]) -> list[Address]:
    """Return the host addresses (/32, /128) that are neither VIPs nor the amphora's own."""
    return [
        address
        for address in present
        if address.network.prefixlen == address.max_prefixlen and address not in (*instance.vips, *instance.fixed)
    ]
