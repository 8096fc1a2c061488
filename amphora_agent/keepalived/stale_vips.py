# SPDX-License-Identifier: Apache-2.0
"""Former VIPs that a keepalived left on the interface when it died.

Invariant: called only while no keepalived runs, or right after it released the VIPs. A running holder removes a former
VIP itself when it reads its new file. If another process removes the address, keepalived assumes that it lost its VIPs
and releases all of them. A keepalived that starts removes only the addresses that its new file names.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from amphora_agent.bundle import Address, VrrpInstance
from amphora_agent.network.interfaces import present_addresses
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError


def remove_stale_vips(instance: VrrpInstance) -> None:
    """Remove former VIPs from the interface, in the inner namespace.

    Raises NetlinkError if the kernel refuses the removal.
    """
    with IPRoute() as route:
        for index in route.link_lookup(ifname=instance.vrrp.interface):
            present = [address for place, address in present_addresses(route) if place == index]
            for address in stale_addresses(instance, present):
                try:
                    route.addr("del", index=index, address=str(address.ip), prefixlen=address.max_prefixlen)
                except NetlinkError as error:
                    if error.code != errno.EADDRNOTAVAIL:  # already removed
                        raise


def stale_addresses(instance: VrrpInstance, present: Iterable[Address]) -> list[Address]:
    """Return the host addresses (/32, /128) that are neither VIPs nor the amphora's own."""
    return [
        address
        for address in present
        if address.network.prefixlen == address.max_prefixlen and address not in (*instance.vips, *instance.fixed)
    ]
