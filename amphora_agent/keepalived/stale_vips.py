# SPDX-License-Identifier: Apache-2.0
"""VIPs that a dead keepalived has left behind, and that nobody wants any more.

Invariant: only called while no keepalived runs, or when it has just let go of the VIPs. One that has them takes a VIP
away itself when it reads that it is not wanted; if somebody else does, it believes to have lost its VIPs and gives all
of them up. One that starts takes away what its new file names, and nothing else.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

from amphora_agent.bundle import Address
from amphora_agent.keepalived.configuration import Pair
from amphora_agent.network.pyroute2_lazy import IPRoute, NetlinkError

_SCOPE_LINK = 253


def take_away(pair: Pair) -> None:
    """Take them off the interface. Called in the inner namespace.

    Raises:
        NetlinkError: the kernel refused it.
    """
    with IPRoute() as route:
        for index in route.link_lookup(ifname=pair.vrrp.interface):
            present = [
                ipaddress.ip_interface(f"{message.get_attr(_ATTRIBUTE[message['family']])}/{message['prefixlen']}")
                for message in route.get_addr(index=index)
                if message["scope"] != _SCOPE_LINK
            ]
            for address in unwanted(pair, present):
                try:
                    route.addr("del", index=index, address=str(address.ip), prefixlen=address.max_prefixlen)
                except NetlinkError as error:
                    if error.code != errno.EADDRNOTAVAIL:  # somebody was faster
                        raise


_ATTRIBUTE = {socket.AF_INET: "IFA_LOCAL", socket.AF_INET6: "IFA_ADDRESS"}


def unwanted(pair: Pair, present: Iterable[Address]) -> list[Address]:
    """Pure: the single addresses, as VIPs are, that are neither VIPs nor the machine's own."""
    return [
        address
        for address in present
        if address.network.prefixlen == address.max_prefixlen and address not in (*pair.vips, *pair.fixed)
    ]
