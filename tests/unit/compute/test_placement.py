# SPDX-License-Identifier: Apache-2.0
"""The placement of the amphorae of one load balancer."""

import pytest

from amphora_driver.compute.interface import BootPartner, Location, Machine, MachineState, Placement
from amphora_driver.compute.placement import (
    boot_partners,
    choose_zone,
    complete_location,
    order_by_placement,
    shares_host,
)
from amphora_driver.model.amphora import Amphora, AmphoraState


def partner(host=None, zone=None):
    return BootPartner(amphora_id="partner", compute_id="p", location=Location(host=host, zone=zone))


def amphora(name, state=AmphoraState.READY, **more):
    values = {"load_balancer_id": "lb", "role": "MASTER", "management_address": None, "confirmed": 0, "plugged": ()}
    return Amphora(id=name, state=state, **{"compute_id": f"machine {name}", **values, **more})


@pytest.mark.parametrize(
    ("zones", "used", "chosen"),
    [
        ((), (), None),
        (("az1",), ("az1",), "az1"),
        (("az1", "az2"), (), "az1"),
        (("az1", "az2"), ("az1",), "az2"),
        (("az1", "az2"), ("az2",), "az1"),
        (("az1", "az2", "az3"), ("az1", "az2"), "az3"),
        (("az1", "az2"), (None,), "az1"),
    ],
)
def test_a_machine_gets_the_permitted_zone_with_the_fewest_partners(zones, used, chosen):
    assert choose_zone(zones, [partner(zone=one) for one in used]) == chosen


def test_unknown_hypervisors_count_as_different():
    assert not shares_host(Location(), [partner()])
    assert not shares_host(Location(host="a"), [partner()])
    assert shares_host(Location(host="a"), [partner(host="b"), partner(host="a")])


@pytest.mark.parametrize(
    ("compute_id", "reported", "location"),
    [
        ("machine one", Location(), Location(host="a", zone="az1")),
        ("machine one", Location(zone="az2"), Location(host="a", zone="az2")),
        ("machine one", Location(host="b", zone="az2"), Location(host="b", zone="az2")),
        ("another machine", Location(), Location()),
    ],
)
def test_the_recorded_location_completes_the_report_of_the_same_machine(compute_id, reported, location):
    machine = Machine(compute_id=compute_id, state=MachineState.BUILDING, location=reported)
    assert complete_location(machine, amphora("one", host="a", zone="az1")) == location


CANDIDATES = (
    ("same host", Location(host="a", zone="az1")),
    ("same zone", Location(host="b", zone="az1")),
    ("apart", Location(host="c", zone="az2")),
)


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (Placement.NONE, ("same host", "same zone", "apart")),
        (Placement.PREFERRED, ("apart", "same zone", "same host")),
        (Placement.REQUIRED, ("apart", "same zone")),
    ],
)
def test_candidates_are_ordered_by_their_distance_to_the_partner(placement, order):
    assert order_by_placement(CANDIDATES, [partner(host="a", zone="az1")], placement) == order


def test_without_a_partner_the_order_stays():
    assert order_by_placement(CANDIDATES, [], Placement.REQUIRED) == ("same host", "same zone", "apart")


def test_partners_are_the_booted_amphorae_that_stay():
    found = boot_partners(
        [
            amphora("new"),
            amphora("ready", host="a", zone="az1"),
            amphora("booting", AmphoraState.BOOTING, zone="az2"),
            amphora("not booted", AmphoraState.BOOTING, compute_id=None),
            amphora("retiring", AmphoraState.RETIRING, host="b"),
        ],
        "new",
    )
    assert [(one.amphora_id, one.compute_id, one.location) for one in found] == [
        ("ready", "machine ready", Location(host="a", zone="az1")),
        ("booting", "machine booting", Location(zone="az2")),
    ]
