# SPDX-License-Identifier: Apache-2.0
"""The plan of an image rotation: the next load balancer, its completion, and pauses."""

import msgspec
import pytest

from amphora_driver.maintenance.image_rotation_plan import (
    AmphoraFacts,
    FinishItem,
    FinishRotation,
    LoadBalancerFacts,
    PauseRotation,
    RotationLimits,
    SetReason,
    StartItem,
    blocking_reason,
    missing_condition,
    next_moves,
)
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState, Selection

LIMITS = RotationLimits(settle=10.0, timeout=900.0, give_up_after=8)
OLD = AmphoraFacts(id="old", ready=True, confirmed=3, heard=True, image="one")
NEW = AmphoraFacts(id="new", ready=True, confirmed=3, heard=True, image="two")
BEFORE = LoadBalancerFacts(generation=3, applied=3, provisioning="ACTIVE", operating="ONLINE", live=(OLD,))
AFTER = msgspec.structs.replace(BEFORE, live=(NEW,), watched=20.0, well=10.0)


def rotation(state=RotationState.RUNNING, most=1, reason=None, **wanted):
    return Rotation(
        id=7,
        state=state,
        wanted=Selection(**(wanted or {"everything": True})),
        max_unavailable=most,
        asked_by="admin",
        created_at=0.0,
        changed_at=0.0,
        ended_at=None,
        reason=reason,
    )


def item(name="a", state=ItemState.RUNNING, operating="ONLINE", amphorae=("old",)):
    return RotationItem(load_balancer_id=name, place=1, state=state, amphorae=amphorae, operating=operating)


def waiting(*names):
    return [item(name, ItemState.WAITING, None) for name in names]


def but(facts, **changes):
    return msgspec.structs.replace(facts, **changes)


def seen(one, **changes):
    return msgspec.structs.replace(one, **changes)


def outcome(facts, items=None, breaker=None, **kind):
    items = items if items is not None else [item()]
    every = {one.load_balancer_id: facts for one in items}
    return next_moves(rotation(**kind), items, every, LIMITS, breaker)


# --- the next load balancer
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "most", "begun"),
    [(0, 1, ["c"]), (0, 2, ["c", "d"]), (1, 1, []), (1, 2, ["c"]), (2, 2, []), (2, 9, ["c", "d", "e"])],
)
def test_the_number_of_simultaneous_replacements_is_limited(running, most, begun):
    items = [item(name) for name in ("a", "b")[:running]] + waiting("c", "d", "e")
    facts = {one.load_balancer_id: BEFORE for one in items}
    moves = next_moves(rotation(most=most), items, facts, LIMITS)
    assert [move.item.load_balancer_id for move in moves if isinstance(move, StartItem)] == begun
    assert all(move.amphorae == ("old",) and move.operating == "ONLINE" for move in moves)


@pytest.mark.parametrize("state", [RotationState.PAUSED, RotationState.ABORTED])
def test_stopped_process_starts_nothing(state):
    assert outcome(BEFORE, waiting("a"), state=state) == []


def test_only_amphorae_of_another_image_or_flavor_are_replaced():
    (begin,) = outcome(but(BEFORE, number=2, live=(OLD, NEW)), waiting("a"))
    assert begin.amphorae == ("old",)


BUSY = [
    (but(BEFORE, generation=4), "it is being changed"),
    (but(BEFORE, settled=False), "it is being changed"),
    (but(BEFORE, retiring=frozenset({"another"})), "one of its amphorae is being replaced"),
    (but(BEFORE, number=2), "one of its amphorae is being replaced"),
    (but(BEFORE, live=(seen(OLD, ready=False),)), "one of its amphorae is being replaced"),
    (but(BEFORE, live=(seen(OLD, heard=False),)), "amphora old sends no heartbeats"),
    (BEFORE, None),
    # The amphorae were not observed for long enough: their silence is no reason to wait.
    (but(BEFORE, live=(seen(OLD, heard=None),)), None),
]


@pytest.mark.parametrize(("facts", "reason"), BUSY)
def test_a_busy_load_balancer_is_awaited(facts, reason):
    assert blocking_reason(facts) == reason
    moves = outcome(facts, waiting("a"))
    if reason is None:
        assert isinstance(moves[0], StartItem)
    else:
        assert moves == [SetReason(reason=f"waiting for load balancer a: {reason}")]
        # The reason is logged already.
        assert outcome(facts, waiting("a"), reason=moves[0].reason) == []
        (passed,) = outcome(but(facts, watched=900.0), waiting("a"))
        assert (passed.state, passed.reason) == (ItemState.SKIPPED, f"not started in 900 s: {reason}")


def test_other_load_balancers_precede_a_busy_one():
    items = waiting("a", "b")
    facts = {"a": but(BEFORE, settled=False), "b": BEFORE}
    (begin,) = next_moves(rotation(), items, facts, LIMITS)
    assert begin.item.load_balancer_id == "b"
    said = rotation(reason="waiting for load balancer a")
    assert next_moves(said, items, facts, LIMITS)[-1] == SetReason(reason=None)


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (LoadBalancerFacts(recorded=False), ItemState.SKIPPED, "it was deleted"),
        (but(BEFORE, live=(NEW,)), ItemState.DONE, "were replaced already"),
        (but(BEFORE, provisioning="ERROR", error="no quota"), ItemState.SKIPPED, "it is in ERROR: no quota"),
    ],
)
def test_some_load_balancers_are_skipped(facts, state, words):
    move = outcome(facts, waiting("a"))[0]
    assert isinstance(move, FinishItem)
    assert move.state is state
    assert words in move.reason


def test_an_open_breaker_prevents_new_replacements():
    assert outcome(BEFORE, waiting("a"), breaker="the breaker is open") == [
        SetReason(reason="no replacement starts: the breaker is open")
    ]
    assert isinstance(outcome(AFTER, breaker="the breaker is open")[0], FinishItem), "started replacements are finished"


# --- completion of a load balancer ------------------------------------------------------------------------------------

LACKING = [
    (but(AFTER, live=(OLD,)), "amphora old is not replaced yet"),
    (but(AFTER, number=2, live=(NEW, OLD)), "amphora old is not replaced yet"),
    (but(AFTER, retiring=frozenset({"old"})), "amphora old is not replaced yet"),
    (but(AFTER, live=()), "a new amphora is not ready yet"),
    (but(AFTER, number=2), "a new amphora is not ready yet"),
    (but(AFTER, live=(seen(NEW, ready=False),)), "a new amphora is not ready yet"),
    (but(AFTER, generation=4), "not all amphorae serve generation 4 yet"),
    (but(AFTER, generation=4, applied=4), "amphora new has not confirmed generation 4 yet"),
    (but(AFTER, live=(seen(NEW, heard=None),)), "amphora new sends no heartbeats"),
    (but(AFTER, live=(seen(NEW, heard=False),)), "amphora new sends no heartbeats"),
    (but(AFTER, operating="DEGRADED"), "its operating status is DEGRADED, and was ONLINE before"),
    (but(AFTER, operating="ERROR"), "its operating status is ERROR, and was ONLINE before"),
]


@pytest.mark.parametrize(("facts", "words"), LACKING)
def test_a_rotated_load_balancer_is_observed_until_complete(facts, words):
    assert missing_condition(rotation(), item(), facts) == words
    assert outcome(facts) == []
    failed, paused = outcome(but(facts, watched=900.0, error="no machine"))
    assert failed == FinishItem(item=item(), state=ItemState.FAILED, reason=f"not done in 900 s: {words} (no machine)")
    assert paused == PauseRotation(reason=f"load balancer a: {failed.reason}")


def test_a_rotation_step_ends_after_the_observation_time():
    assert outcome(but(AFTER, well=9.9)) == []
    assert outcome(AFTER) == [FinishItem(item=item(), state=ItemState.DONE)]


@pytest.mark.parametrize(
    ("before", "after", "well"),
    [("ERROR", "ERROR", True), ("DEGRADED", "ERROR", False), ("ERROR", "ONLINE", True), (None, "ONLINE", True)],
)
def test_an_operating_status_that_is_no_worse_completes_the_step(before, after, well):
    assert (missing_condition(rotation(), item(operating=before), but(AFTER, operating=after)) is None) is well


def test_the_rotation_does_not_wait_for_drains():
    facts = but(AFTER, retiring=frozenset({"old"}), draining=frozenset({"old"}))
    assert missing_condition(rotation(), item(), facts) is None


def test_a_deleted_load_balancer_is_no_failure():
    assert outcome(LoadBalancerFacts(recorded=False)) == [
        FinishItem(item=item(), state=ItemState.SKIPPED, reason="it was deleted")
    ]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (but(AFTER, live=(), provisioning="ERROR", error="quota"), "it is in ERROR: quota"),
        (but(AFTER, live=(), tried=8, error="no machine"), "8 attempts failed: no machine"),
    ],
)
def test_a_failure_pauses_the_rotation(facts, words):
    items = [item("a"), *waiting("b", "c")]
    every = {"a": facts, "b": BEFORE, "c": BEFORE}
    failed, paused = next_moves(rotation(most=3), items, every, LIMITS)
    assert (failed.state, failed.reason) == (ItemState.FAILED, words)
    assert paused == PauseRotation(reason=f"load balancer a: {words}")
    (alone,) = next_moves(rotation(RotationState.ABORTED, most=3), items[:1], every, LIMITS)
    assert alone == failed, "an aborted rotation is not paused"


def test_earlier_failures_are_repeated():
    """After a resume, the failures known at the pause are still listed."""
    assert outcome(but(AFTER, live=(), provisioning="ERROR", was_in_error=True, attempts=9, tried=1)) == []


def test_a_new_amphora_of_another_image_is_a_failure():
    failed, paused = outcome(but(AFTER, live=(seen(NEW, image="one"),)), image="two")
    assert failed.reason == "amphora new was booted from one, and not from two"
    assert isinstance(paused, PauseRotation)
    assert outcome(AFTER, image="two") == [FinishItem(item=item(), state=ItemState.DONE)]


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "items", "end"),
    [
        (RotationState.RUNNING, [], RotationState.DONE),
        (RotationState.PAUSED, [], RotationState.DONE),
        (RotationState.ABORTED, [], RotationState.ABORTED),
        (RotationState.ABORTED, [item()], None),
        (RotationState.PAUSED, [item("f", ItemState.FAILED)], None),
        (RotationState.RUNNING, [item()], None),
    ],
)
def test_the_rotation_ends_without_candidates(state, items, end):
    assert outcome(BEFORE, items, state=state) == ([] if end is None else [FinishRotation(state=end)])


def test_new_candidates_continue_the_rotation():
    assert not any(isinstance(move, FinishRotation) for move in outcome(AFTER))


# --- evacuations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "place", "what"),
    [
        ({"host": "compute1", "hosts": ("compute1", "digest")}, {"host": "digest"}, "hypervisor compute1"),
        ({"host": "compute1", "hosts": ("compute1", "digest")}, {"host": "compute1"}, "hypervisor compute1"),
        ({"zone": "az1"}, {"host": "h", "zone": "az1"}, "availability zone az1"),
    ],
)
def test_a_new_amphora_at_the_evacuated_location_is_a_failure(wanted, place, what):
    facts = but(AFTER, live=(seen(NEW, **place),))
    moves = outcome(facts, **wanted)
    assert [type(move) for move in moves] == [FinishItem, PauseRotation]
    assert moves[0].state is ItemState.FAILED
    assert f"amphora new runs on the evacuated {what}" in moves[0].reason


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ({"host": "compute1", "hosts": ("compute1", "digest")}, {"host": "other", "zone": "az1"}),
        ({"host": "compute1", "hosts": ("compute1", "digest")}, {}),
        ({"zone": "az1"}, {"host": "h", "zone": "az2"}),
        ({"zone": "az1"}, {}),
    ],
)
def test_an_evacuation_is_done_when_the_new_amphora_serves_elsewhere(wanted, place):
    (move,) = outcome(but(AFTER, live=(seen(NEW, **place),)), **wanted)
    assert move.state is ItemState.DONE
