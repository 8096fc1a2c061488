# SPDX-License-Identifier: Apache-2.0
"""The health manager keeps a limited number of objects, and the statuses do not depend on it."""

import pytest
from test_status_writer import HealthManager

from amphora_driver.health import status_writer
from amphora_driver.model.enums import Operating


@pytest.mark.parametrize("most", [1, 8, 1000])
def test_the_number_of_objects_in_memory_is_limited(database, monkeypatch, most):
    monkeypatch.setattr(status_writer, "_MAX_TREE_OBJECTS", most)
    fleet = HealthManager(database)
    names = "12345"
    for name in names:
        fleet.load_balancer(name)
        fleet.say(f"am{name}", name)
    fleet.flush()
    # A load balancer has four objects.
    kept = [name for name in names if fleet.writer._trees.get(f"lb{name}") is not None]
    assert len(kept) == min(max(1, most // 4), len(names))


@pytest.mark.parametrize("most", [1, 1000])
def test_a_dropped_load_balancer_is_read_again_for_a_changed_status(database, monkeypatch, most):
    monkeypatch.setattr(status_writer, "_MAX_TREE_OBJECTS", most)
    fleet = HealthManager(database)
    for name in "123":
        fleet.load_balancer(name)
        fleet.say(f"am{name}", name)
    fleet.flush()
    for word, expected in (("DOWN", Operating.ERROR), ("UP", Operating.ONLINE)):
        fleet.say("am1", "1", word=word)
        fleet.flush()
        assert fleet.operating()["me1"] == expected.value
