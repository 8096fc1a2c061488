# SPDX-License-Identifier: Apache-2.0
"""When nothing is replaced unasked, how that ends, and how often at most anything is."""

import pytest

from amphora_driver.failover.circuit_breaker import (
    Allowance,
    Breaker,
    Count,
    Fallen,
    Limits,
    Pauses,
    State,
    after,
    resumed,
    too_many,
)

LIMITS = Limits(percent=20.0, floor=3, most=50, window=120.0, calm=30.0, trial=600.0)
OPEN = Breaker(state=State.OPEN, since=0.0, reason="many")
TRIAL = Breaker(state=State.TRIAL, since=0.0, reason="many")
NOBODY = Count(watched=100, silent=0, recent=0)
MANY = Count(watched=100, silent=50, recent=50)


@pytest.mark.parametrize(
    ("number", "watched", "opens"),
    [
        (0, 0, False),
        (0, 100, False),
        (1, 1, False),
        (2, 2, False),  # below the floor, although it is all there is
        (3, 3, True),
        (3, 14, True),
        (3, 15, False),  # exactly the part
        (20, 100, False),
        (21, 100, True),
        (50, 1000, False),
        (51, 1000, True),  # more than the most, whatever part
        (51, 100_000, True),
        (3, 0, True),  # all of them are being replaced already
    ],
)
def test_how_many_are_too_many(number, watched, opens):
    assert bool(too_many(number, watched, LIMITS)) is opens
    count = Count(watched=watched, silent=number, recent=number)
    assert (after(Breaker(), count, LIMITS, 10.0).state is State.OPEN) is opens


def test_the_reason_has_the_numbers():
    assert too_many(30, 100, LIMITS) == "30 of 100 amphorae fell silent within 120 s, more than 20 %"
    assert too_many(60, 9000, LIMITS) == "60 amphorae fell silent within 120 s, more than 50"


@pytest.mark.parametrize("percent", [0.0, 100.0])
def test_the_ends_of_the_scale(percent):
    limits = Limits(percent=percent, floor=1)
    assert bool(too_many(1, 40, limits)) is (percent == 0.0)
    assert not too_many(40, 40, Limits(percent=100.0, floor=1))


def test_it_closes_after_calm_and_not_before():
    found = after(OPEN, NOBODY, LIMITS, 100.0)
    assert (found.state, found.calm_since) == (State.OPEN, 100.0)
    found = after(found, NOBODY, LIMITS, 129.0)
    assert found.state is State.OPEN
    assert after(found, NOBODY, LIMITS, 130.0).state is State.CLOSED


def test_calm_begins_anew_when_many_are_silent_in_between():
    found = after(after(OPEN, NOBODY, LIMITS, 100.0), MANY, LIMITS, 120.0)
    assert found.calm_since is None
    assert after(after(found, NOBODY, LIMITS, 125.0), NOBODY, LIMITS, 140.0).state is State.OPEN


def test_few_that_stay_silent_do_not_keep_it_open():
    few = Count(watched=100, silent=20, recent=50)
    found = after(after(OPEN, few, LIMITS, 1.0), few, LIMITS, 31.0)
    assert found.state is State.CLOSED


def test_a_trial_comes_after_its_time():
    assert after(OPEN, MANY, LIMITS, 599.0) == OPEN
    found = after(OPEN, MANY, LIMITS, 600.0)
    assert (found.state, found.since, found.reason) == (State.TRIAL, 600.0, "many")


@pytest.mark.parametrize(("trial", "state"), [(None, State.TRIAL), (True, State.TRIAL), (False, State.OPEN)])
def test_what_becomes_of_a_trial(trial, state):
    found = after(TRIAL, MANY, LIMITS, 700.0, trial=trial)
    assert found.state is state
    if state is State.OPEN:
        assert after(found, MANY, LIMITS, 1299.0).state is State.OPEN
        assert after(found, MANY, LIMITS, 1300.0).state is State.TRIAL


def test_a_trial_ends_in_calm():
    assert after(after(TRIAL, NOBODY, LIMITS, 10.0), NOBODY, LIMITS, 40.0).state is State.CLOSED


def test_without_calm_it_closes_at_once():
    assert after(OPEN, NOBODY, Limits(calm=0.0), 5.0).state is State.CLOSED


def names(number):
    return {f"a{each}" for each in range(number)}


def test_the_window():
    fallen = Fallen(120.0)
    everybody = names(10)
    assert fallen.note({"a0"}, everybody, 0.0) == 1
    assert fallen.note({"a0", "a1"}, everybody, 60.0) == 2
    assert fallen.note({"a0", "a1"}, everybody, 121.0) == 1, "silent for longer is not within it"
    assert fallen.note({"a0", "a1"}, everybody, 500.0) == 0


def test_who_comes_back_does_not_count_and_who_is_replaced_does():
    fallen = Fallen(120.0)
    fallen.note({"a0", "a1"}, names(10), 0.0)
    assert fallen.note({"a1"}, names(10), 10.0) == 1
    assert fallen.note(set(), names(10) - {"a1"}, 20.0) == 1, "it is retiring, and not watched any more"
    assert fallen.note(set(), names(10) - {"a1"}, 121.0) == 0


def test_who_falls_silent_again_counts_again():
    fallen = Fallen(120.0)
    fallen.note({"a0"}, names(10), 0.0)
    fallen.note(set(), names(10), 100.0)
    assert fallen.note({"a0"}, names(10), 200.0) == 1


def test_what_an_operator_accepts_does_not_count_until_it_was_heard():
    fallen = Fallen(120.0)
    fallen.note(names(5), names(10), 0.0)
    fallen.accept(names(5))
    assert fallen.note(names(5), names(10), 1.0) == 0
    assert fallen.open_count(names(5)) == 0
    assert fallen.note(names(6), names(10), 2.0) == 1
    fallen.note({"a5"}, names(10), 3.0)
    assert fallen.note(names(6), names(10), 4.0) == 6


def test_what_is_forgiven_is_over():
    fallen = Fallen(120.0)
    fallen.note(names(5), names(10), 0.0)
    fallen.forgive()
    assert fallen.note(names(5), names(10), 1.0) == 0
    assert fallen.note(names(6), names(10), 2.0) == 1


def test_pauses_double_up_to_the_longest_and_begin_anew_after_calm():
    pauses = Pauses(60.0, 200.0)
    now = 0.0
    lengths = []
    for _ in range(4):
        pauses.begun("lb", {"old"}, now)
        lengths.append(pauses.length("lb"))
        assert pauses.left("lb", "new", now) == lengths[-1]
        assert pauses.left("lb", "new", now + lengths[-1]) == 0.0
        now += lengths[-1]
    assert lengths == [60.0, 120.0, 200.0, 200.0]
    pauses.begun("lb", {"old"}, now + 201.0)
    assert pauses.length("lb") == 60.0


def test_a_partner_that_was_there_does_not_wait_and_a_replacement_does():
    pauses = Pauses(60.0, 3600.0)
    pauses.begun("lb", {"one", "two"}, 0.0)
    assert pauses.left("lb", "two", 1.0) == 0.0
    assert pauses.left("lb", "three", 1.0) == 59.0
    assert not pauses.is_replacement("lb", "two")
    assert pauses.is_replacement("lb", "three")
    assert pauses.left("another", "three", 1.0) == 0.0


@pytest.mark.parametrize(
    ("ages", "left"),
    [
        ([10.0], 50.0),
        ([100.0], 0.0),
        ([100.0, 10.0], 110.0),
        ([1000.0, 10.0], 50.0),  # calm in between
        ([-5000.0], 60.0),  # the clock was moved: no longer than the pause
    ],
)
def test_who_takes_over_knows_the_pauses(ages, left):
    pauses = Pauses(60.0, 3600.0)
    pauses.resume("lb", ages, {"old"}, 9000.0)
    assert pauses.left("lb", "any", 9000.0) == pytest.approx(left)
    assert pauses.left("lb", "old", 9000.0) == 0.0, "a partner that was there is no replacement"
    assert not pauses.is_replacement("lb", "old")


@pytest.mark.parametrize(
    ("state", "remaining", "waits"),
    [
        (State.OPEN, 250.0, 250.0),
        (State.OPEN, None, 600.0),
        (State.OPEN, -50.0, 0.0),  # it is over
        (State.OPEN, 86_400.0, 600.0),  # the clock was moved
        (State.TRIAL, 250.0, 600.0),
        (State.CLOSED, None, 600.0),
    ],
)
def test_what_another_one_left_of_the_breaker(state, remaining, waits):
    found = resumed(state, "why", Limits(trial=600.0), 9000.0, remaining)
    assert (found.state, found.reason, found.since + 600.0 - 9000.0) == (state, "why", waits)


def test_what_is_gone_takes_no_memory():
    pauses = Pauses(60.0, 3600.0)
    pauses.begun("lb", (), 0.0)
    pauses.keep({"another"})
    assert pauses.length("lb") == 0.0


@pytest.mark.parametrize(
    ("allowance", "words"),
    [
        (Allowance(), ""),
        (Allowance(automatic=False), "automatic is off"),
        (Allowance(held="anna: network work"), "an operator holds the breaker open (anna: network work)"),
        (Allowance(held=""), "the breaker is held open"),
        (Allowance(state=State.OPEN), "the breaker is open"),
        (Allowance(state=State.TRIAL), ""),
        (Allowance(state=State.TRIAL, on_trial=True), "for a trial"),
        (Allowance(late="30 of 100"), "so many are late"),
        (Allowance(going_on=4), ""),
        (Allowance(going_on=5), "5 fail-overs nobody asked for go on already"),
        (Allowance(going_on=0, most_at_once=1).taken(1), "1 fail-overs"),
        (Allowance(state=State.TRIAL).taken(1), "for a trial"),
    ],
)
def test_what_is_allowed(allowance, words):
    assert words in allowance.refusal()
    assert bool(allowance.refusal()) is bool(words)
