# SPDX-License-Identifier: Apache-2.0
"""Kernel settings of the inner namespace, set before its first interface (networking/ip-sysctl.rst)."""

from __future__ import annotations

from pathlib import Path

from amphora_agent.errors import InterfaceError
from amphora_agent.network.namespace import Namespace

_ROOT = Path("/proc/sys/net")
# With these settings, HAProxy can bind a VIP before the agent adds the VIP, even while another amphora has the VIP.
_NEEDED = {"ipv4/ip_nonlocal_bind": "1", "ipv6/ip_nonlocal_bind": "1"}
_SETTINGS = {
    # The amphora takes its IPv6 addresses and routes from the agent's bundle only, so the kernel ignores router
    # advertisements.
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/autoconf": "0",
    # IPv4 accepts ICMP redirects if the setting "all" or the setting of the interface permits them, so the agent
    # disables both settings.
    "ipv6/conf/all/accept_redirects": "0",
    "ipv6/conf/default/accept_redirects": "0",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/conf/default/accept_redirects": "0",
    # The cloud assigns each address only once, and a VIP must be usable immediately. So the agent disables duplicate
    # address detection.
    "ipv6/conf/default/accept_dad": "0",
    # With arp_ignore=1, an ARP request for an address is answered only by the interface that has the address.
    # Otherwise, two interfaces on the same switch would both answer.
    "ipv4/conf/all/arp_ignore": "1",
    # Other hosts learn the sender's MAC address from an ARP request. After the VIP has moved to the other amphora, a
    # request with the VIP as the sender would direct clients back to this amphora. With arp_announce=2, the kernel uses
    # the fixed address of the interface as the sender.
    "ipv4/conf/all/arp_announce": "2",
    # The packets of a client may arrive at one interface, while the route to the client uses another interface
    # (policy_routing.py). So the reverse-path filter must be loose (2). The kernel uses the larger value of "all" and
    # of the interface, so this value overrides a strict default (1) of the host.
    "ipv4/conf/all/rp_filter": "2",
    # If clients and members share a network, the kernel must not send ICMP redirects (RFC 1812, section 5.2.7.2).
    # Otherwise, clients and members would send their packets directly to each other.
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    # With this setting, the other addresses of a subnet stay when the subnet's primary address is removed. Otherwise,
    # the kernel would remove all of them.
    "ipv4/conf/all/promote_secondaries": "1",
    # The kernel must permit accept queues that are as long as HAProxy's connection limits.
    "core/somaxconn": "65535",
    "ipv4/tcp_max_syn_backlog": "65535",
    # With SYN cookies, a flood of SYNs with forged sources does not keep real clients from connecting.
    "ipv4/tcp_syncookies": "1",
    # Each connection to a member needs a local port. So the kernel may choose every port from 1024, except the reserved
    # ports on which the amphora listens.
    "ipv4/ip_local_port_range": "1024 65535",
    "ipv4/ip_local_reserved_ports": "1025,9101-9102",
    # A closed connection keeps its local port in the state TIME-WAIT for a minute. The kernel may reuse the port
    # earlier for a new connection to the same member. TCP time stamps make the reuse safe (RFC 6191).
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
            raise InterfaceError(f"set {key}", str(error)) from error


def is_forwarding() -> bool:
    """Return whether the current namespace forwards packets of all families."""
    return all((_ROOT / key).read_text(encoding="ascii").strip() == "1" for key in _forwarding_keys())


def set_forwarding(*, wanted: bool) -> None:
    """Enable or disable forwarding here; raises InterfaceError. The rules that limit it must exist before."""
    for key in _forwarding_keys():
        file = _ROOT / key
        try:
            if file.read_text(encoding="ascii").strip() != str(int(wanted)):
                file.write_text(str(int(wanted)), encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set {key}", str(error)) from error


def _forwarding_keys() -> list[str]:
    """Return the settings that exist; a kernel may have no IPv6."""
    return [key for key in _FORWARDING if (_ROOT / key).exists()]
