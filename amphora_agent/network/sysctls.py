# SPDX-License-Identifier: Apache-2.0
"""Kernel settings of the load balancer's network namespace.

Invariant: they are set before the first interface comes in, so that none is ever there without them. Only settings that
every network namespace has of its own are named; a kernel that lacks one of the others than `_NEEDED` serves without
it. (Documentation/networking/ip-sysctl.rst of the kernel says what each one does.)
"""

from __future__ import annotations

from pathlib import Path

from amphora_agent.errors import InterfaceError
from amphora_agent.network.namespace import Namespace

_PLACE = Path("/proc/sys/net")
# HAProxy binds a VIP before it is there, and while another amphora has it.
_NEEDED = {"ipv4/ip_nonlocal_bind": "1", "ipv6/ip_nonlocal_bind": "1"}
_SETTINGS = {
    # Addresses and routes come from the bundle and nowhere else.
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/autoconf": "0",
    # IPv4 hears redirects if either "all" or the interface does.
    "ipv6/conf/all/accept_redirects": "0",
    "ipv6/conf/default/accept_redirects": "0",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/conf/default/accept_redirects": "0",
    # Whoever gives an address away has seen to it that nobody else has it, and a VIP is needed at once.
    "ipv6/conf/default/accept_dad": "0",
    # Only the interface that has an address answers for it: of two networks on one switch, the right one.
    "ipv4/conf/all/arp_ignore": "1",
    # Asks for neighbours by the fixed address. Who asks as the VIP tells everybody that it lives here, even in the
    # moment after it has moved to the other amphora.
    "ipv4/conf/all/arp_announce": "2",
    # Clients may come in by another interface than the one their route leads to (routing.py); the host's default may be
    # strict. The larger one of "all" and the interface's own holds, so this makes it at least loose.
    "ipv4/conf/all/rp_filter": "2",
    # Who forwards between clients and members of one network would tell both to do without it (RFC 1812, 5.2.7.2).
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    # Without it the kernel takes every address of a subnet away together with the first one.
    "ipv4/conf/all/promote_secondaries": "1",
    # Clients that arrive faster than HAProxy takes them in wait; HAProxy asks for a queue as long as its limits.
    "core/somaxconn": "65535",
    "ipv4/tcp_max_syn_backlog": "65535",
    # A flood of SYNs with false senders does not keep the true ones out.
    "ipv4/tcp_syncookies": "1",
    # Each connection to a member takes a port: all there are, but those on which this machine listens itself.
    "ipv4/ip_local_port_range": "1024 65535",
    "ipv4/ip_local_reserved_ports": "1025,9101-9102",
    # ... and a port that waits for stray segments of an ended connection (a minute) is taken for the next one to the
    # same member, which time stamps make safe (RFC 6191).
    "ipv4/tcp_tw_reuse": "1",
}


_FORWARDING = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")


def prepare(inner: Namespace) -> None:
    """Set what every interface that comes into the namespace finds there.

    Raises:
        InterfaceError: the kernel has no such setting, or refuses it.
    """
    inner.run(_write)


def _write() -> None:
    for key, value in {**_NEEDED, **_SETTINGS}.items():
        file = _PLACE / key
        if key not in _NEEDED and not file.exists():
            continue
        try:
            file.write_text(value, encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set {key}", str(error)) from error


def forwards() -> bool:
    """Whether the namespace that this is called in passes packets on. One family alone counts as none."""
    return all((_PLACE / key).read_text(encoding="ascii").strip() == "1" for key in _present())


def forward(*, wanted: bool) -> None:
    """Have the namespace that this is called in pass packets on, or not.

    What may pass has to be decided before (`firewall`). Router advertisements, which a router does not hear, are not
    heard here in any case.

    Raises:
        InterfaceError: the kernel refused.
    """
    for key in _present():
        file = _PLACE / key
        try:
            if file.read_text(encoding="ascii").strip() != str(int(wanted)):
                file.write_text(str(int(wanted)), encoding="ascii")
        except OSError as error:
            raise InterfaceError(f"set {key}", str(error)) from error


def _present() -> list[str]:
    """A kernel may be without IPv6."""
    return [key for key in _FORWARDING if (_PLACE / key).exists()]
