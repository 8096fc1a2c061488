# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova`: whether Nova's scheduler can keep a new server apart from a partner."""

import pytest
from nova_answers import AMPHORA, FIND, NOTHING, failed, listed, server

from amphora_driver.compute.interface import BootPartner, Location


def partner(zone=None):
    return BootPartner(amphora_id=AMPHORA, compute_id="server-1", location=Location(zone=zone))


@pytest.mark.parametrize(
    ("zones", "used", "separate"),
    [
        (("az1", "az2"), "az1", True),
        (("az1", "az2"), "az2", True),
        (("az1", "az2"), None, False),
        (("az1",), "az1", False),
        ((), None, False),
    ],
)
def test_different_zones_keep_servers_apart_while_nova_builds_them(make_nova, zones, used, separate):
    made = make_nova((FIND, listed(server(status="BUILD"))))
    assert made.can_separate([partner(used)], zones) is separate
    assert made.script.requests == ([] if separate else [FIND])


def test_the_zones_of_the_backend_are_the_default(make_nova):
    assert make_nova(zones="az1,az2").can_separate([partner("az1")], ())


@pytest.mark.parametrize(
    "answer", [listed(server()), listed(failed()), NOTHING], ids=["it runs", "it has failed", "it does not exist"]
)
def test_the_scheduler_knows_a_partner_that_nova_has_built(make_nova, answer):
    assert make_nova((FIND, answer)).can_separate([partner()], ())


def test_each_partner_counts(make_nova):
    made = make_nova((FIND, listed(server())), (FIND, listed(server(status="BUILD"))))
    assert not made.can_separate([partner(), partner()], ())
