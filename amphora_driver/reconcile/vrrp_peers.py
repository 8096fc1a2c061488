# SPDX-License-Identifier: Apache-2.0
"""VRRP peers of an amphora, the holder of the VIPs, and the order of pushes to a pair.

Invariant: pure. Peers use unicast only: an amphora outside the list of peers receives no advertisement and takes the
VIPs. An amphora that is being replaced therefore stays a peer until its deletion. The VIP holder gets a new amphora as
a peer before the new amphora begins to listen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amphora_driver.model.amphora import Amphora, AmphoraState, Partner
from amphora_driver.model.enums import Topology as Name
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.render.bundle import BundlePartner, BundleVrrp
from amphora_driver.topology import effective_priorities

# One VRRP router id for all pairs. RFC 9568 requires distinct ids in a multicast group, but amphorae send VRRP by
# unicast.
ROUTER_ID = 1
# VRRP priority of an amphora that has handed over its VIPs. An amphora with a low priority waits longer before it takes
# VIPs (Skew_Time in RFC 9568, section 6.1).
LAST_PRIORITY = 1
# Interface on the VIP network inside an amphora, which `render/bundle.py` lists first.
_INTERFACE = "eth1"


def find_priorities(catalogue: Any, topology: str, amphorae: Iterable[Amphora]) -> dict[str, int]:
    """Return the VRRP priorities by role for the amphorae of a load balancer; empty without VRRP.

    Args:
        catalogue: the `plugins.Catalogue` of the topologies.
        topology: the recorded topology. The amphorae may also have roles of a former topology.
    """
    present = {one.role for one in amphorae if _may_hold_vips(one) and one.plugged}
    known = (catalogue.topology(name.value) for name in Name)
    return effective_priorities(catalogue.topology(topology), present, known)


def participants(amphorae: Iterable[Amphora], priorities: Mapping[str, int]) -> tuple[Amphora, ...]:
    """Return the amphorae that take part in VRRP: their role has a priority."""
    return tuple(one for one in amphorae if one.role in priorities)


def _may_hold_vips(amphora: Amphora) -> bool:
    """Return whether an amphora can have the VIPs, or can take them."""
    return amphora.state is not AmphoraState.RETIRING or (amphora.confirmed > 0 and not amphora.dead)


def own_address(amphora: Amphora, vip: Vip) -> str | None:
    """Return the amphora's address on the VIP's network, of the VIP's family; None without one."""
    family_6 = ":" in vip.address
    for plugged in amphora.plugged:
        if plugged.key == (vip.network_id, False):
            return next((one.address for one in plugged.port.addresses if (":" in one.address) is family_6), None)
    return None


def partners(amphora: Amphora, amphorae: Iterable[Amphora], vip: Vip) -> tuple[Partner, ...]:
    """Return the VRRP peers of an amphora, in a fixed order.

    `amphorae` are the `participants`, and include the amphora itself.
    """
    found = []
    for other in amphorae:
        at = own_address(other, vip)
        # A retiring amphora that is dead or never served cannot hold the VIPs. So it is no VRRP peer.
        if other.id != amphora.id and at is not None and _may_hold_vips(other):
            found.append(Partner(id=other.id, address=at))
    return tuple(sorted(found))


def vrrp_instance(
    amphora: Amphora, amphorae: Iterable[Amphora], vip: Vip, priority: int | None, interval: float
) -> BundleVrrp | None:
    """Return the VRRP instance of an amphora; None without a priority (VIP fail-over) or an address.

    `interval` is the number of seconds between two advertisements.
    """
    own = own_address(amphora, vip)
    if priority is None or own is None:
        return None
    return BundleVrrp(
        interface=_INTERFACE,
        router_id=ROUTER_ID,
        priority=priority,
        advert_interval=interval,
        local=BundlePartner(name=amphora.id, address=own),
        peers=tuple(BundlePartner(name=one.id, address=one.address) for one in partners(amphora, amphorae, vip)),
    )


def find_silent(amphorae: Sequence[Amphora], limit: float) -> frozenset[str]:
    """Return the amphorae whose heartbeats are more than `limit` seconds older than the newest heartbeat.

    If no amphora sends heartbeats, the receiver may have failed: no amphora is silent then.
    """
    heard = [one.heard_at for one in amphorae if one.heard_at is not None]
    latest = max(heard, default=0.0)
    return frozenset(one.id for one in amphorae if one.heard_at is not None and one.heard_at < latest - limit)


def find_holder(amphorae: Sequence[Amphora], first_role: str, silent: frozenset[str]) -> str | None:
    """Return the amphora that most likely has the VIPs; None before any amphora has served.

    Without any report, the amphora with `first_role` is assumed. The last reports of silent amphorae are ignored.
    """
    # Without ports, a retiring amphora cannot hold the VIPs, even if its last heartbeats say so.
    serving = [one for one in amphorae if one.confirmed > 0 and (one.plugged or one.state is not AmphoraState.RETIRING)]
    if not serving:
        return None

    def claim(one: Amphora) -> tuple[bool, bool, bool, float, bool, bool]:
        report = None if one.id in silent else one.holds_vip
        # Of two amphorae that report the VIPs, the one with the newer heartbeat counts, because the other one may be
        # dead.
        last = (one.heard_at or 0.0) if report else 0.0
        kept = one.drains_until is None
        return (kept, one.id not in silent, report is True, last, report is not False, one.role == first_role)

    return max(serving, key=claim).id


def order_waves(targets: Sequence[Amphora], holding: str | None, silent: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """Return the waves of a push: amphorae of one wave in parallel, the waves in sequence.

    The standby is first: a configuration that it refuses never reaches the VIP holder. The holder is second. New
    amphorae are third, because the holder must have them as peers before they listen. Silent amphorae are last and
    delay no other.
    """

    def place(one: Amphora) -> int:
        if one.id in silent:
            return 3
        if one.id == holding:
            return 1
        return 0 if one.confirmed > 0 else 2

    waves = (tuple(one.id for one in targets if place(one) == number) for number in range(4))
    return tuple(wave for wave in waves if wave)
