# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker: when it opens and closes, trial fail-overs, back-off, and the fail-over limit."""

import pytest

from amphora_driver.failover.circuit_breaker import (
    Breaker,
    BreakerLimits,
    BreakerState,
    FailoverBackoff,
    FailoverPermit,
    SilenceCount,
    SilenceWindow,
    excess_reason,
    next_breaker,
    restore_breaker,
)

LIMITS = BreakerLimits(percent=20.0, min=3, max=50, window=120.0, close_after=30.0, trial_after=600.0)
OPEN = Breaker(state=BreakerState.OPEN, since=0.0, reason="many")
TRIAL = Breaker(state=BreakerState.TRIAL, since=0.0, reason="many")
QUIET = SilenceCount(watched=100, silent=0, recent=0)
MANY = SilenceCount(watched=100, silent=50, recent=50)


@pytest.mark.parametrize(
    ("number", "watched", "opens"),
    [
        (0, 0, False),
        (0, 100, False),
        (1, 1, False),
        (2, 2, False),  # below the minimum number, although all amphorae are silent
        (3, 3, True),
        (3, 14, True),
        (3, 15, False),  # exactly the permitted percentage
        (20, 100, False),
        (21, 100, True),
        (50, 1000, False),
        (51, 1000, True),  # above the maximum number, independent of the percentage
        (51, 100_000, True),
        (3, 0, True),  # all amphorae are being replaced
    ],
)
def test_the_number_of_silent_amphorae_that_opens_the_breaker(number, watched, opens):
    assert bool(excess_reason(number, watched, LIMITS)) is opens
    count = SilenceCount(watched=watched, silent=number, recent=number)
    assert (next_breaker(Breaker(), count, LIMITS, 10.0).state is BreakerState.OPEN) is opens


def test_the_reason_contains_the_numbers():
    assert excess_reason(30, 100, LIMITS) == "30 of 100 amphorae fell silent within 120 s, more than 20 %"
    assert excess_reason(60, 9000, LIMITS) == "60 amphorae fell silent within 120 s, more than 50"


@pytest.mark.parametrize("percent", [0.0, 100.0])
def test_a_limit_of_0_or_100_percent(percent):
    limits = BreakerLimits(percent=percent, min=1)
    assert bool(excess_reason(1, 40, limits)) is (percent == 0.0)
    assert not excess_reason(40, 40, BreakerLimits(percent=100.0, min=1))


def test_the_breaker_closes_after_the_calm_period():
    found = next_breaker(OPEN, QUIET, LIMITS, 100.0)
    assert (found.state, found.few_since) == (BreakerState.OPEN, 100.0)
    found = next_breaker(found, QUIET, LIMITS, 129.0)
    assert found.state is BreakerState.OPEN
    assert next_breaker(found, QUIET, LIMITS, 130.0).state is BreakerState.CLOSED


def test_many_silent_amphorae_restart_the_calm_period():
    found = next_breaker(next_breaker(OPEN, QUIET, LIMITS, 100.0), MANY, LIMITS, 120.0)
    assert found.few_since is None
    assert next_breaker(next_breaker(found, QUIET, LIMITS, 125.0), QUIET, LIMITS, 140.0).state is BreakerState.OPEN


def test_a_few_permanently_silent_amphorae_do_not_keep_the_breaker_open():
    few = SilenceCount(watched=100, silent=20, recent=50)
    found = next_breaker(next_breaker(OPEN, few, LIMITS, 1.0), few, LIMITS, 31.0)
    assert found.state is BreakerState.CLOSED


def test_a_trial_starts_after_the_trial_time():
    assert next_breaker(OPEN, MANY, LIMITS, 599.0) == OPEN
    found = next_breaker(OPEN, MANY, LIMITS, 600.0)
    assert (found.state, found.since, found.reason) == (BreakerState.TRIAL, 600.0, "many")


@pytest.mark.parametrize(
    ("trial", "state"), [(None, BreakerState.TRIAL), (True, BreakerState.TRIAL), (False, BreakerState.OPEN)]
)
def test_a_failed_trial_opens_the_breaker_again(trial, state):
    found = next_breaker(TRIAL, MANY, LIMITS, 700.0, trial=trial)
    assert found.state is state
    if state is BreakerState.OPEN:
        assert next_breaker(found, MANY, LIMITS, 1299.0).state is BreakerState.OPEN
        assert next_breaker(found, MANY, LIMITS, 1300.0).state is BreakerState.TRIAL


def test_a_calm_period_ends_a_trial():
    assert next_breaker(next_breaker(TRIAL, QUIET, LIMITS, 10.0), QUIET, LIMITS, 40.0).state is BreakerState.CLOSED


def test_a_calm_period_of_zero_closes_the_breaker_at_once():
    assert next_breaker(OPEN, QUIET, BreakerLimits(close_after=0.0), 5.0).state is BreakerState.CLOSED


def names(number):
    return {f"a{each}" for each in range(number)}


def test_the_silence_window_counts_recently_silent_amphorae():
    fallen = SilenceWindow(120.0)
    amphorae = names(10)
    assert fallen.observe({"a0"}, amphorae, 0.0) == 1
    assert fallen.observe({"a0", "a1"}, amphorae, 60.0) == 2
    assert fallen.observe({"a0", "a1"}, amphorae, 121.0) == 1, "amphorae that are silent for longer do not count"
    assert fallen.observe({"a0", "a1"}, amphorae, 500.0) == 0


def test_returned_amphorae_do_not_count_and_replaced_ones_do():
    fallen = SilenceWindow(120.0)
    fallen.observe({"a0", "a1"}, names(10), 0.0)
    assert fallen.observe({"a1"}, names(10), 10.0) == 1
    assert fallen.observe(set(), names(10) - {"a1"}, 20.0) == 1, "a retiring amphora is not watched"
    assert fallen.observe(set(), names(10) - {"a1"}, 121.0) == 0


def test_repeated_silence_counts_again():
    fallen = SilenceWindow(120.0)
    fallen.observe({"a0"}, names(10), 0.0)
    fallen.observe(set(), names(10), 100.0)
    assert fallen.observe({"a0"}, names(10), 200.0) == 1


def test_acknowledged_amphorae_do_not_count_until_a_heartbeat():
    fallen = SilenceWindow(120.0)
    fallen.observe(names(5), names(10), 0.0)
    fallen.accept(names(5))
    assert fallen.observe(names(5), names(10), 1.0) == 0
    assert fallen.count_unaccepted(names(5)) == 0
    assert fallen.observe(names(6), names(10), 2.0) == 1
    fallen.observe({"a5"}, names(10), 3.0)
    assert fallen.observe(names(6), names(10), 4.0) == 6


def test_a_reset_clears_the_count():
    fallen = SilenceWindow(120.0)
    fallen.observe(names(5), names(10), 0.0)
    fallen.expire_all()
    assert fallen.observe(names(5), names(10), 1.0) == 0
    assert fallen.observe(names(6), names(10), 2.0) == 1


def test_the_backoff_doubles_up_to_its_limit_and_restarts_after_calm():
    pauses = FailoverBackoff(60.0, 200.0)
    now = 0.0
    lengths = []
    for _ in range(4):
        pauses.record("lb", {"old"}, now)
        lengths.append(pauses.length("lb"))
        assert pauses.remaining("lb", "new", now) == lengths[-1]
        assert pauses.remaining("lb", "new", now + lengths[-1]) == 0.0
        now += lengths[-1]
    assert lengths == [60.0, 120.0, 200.0, 200.0]
    pauses.record("lb", {"old"}, now + 201.0)
    assert pauses.length("lb") == 60.0


def test_the_backoff_delays_replacements_and_not_original_partners():
    pauses = FailoverBackoff(60.0, 3600.0)
    pauses.record("lb", {"one", "two"}, 0.0)
    assert pauses.remaining("lb", "two", 1.0) == 0.0
    assert pauses.remaining("lb", "three", 1.0) == 59.0
    assert not pauses.is_replacement("lb", "two")
    assert pauses.is_replacement("lb", "three")
    assert pauses.remaining("another", "three", 1.0) == 0.0


@pytest.mark.parametrize(
    ("ages", "left"),
    [
        ([10.0], 50.0),
        ([100.0], 0.0),
        ([100.0, 10.0], 110.0),
        ([1000.0, 10.0], 50.0),  # a calm period lies between
        ([-5000.0], 60.0),  # after a clock jump the wait is at most one back-off
    ],
)
def test_successor_keeps_the_backoff(ages, left):
    pauses = FailoverBackoff(60.0, 3600.0)
    pauses.restore("lb", ages, {"old"}, 9000.0)
    assert pauses.remaining("lb", "any", 9000.0) == pytest.approx(left)
    assert pauses.remaining("lb", "old", 9000.0) == 0.0, "an original partner is no replacement"
    assert not pauses.is_replacement("lb", "old")


@pytest.mark.parametrize(
    ("state", "remaining", "waits"),
    [
        (BreakerState.OPEN, 250.0, 250.0),
        (BreakerState.OPEN, None, 600.0),
        (BreakerState.OPEN, -50.0, 0.0),  # the trial time has passed
        (BreakerState.OPEN, 86_400.0, 600.0),  # the clock jumped
        (BreakerState.TRIAL, 250.0, 600.0),
        (BreakerState.CLOSED, None, 600.0),
    ],
)
def test_a_controller_restores_the_breaker_of_another_controller(state, remaining, waits):
    found = restore_breaker(state, "why", BreakerLimits(trial_after=600.0), 9000.0, remaining)
    assert (found.state, found.reason, found.since + 600.0 - 9000.0) == (state, "why", waits)


def test_deleted_amphorae_use_no_memory():
    pauses = FailoverBackoff(60.0, 3600.0)
    pauses.record("lb", (), 0.0)
    pauses.retain({"another"})
    assert pauses.length("lb") == 0.0


@pytest.mark.parametrize(
    ("allowance", "words"),
    [
        (FailoverPermit(), ""),
        (FailoverPermit(automatic=False), "automatic is off"),
        (FailoverPermit(held="anna: network work"), "an operator holds the breaker open (anna: network work)"),
        (FailoverPermit(held=""), "the breaker is held open"),
        (FailoverPermit(state=BreakerState.OPEN), "the breaker is open"),
        (FailoverPermit(state=BreakerState.TRIAL), ""),
        (FailoverPermit(state=BreakerState.TRIAL, on_trial=True), "trial fail-over"),
        (FailoverPermit(late="30 of 100"), "many amphorae are late"),
        (FailoverPermit(in_progress=4), ""),
        (FailoverPermit(in_progress=5), "5 automatic fail-overs are in progress"),
        (FailoverPermit(in_progress=0, most_at_once=1).after_start(), "1 automatic fail-overs"),
        (FailoverPermit(state=BreakerState.TRIAL).after_start(), "trial fail-over"),
    ],
)
def test_the_failover_permit_states_its_refusal(allowance, words):
    assert words in allowance.refusal()
    assert bool(allowance.refusal()) is bool(words)
