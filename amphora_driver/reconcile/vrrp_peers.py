# SPDX-License-Identifier: Apache-2.0
"""Who is whose partner, who has the VIPs, and in which order a pair is given a new configuration.

Invariant: pure. Partners send each other unicast only: one that is not named hears nothing, and takes the VIPs. So an
amphora that is being replaced stays a partner for as long as it exists, and one that comes is made known to the one
that has the VIPs before it begins to listen for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from amphora_driver.model.amphora import Amphora, AmphoraState, Partner
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.render.bundle import BundlePartner, BundleVrrp

# Every pair has its own: advertisements are sent to each partner's own address, so that two pairs on one network never
# hear each other (RFC 9568 numbers virtual routers per network only because they share a multicast group).
ROUTER_ID = 1
# The priority of one whose VIPs have gone to its partner: whoever stays is quicker by nearly an advertisement
# (RFC 9568, 6.1: Skew_Time).
LAST_PRIORITY = 1
# The VIP's network is always the first interface of the inner namespace (render/bundle.py).
_INTERFACE = "eth1"


def address(amphora: Amphora, vip: Vip) -> str | None:
    """The amphora's own address on the VIP's network, of the VIP's family; None if it has none (yet)."""
    family_6 = ":" in vip.address
    for plugged in amphora.plugged:
        if plugged.port.network_id == vip.network_id:
            return next((one.address for one in plugged.port.addresses if (":" in one.address) is family_6), None)
    return None


def partners(amphora: Amphora, everyone: Iterable[Amphora], vip: Vip) -> tuple[Partner, ...]:
    """Those with which an amphora has to agree on who has the VIPs, in a fixed order.

    Args:
        amphora: whose partners.
        everyone: all amphorae of its load balancer.
        vip: the primary VIP.
    """
    found = []
    for other in everyone:
        at = address(other, vip)
        # One that was to be replaced before it ever served takes no part in anything, and one that is dead no more.
        takes_part = other.state is not AmphoraState.RETIRING or (other.confirmed > 0 and not other.dead)
        if other.id != amphora.id and at is not None and takes_part:
            found.append(Partner(id=other.id, address=at))
    return tuple(sorted(found))


def vrrp(
    amphora: Amphora, everyone: Iterable[Amphora], vip: Vip, priority: int | None, interval: float
) -> BundleVrrp | None:
    """How an amphora is one of several.

    Args:
        amphora: which one.
        everyone: all amphorae of its load balancer.
        vip: the primary VIP.
        priority: of the amphora's role; None where nobody takes over.
        interval: seconds between two advertisements.
    """
    own = address(amphora, vip)
    if priority is None or own is None:
        return None
    return BundleVrrp(
        interface=_INTERFACE,
        router_id=ROUTER_ID,
        priority=priority,
        advert_interval=interval,
        local=BundlePartner(name=amphora.id, address=own),
        peers=tuple(BundlePartner(name=one.id, address=one.address) for one in partners(amphora, everyone, vip)),
    )


def silent(everyone: Sequence[Amphora], patience: float) -> frozenset[str]:
    """Those that have said nothing for so many seconds while another of them was heard.

    Where none is heard it is we who are deaf: then nobody counts as silent.
    """
    heard = [one.heard_at for one in everyone if one.heard_at is not None]
    latest = max(heard, default=0.0)
    return frozenset(one.id for one in everyone if one.heard_at is not None and one.heard_at < latest - patience)


def holder(everyone: Sequence[Amphora], first_role: str, quiet: frozenset[str]) -> str | None:
    """Who has the VIPs, as far as anybody can tell; None if nobody serves yet.

    Args:
        everyone: all amphorae of a load balancer.
        first_role: the role that counts where nobody says anything.
        quiet: those that are silent, whose last words are not believed.
    """
    # One that is about to go and has no port any more may say what it will: nobody hears it.
    serving = [one for one in everyone if one.confirmed > 0 and (one.plugged or one.state is not AmphoraState.RETIRING)]
    if not serving:
        return None

    def claim(one: Amphora) -> tuple[bool, bool, bool, float, bool, bool]:
        said = None if one.id in quiet else one.holds_vip
        # Of two that say they have them, the last word counts: the other one may be dead, and its words old.
        last = (one.heard_at or 0.0) if said else 0.0
        kept = one.drains_until is None
        return (kept, one.id not in quiet, said is True, last, said is not False, one.role == first_role)

    return max(serving, key=claim).id


def waves(targets: Sequence[Amphora], holding: str | None, quiet: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """In which order a pair is given a configuration: those of a wave at once, one wave after the other.

    First those that stand by: what they refuse never reaches the one that serves users. Then that one. Then those that
    never served: the one with the VIPs has to know them before they listen for it, or they take it for dead. Those
    that are silent come last of all: nobody waits for them.
    """
    ordered: list[list[str]] = [[], [], [], []]
    for one in targets:
        if one.id in quiet:
            place = 3
        elif one.id == holding:
            place = 1
        else:
            place = 0 if one.confirmed > 0 else 2
        ordered[place].append(one.id)
    return tuple(tuple(wave) for wave in ordered if wave)
