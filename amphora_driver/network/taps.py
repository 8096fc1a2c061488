# SPDX-License-Identifier: Apache-2.0
"""Tap interfaces that connect virtual machines to the switch.

Invariant: a tap replaces the veth pair of a `netns` amphora. It has the same name in the switch, the same alias and the
same bridge, so that security groups, QoS and `disconnect` work without a difference. A tap is persistent: it stays
while no process has it open, and a restarted machine finds it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amphora_driver.errors import NetworkError
from amphora_driver.host import namespaces
from amphora_driver.model.network import Port
from amphora_driver.network.bridges import switch_interface_name
from amphora_driver.network.ip_allocation import Segment

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000


def ensure_tap(switch: str, port: Port, segment: Segment, owner: str) -> str:
    """Create the tap of a port if it is missing, and connect it to the port's bridge; returns its name.

    `owner` is the alias of the tap (see `Switch.disconnect_owner`).

    Raises:
        NetworkError: the kernel has no tun driver, or the network has no bridge.
    """
    name = switch_interface_name(port.id)

    def work(kernel: Any) -> None:
        if not kernel.link_lookup(ifname=name):
            _create_persistent(name)
        bridge = kernel.link_lookup(ifname=segment.bridge)
        if not bridge:
            raise NetworkError(f"connect port {port.id}", f"bridge {segment.bridge} does not exist in {switch}")
        index = kernel.link_lookup(ifname=name)[0]
        # In the switch namespace, only bridges need IP addresses. So IPv6 is disabled on the tap device.
        namespaces.write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", 1)
        kernel.link("set", index=index, mtu=port.mtu, master=bridge[0], ifalias=owner, state="up")

    namespaces.run_with_netlink(namespaces.path(switch), work)
    return name


@contextmanager
def open_tap(switch: str, port: Port) -> Iterator[int]:
    """Open the tap of a port; yields the descriptor, which the caller passes to QEMU.

    QEMU then needs no access to /dev/net/tun, the mode of which differs between distributions.

    Raises:
        NetworkError: the tap does not exist, or another process has it open.
    """
    name = switch_interface_name(port.id)
    descriptor = namespaces.run_inside(namespaces.path(switch), lambda: _open(name))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create_persistent(name: str) -> None:
    """Create a persistent tap in the namespace of this thread."""
    descriptor = _open(name)
    try:
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    except OSError as error:
        raise NetworkError(f"create the tap {name}", str(error.strerror)) from error
    finally:
        os.close(descriptor)


def _open(name: str) -> int:
    """Open a tap in the namespace of this thread; the kernel creates a missing one."""
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        remedy = "Virtual machines need the kernel's tun driver."
        raise NetworkError(f"open the tap {name}", f"{_DEVICE}: {error.strerror}", remedy) from error
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    except OSError as error:
        os.close(descriptor)
        raise NetworkError(f"open the tap {name}", str(error.strerror)) from error
    return descriptor
