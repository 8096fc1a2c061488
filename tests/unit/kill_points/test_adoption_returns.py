# SPDX-License-Identifier: Apache-2.0
"""The way back of an adoption, beside requests that change the load balancer in Octavia."""

import pytest
from adoption_lab import OURS, assert_reverted, open_lab
from killed_forks import limited
from unit.adoption.octavia_rows import LB, MEMBER

from amphora_driver.adoption.records import Step

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
KEPT = 3600.0


@pytest.fixture(scope="module")
def lab():
    with open_lab() as made:
        yield made


@pytest.fixture(autouse=True)
def processor_time():
    with limited(120):
        yield


@pytest.mark.parametrize("point", [None, "Adopt-return-done", "Adopt-return-marked", "Adopt-discard-before"])
def test_the_announcement_follows_the_recorded_return(lab, monkeypatch, point):
    """Octavia's API locks the load balancer for the announcement. The adoption must not release this lock."""
    steps = []

    def announce(_state):
        steps.append(lab.step())
        lab.change_octavia(f"UPDATE load_balancer SET provisioning_status = 'PENDING_UPDATE' WHERE id = '{LB}'")

    monkeypatch.setattr(lab.former, "announce", announce)
    lab.kept(KEPT)
    lab.revert()
    if point is not None:
        lab.die_at(point, Step.REVERTED)
    lab.rounds(Step.REVERTED)
    lab.settle()
    assert steps == [Step.DISCARD]
    assert lab.octavia() == ("amphora", "PENDING_UPDATE")


def test_the_new_amphora_serves_until_the_former_one_has_announced_the_vips(lab, monkeypatch):
    """Octavia's worker ends its update, which includes the announcement, and then releases its lock."""

    def set_status(status):
        lab.change_octavia(f"UPDATE load_balancer SET provisioning_status = '{status}' WHERE id = '{LB}'")

    monkeypatch.setattr(lab.former, "announce", lambda _state: set_status("PENDING_UPDATE"))
    lab.kept(KEPT)
    lab.revert()
    lab.rounds(Step.DISCARD)
    lab.settle()
    assert (lab.step(), lab.old_serve(), lab.new_serve()) == (Step.DISCARD, True, True)
    # The next process repeats the request.
    monkeypatch.setattr(lab.former, "announce", lambda _state: set_status("ACTIVE"))
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)


def test_the_new_amphorae_of_a_pair_are_cut_before_the_return(lab):
    lab.kept(KEPT, pair=True)
    lab.revert()
    lab.rounds(Step.RETURN)
    assert (lab.old_serve(), lab.new_serve()) == (True, False)
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)


def test_a_change_after_the_insertion_removes_the_inserted_amphorae(lab):
    lab.kept(KEPT)
    lab.revert()
    lab.die_at("Adopt-rejoin-done", Step.REVERTED)
    assert len(lab.rows()["amphora"]) == 1
    lab.change_octavia(f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'")
    lab.rounds(Step.KEEP)
    lab.settle()
    assert (lab.step(), lab.found().revert) == (Step.KEEP, False)
    rows = lab.rows()
    assert (rows["amphora"], rows["amphora_health"], rows["amphora_member_port"]) == ([], [], [])
    assert lab.octavia() == (OURS, "ACTIVE")
    assert lab.new_serve()
