# SPDX-License-Identifier: Apache-2.0
"""keepalived's configuration as text.

Invariant: pure. Every value in the text comes from a typed one (an address, a number, a checked name): nothing that a
user wrote reaches it. Nothing in it makes keepalived run a program, balance load, or send to anybody but the partners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from amphora_agent.bundle import Address, Host, Interface, Vrrp

# For as long, at most, a neighbour goes to the wrong node after two have had the VIPs. That the holder hears the other
# one cannot be relied on: who has not sent to it for a while has to ask for its link-layer address first, and what it
# says waits for the answer and is lost after three questions. Unless reminded, clients then go to a node without VIPs
# for eight seconds, until their own neighbour tables doubt it (Linux, arp(7): five seconds, and three questions).
# The price: while both have the VIPs, clients that hear both change sides every second.
REFRESH_SECONDS = 1
# Without a partner the advertisements go to this machine's own loopback. With nobody named keepalived would send them
# to everybody on the network, where another load balancer may use the same number (manual, "unicast_peer").
_NOBODY = {4: "127.0.0.1", 6: "::1"}
_CENTISECONDS = 100


@dataclass(frozen=True)
class Pair:
    """What one node of several is to know: how it takes part, and what it takes part for."""

    vrrp: Vrrp
    vips: tuple[Address, ...]
    mtu: int
    fixed: tuple[Address, ...] = ()

    @property
    def first(self) -> Host:
        """The VIP that tells who has them all."""
        return self.vips[0].ip


def pair(vrrp: Vrrp | None, interfaces: Sequence[Interface]) -> Pair | None:
    """What a bundle says about VRRP; None where there is nothing to agree on."""
    if vrrp is None:
        return None
    found = next((each for each in interfaces if each.name == vrrp.interface and each.vips), None)
    return None if found is None else Pair(vrrp, found.vips, found.mtu, found.addresses)


def render(wanted: Pair, health: Path, released: Path) -> str:
    """The file.

    Args:
        health: the file that says whether HAProxy serves (`amphora_agent.services.control.Care`).
        released: the file that says that the VIPs are to go to the partner.
    """
    vrrp = wanted.vrrp
    family = vrrp.local.address.version
    return _template().render(
        name=vrrp.local.name,
        refresh=REFRESH_SECONDS,
        health=health,
        released=released,
        interface=vrrp.interface,
        router_id=vrrp.router_id,
        priority=vrrp.priority,
        advert_interval=_interval(vrrp.advert_interval),
        local=vrrp.local.address,
        peers=[peer.address for peer in vrrp.peers] or [_NOBODY[family]],
        vips=[vip for vip in wanted.vips if vip.version == family],
        excluded=[vip for vip in wanted.vips if vip.version != family],
    )


@cache
def _template() -> Template:
    environment = Environment(  # noqa: S701 (keepalived's language, not HTML)
        loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("keepalived.conf.j2")


def _interval(seconds: float) -> str:
    """VRRPv3 counts in hundredths of a second (RFC 9568, 5.2.7)."""
    hundredths = max(1, round(seconds * _CENTISECONDS))
    return f"{hundredths // _CENTISECONDS}.{hundredths % _CENTISECONDS:02d}"
