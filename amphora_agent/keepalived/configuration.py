# SPDX-License-Identifier: Apache-2.0
"""The text of keepalived's configuration file.

Invariant: pure. Every value in the text comes from a typed one (an address, a number, a checked name); no text of a
user reaches the file. The file makes keepalived run no program, balance no load, and send to the partners only.
"""

from __future__ import annotations

from pathlib import Path

from amphora_agent.bundle import VrrpInstance
from amphora_agent.services.template_files import load_template

# keepalived repeats gratuitous ARP for the VIPs after this number of seconds. If both amphorae had the VIPs for a
# moment, the repetition corrects the neighbours' entries. Without the repetition, the correction could take eight
# seconds (arp(7)).
REFRESH_SECONDS = 1
# Without a partner, keepalived sends its advertisements to the loopback address. With an empty "unicast_peer",
# keepalived would use multicast and disturb load balancers with an equal router id.
_LOOPBACK = {4: "127.0.0.1", 6: "::1"}
_CENTISECONDS = 100


def render(instance: VrrpInstance, health: Path, released: Path) -> str:
    """Return the file. keepalived gives up the VIPs while the file ``health`` or ``released`` holds 1."""
    vrrp = instance.vrrp
    family = vrrp.local.address.version
    return load_template("keepalived.conf.j2").render(
        vrrp=vrrp,
        refresh=REFRESH_SECONDS,
        health=health,
        released=released,
        advert_interval=_interval(vrrp.advert_interval),
        peers=[peer.address for peer in vrrp.peers] or [_LOOPBACK[family]],
        vips=[vip for vip in instance.vips if vip.version == family],
        excluded=[vip for vip in instance.vips if vip.version != family],
    )


def _interval(seconds: float) -> str:
    """Return an interval in seconds, rounded to the hundredths that VRRPv3 can express (RFC 9568, 5.2.7)."""
    hundredths = max(1, round(seconds * _CENTISECONDS))
    return f"{hundredths // _CENTISECONDS}.{hundredths % _CENTISECONDS:02d}"
