# SPDX-License-Identifier: Apache-2.0
"""Kernel settings of the inner namespace, set before its first interface (networking/ip-sysctl.rst)."""

from __future__ import annotations

import os
from pathlib import Path

from amphora_agent.errors import InterfaceError
from amphora_agent.network.namespace import Namespace

_ROOT = Path("/proc/sys/net")
# HAProxy may bind a VIP before this amphora has it, even while another amphora has it.
_NEEDED = {"ipv4/ip_nonlocal_bind": "1", "ipv6/ip_nonlocal_bind": "1"}
_SETTINGS = {
    # IPv6 addresses and routes come from the bundle only, so the kernel ignores router advertisements.
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/autoconf": "0",
    # IPv4 accepts ICMP redirects if "all" or the interface permits them, so both are disabled.
    "ipv6/conf/all/accept_redirects": "0",
    "ipv6/conf/default/accept_redirects": "0",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/conf/default/accept_redirects": "0",
    # The cloud assigns each address once, and duplicate address detection would delay the use of a VIP.
    "ipv6/conf/default/accept_dad": "0",
    # 1: only the interface with the address answers an ARP request. Otherwise, two interfaces on one switch would both
    # answer.
    "ipv4/conf/all/arp_ignore": "1",
    # 2: ARP requests have the interface's fixed address as their sender. A VIP as the sender would direct clients back
    # to this amphora after the VIP has moved away.
    "ipv4/conf/all/arp_announce": "2",
    # 2: the kernel accepts a client's packets at any interface, because the route to the client may use another
    # interface (policy_routing.py). The larger value of "all" and of the interface applies.
    "ipv4/conf/all/rp_filter": "2",
    # Redirects would make clients and members in one network send packets directly to each other (RFC 1812, section
    # 5.2.7.2).
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    # 1: the kernel keeps the other addresses of a subnet if the primary address is removed. By default, the kernel
    # removes these addresses, too.
    "ipv4/conf/all/promote_secondaries": "1",
    # HAProxy requests accept queues as long as its connection limits. The kernel shortens longer queues to these
    # values.
    "core/somaxconn": "65535",
    "ipv4/tcp_max_syn_backlog": "65535",
    # SYN cookies let clients connect during a flood of SYNs with forged sources.
    "ipv4/tcp_syncookies": "1",
    # Each connection to a member needs a local port: any port from 1024, except those on which the amphora listens.
    "ipv4/ip_local_port_range": "1024 65535",
    "ipv4/ip_local_reserved_ports": "1025,9101-9102",
    # A closed connection keeps its local port for a minute (TIME-WAIT). TCP time stamps make an earlier reuse safe (RFC
    # 6191).
    "ipv4/tcp_tw_reuse": "1",
}


_FORWARDING = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")


def apply_settings(inner: Namespace) -> None:
    """Set all settings in the namespace; raises InterfaceError."""
    inner.run(_write)


def _write() -> None:
    for key, value in {**_NEEDED, **_SETTINGS}.items():
        file = _ROOT / key
        if key not in _NEEDED and not file.exists():
            continue
        try:
            file.write_text(value, encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set the kernel setting {key}", str(error)) from error


class Forwarding:
    """Reads whether a namespace forwards packets of all families.

    Each change of a member reads this. Files that were opened in a namespace belong to the namespace (sysctl_net.c of
    the kernel), so each thread can read them.
    """

    def __init__(self, inner: Namespace) -> None:
        self._files = inner.run(lambda: [(_ROOT / key).open("rb", buffering=0) for key in _forwarding_keys()])

    def is_enabled(self) -> bool:
        return all(os.pread(file.fileno(), 1, 0) == b"1" for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def set_forwarding(*, wanted: bool) -> None:
    """Enable or disable forwarding here; raises InterfaceError. The rules that limit it must exist before."""
    for key in _forwarding_keys():
        file = _ROOT / key
        try:
            if file.read_text(encoding="ascii").strip() != str(int(wanted)):
                file.write_text(str(int(wanted)), encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set the kernel setting {key}", str(error)) from error


def _forwarding_keys() -> list[str]:
    """Return the settings that exist; a kernel may have no IPv6."""
    return [key for key in _FORWARDING if (_ROOT / key).exists()]
