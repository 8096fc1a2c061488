# SPDX-License-Identifier: Apache-2.0
"""Cables from the switch into virtual machines.

Invariant: a tap is to a port what a veth pair is where amphorae are namespaces: it has the same name in the switch, the
same alias, and hangs on the same bridge, so that everything else of the switch (security groups, QoS, who is
disconnected) knows no difference. It stays when nobody has it open: a machine that starts again finds it.
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
# linux/if_tun.h
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000


def ensure_tap(switch: str, port: Port, segment: Segment, owner: str) -> str:
    """Have a tap on the port's bridge, made if it is missing; its name.

    Args:
        switch: the switch namespace.
        port: whose tap.
        segment: the port's network.
        owner: written on it; see `Switch.disconnect_owner`.

    Raises:
        NetworkError: the kernel has no taps, or the network no bridge.
    """
    name = switch_interface_name(port.id)

    def work(kernel: Any) -> None:
        if not kernel.link_lookup(ifname=name):
            _create_persistent(name)
        bridge = kernel.link_lookup(ifname=segment.bridge)
        if not bridge:
            raise NetworkError(f"connect port {port.id}", f"there is no bridge {segment.bridge} in {switch}")
        index = kernel.link_lookup(ifname=name)[0]
        # Of a tap no address is to answer: what the switch says, it says from its bridges.
        namespaces.write_sysctl(f"net/ipv6/conf/{name}/disable_ipv6", 1)
        kernel.link("set", index=index, mtu=port.mtu, master=bridge[0], ifalias=owner, state="up")

    namespaces.run_with_netlink(namespaces.path(switch), work)
    return name


@contextmanager
def open_tap(switch: str, port: Port) -> Iterator[int]:
    """Open the port's tap; yields a descriptor for the process that is given the interface.

    That process needs no right of its own to /dev/net/tun, whose mode differs between distributions.

    Raises:
        NetworkError: there is no such tap, or another process has it open.
    """
    name = switch_interface_name(port.id)
    descriptor = namespaces.run_inside(namespaces.path(switch), lambda: _open(name))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create_persistent(name: str) -> None:
    """In the namespace of this thread."""
    descriptor = _open(name)
    try:
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    except OSError as error:
        raise NetworkError(f"make the tap {name}", str(error.strerror)) from error
    finally:
        os.close(descriptor)


def _open(name: str) -> int:
    """Attach to a tap in the namespace of this thread; the kernel makes one that is missing."""
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
