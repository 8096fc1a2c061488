# SPDX-License-Identifier: Apache-2.0
"""The placement of the amphorae of one load balancer on hypervisors and availability zones.

Invariant: no I/O. Two unknown locations count as different, because a backend on one machine reports no location.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from amphora_driver.compute.interface import BootPartner, Location, Machine, Placement
from amphora_driver.model.amphora import Amphora, AmphoraState


def boot_partners(amphorae: Iterable[Amphora], new: str | None = None) -> tuple[BootPartner, ...]:
    """Return the machines of a load balancer or of a pool that have booted and stay.

    Args:
        amphorae: the amphorae of the load balancer or of the pool.
        new: the amphora that boots, which is not its own partner; None for an amphora of another pool.
    """
    return tuple(
        BootPartner(amphora_id=one.id, compute_id=one.compute_id, location=Location(host=one.host, zone=one.zone))
        for one in amphorae
        if one.id != new and one.state is not AmphoraState.RETIRING and one.compute_id is not None
    )


def complete_location(machine: Machine, recorded: Amphora) -> Location:
    """Return the location of an amphora's machine, with the recorded value where the backend reports none.

    A backend may report host and zone later than it boots the machine. Recorded values of another machine do not count.
    """
    reported = machine.location
    if machine.compute_id != recorded.compute_id:
        return reported
    return Location(host=reported.host or recorded.host, zone=reported.zone or recorded.zone)


def shares_host(location: Location, partners: Iterable[BootPartner]) -> bool:
    """Whether a machine at this location runs on the hypervisor of a partner."""
    return location.host is not None and location.host in {one.location.host for one in partners}


def choose_zone(zones: Sequence[str], partners: Iterable[BootPartner]) -> str | None:
    """Return the permitted zone with the fewest partners, the first one of several; None without zones."""
    used = Counter(one.location.zone for one in partners)
    return min(zones, key=lambda zone: used[zone], default=None)


def order_by_placement(
    locations: Sequence[tuple[str, Location]], partners: Sequence[BootPartner], placement: Placement
) -> tuple[str, ...]:
    """Return the ids of the machines that may join the partners, the best one first.

    Machines with an equal distance to the partners keep their order.

    Args:
        locations: id and location of each candidate.
        partners: the machines that the chosen one must be kept apart from.
        placement: `required` excludes candidates on the hypervisor of a partner.
    """
    if placement is Placement.NONE:
        return tuple(one for one, _ in locations)
    zones = {one.location.zone for one in partners} - {None}
    ranked = sorted(locations, key=lambda one: (shares_host(one[1], partners), one[1].zone in zones))
    return tuple(
        one for one, location in ranked if placement is Placement.PREFERRED or not shares_host(location, partners)
    )
