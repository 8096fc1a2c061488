# SPDX-License-Identifier: Apache-2.0
"""The text of keepalived's configuration file.

Invariant: pure. Every value in the text comes from a typed one (an address, a number, a checked name); no text of a
user reaches the file. The file makes keepalived run no program, balance no load, and send to the partners only.
"""

from __future__ import annotations

from pathlib import Path

from amphora_agent.bundle import VrrpInstance
from amphora_agent.services.template_files import load_template

# Interval of repeated gratuitous ARP: after two nodes had the VIPs, a neighbour may send to the wrong one for so long.
# The holder cannot rely on the partner's advertisement. A node that has not sent to the holder lately first resolves
# the holder's link-layer address, and the kernel drops the advertisement after three unanswered requests.
# Without repetition, clients reach a node without VIPs for eight seconds, until their neighbour tables expire (Linux,
# arp(7)). Cost: while both nodes have the VIPs, clients that hear both change sides every second.
REFRESH_SECONDS = 1
# Without a partner, advertisements go to the loopback. With an empty "unicast_peer" keepalived sends them by multicast,
# where another load balancer may use the same router id (manual, "unicast_peer").
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
