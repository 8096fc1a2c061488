# SPDX-License-Identifier: Apache-2.0
"""Failure rules: silent amphorae by the monotonic clock, only while the control plane receives heartbeats."""

import random

import pytest

from amphora_driver.failover.failure_rules import (
    DetectionLimits,
    HeartbeatWatch,
    PathEvidence,
    Phase,
    ProbeOutcome,
    ProbeResult,
    SilenceKind,
    SilentPeriod,
    judge_silence,
    network_suspected,
)
from amphora_driver.store.failovers import Cause

LIMITS = DetectionLimits(silent_after=7.0, mute_after=60.0, probe_timeout=2.0)
STEP = 0.5


class Timeline:
    """Observes amphorae and a health manager every half second; both can be made silent."""

    def __init__(self, names=("a", "b"), begin=1000.0, limits=LIMITS):
        self.watch = HeartbeatWatch(limits)
        self.limits = limits
        self.now = begin
        self.places = dict.fromkeys(names, (1, 0))
        self.beats = {"health": 1}

    def go(self, seconds, speaking=("a", "b"), hearing=("health",), step=STEP):
        for _ in range(round(seconds / step)):
            self.now += step
            for one in speaking:
                if one in self.places:
                    epoch, sequence = self.places[one] or (1, 0)
                    self.places[one] = epoch, sequence + 1
            for one in hearing:
                self.beats[one] = self.beats.get(one, 0) + 1
            self.watch.observe(self.places, self.beats, self.now)
        return self

    def silent(self):
        return set(self.watch.in_phase(Phase.SILENT, self.now))


def test_amphora_is_silent_exactly_after_the_limit():
    timeline = Timeline().go(5)
    assert timeline.go(6.5, speaking="a").silent() == set()
    assert timeline.go(0.5, speaking="a").silent() == {"b"}
    assert timeline.go(100, speaking="a").silent() == {"b"}


def test_new_heartbeat_ends_silence():
    timeline = Timeline().go(5).go(20, speaking="a")
    assert timeline.silent() == {"b"}
    assert timeline.go(STEP).silent() == set()
    assert timeline.go(6.5, speaking="a").silent() == set(), "the count restarts with the heartbeat"


def test_silence_starts_with_the_first_observation():
    timeline = Timeline()
    timeline.places = {"a": (1, 7), "b": None}
    assert timeline.go(6.5, speaking=()).silent() == set()
    assert timeline.go(1.5, speaking=()).silent() == {"a", "b"}


def test_amphora_without_heartbeats_counts_from_its_first_observation():
    timeline = Timeline().go(20)
    timeline.places["new"] = None
    assert timeline.go(6.5).silent() == set()
    assert timeline.go(1).silent() == {"new"}
    assert not timeline.watch.in_phase(Phase.SILENT, timeline.now)["new"].ever_heard


def test_a_new_epoch_counts_as_a_heartbeat():
    timeline = Timeline().go(5).go(6.5, speaking="a")
    timeline.places["b"] = (2, 0)
    assert timeline.go(3, speaking="a").silent() == set()


@pytest.mark.parametrize("seed", range(5))
def test_phases_follow_the_last_change_of_each_amphora(seed):
    """The same phases as a list of all changes gives, while amphorae speak, come and go at random."""
    chance, names = random.Random(seed), [f"a{number}" for number in range(40)]
    timeline = Timeline(names=names[:20]).go(2 * STEP, speaking=names)
    changed = dict.fromkeys(timeline.places, timeline.now)
    for _ in range(120):
        before = dict(timeline.places)
        for one in chance.sample(names, 2):
            if timeline.places.pop(one, "absent") == "absent":
                timeline.places[one] = chance.choice([None, (1, 0)])
        speaking = chance.sample(names[:30], 6)
        timeline.go(STEP, speaking=speaking)
        different = {one for one, order in timeline.places.items() if one not in before or before[one] != order}
        changed = {one: timeline.now if one in different else changed[one] for one in timeline.places}
        if any(one in before for one in different):
            assert timeline.watch.last_heartbeat_at == timeline.now
        for phase in Phase:
            reached = timeline.watch.in_phase(phase, timeline.now)
            begins = LIMITS.begins(phase)
            assert set(reached) == {one for one, at in changed.items() if timeline.now - at >= begins}
            assert [one.since for one in reached.values()] == sorted(changed[one] for one in reached)
            assert all(one.order == timeline.places[one.amphora_id] for one in reached.values())


@pytest.mark.parametrize("gap", [2.0, 8.0, 600.0, 86_400.0])
def test_a_gap_between_observations_restarts_the_count(gap):
    timeline = Timeline().go(5).go(6.5, speaking="a")
    timeline.now += gap
    timeline.go(STEP, speaking=())
    assert timeline.watch.blind_reason
    assert timeline.silent() == set()
    assert timeline.go(7, speaking="a").silent() == set()
    assert timeline.go(1.5, speaking="a").silent() == {"b"}, "detection continues after the restart"


def test_a_short_delay_is_no_gap():
    timeline = Timeline().go(5).go(6, speaking="a")
    timeline.now += 0.9
    assert timeline.go(0.5, speaking="a").silent() == {"b"}


def test_an_earlier_monotonic_time_is_ignored():
    """`time.monotonic` never goes back."""
    timeline = Timeline().go(20, speaking="a")
    timeline.now -= 100
    assert timeline.go(STEP, speaking="a").silent() == set()


@pytest.mark.parametrize("hearing", [(), ("dead",)])
def test_without_a_self_test_no_amphora_is_silent(hearing):
    timeline = Timeline()
    timeline.beats["dead"] = 5
    timeline.go(20)
    names = [one for one in hearing if one != "dead"]
    assert timeline.go(3.5, speaking=(), hearing=names).silent() == set()
    assert "no health manager" in timeline.watch.blind_reason
    assert timeline.go(100, speaking=(), hearing=names).silent() == set()
    assert timeline.go(7, speaking="a").silent() == set(), "the count starts when the health manager receives again"
    assert timeline.go(1, speaking="a").silent() == {"b"}


def test_one_receiving_health_manager_is_enough():
    timeline = Timeline().go(5, hearing=("health", "other")).go(20, speaking="a", hearing=("other",))
    assert timeline.silent() == {"b"}


def test_a_replaced_health_manager_ends_blindness():
    timeline = Timeline().go(5)
    timeline.beats = {"new": 0}
    assert timeline.go(20, speaking="a", hearing=("new",)).silent() == {"b"}


def test_the_first_observed_self_test_proves_nothing():
    timeline = Timeline()
    timeline.beats = {"left behind": 977}
    timeline.go(30, hearing=())
    assert timeline.watch.blind_reason == "no health manager proves that it receives heartbeats"
    timeline.beats = {}
    timeline.go(STEP, hearing=())
    assert timeline.watch.blind_reason == "there is no health manager"


def test_forgotten_silences_restart_the_count():
    timeline = Timeline().go(20, speaking="a")
    timeline.watch.reset("the database is away")
    assert timeline.watch.blind_reason == "the database is away"
    assert timeline.silent() == set()
    assert timeline.go(7, speaking="a").silent() == set()
    assert timeline.watch.blind_reason == ""


def test_the_seconds_of_uninterrupted_observation():
    timeline = Timeline().go(10)
    assert 9 <= timeline.watch.sees_for(timeline.now) <= 10
    timeline.go(5, hearing=())
    assert timeline.watch.sees_for(timeline.now) == 0.0


def test_removed_amphora_is_forgotten():
    timeline = Timeline().go(20, speaking="a")
    del timeline.places["b"]
    assert timeline.go(STEP).silent() == set()


@pytest.mark.parametrize("silent_after", [0.2, 2.0, 4.0, 7.0, 60.0])
def test_limits_follow_the_option(silent_after):
    limits = DetectionLimits(silent_after=silent_after)
    assert limits.begins(Phase.LATE) < silent_after
    assert limits.gap >= 1.0
    # Otherwise the end of a health manager is noticed later than the silence of its amphorae.
    assert limits.deaf_after < silent_after or silent_after < 2.0


def quiet(seconds, spoke=True, now=1000.0):
    return SilentPeriod(amphora_id="a", since=now - seconds, order=(1, 1) if spoke else None)


def answer(how, ago=1.0, now=1000.0, words="timed out", blind=None):
    return ProbeResult(outcome=how, at=now - ago, detail=words, inconclusive_at=None if blind is None else now - blind)


@pytest.mark.parametrize(
    ("silence", "spoke", "said", "kind", "cause", "dead", "words"),
    [
        (8, True, None, SilenceKind.SILENT, None, False, "waiting for the probe"),
        (8, False, None, SilenceKind.NEVER_SPOKE, None, False, "waiting for the probe"),
        (
            8,
            True,
            answer(ProbeOutcome.NO_ANSWER),
            SilenceKind.SILENT,
            Cause.SILENT,
            True,
            "does not answer (timed out)",
        ),
        (8, False, answer(ProbeOutcome.NO_ANSWER), SilenceKind.NEVER_SPOKE, Cause.NEVER_SPOKE, True, "does not answer"),
        (8, True, answer(ProbeOutcome.NO_ANSWER, ago=9), SilenceKind.SILENT, None, False, "waiting for the probe"),
        (500, True, answer(ProbeOutcome.NO_ANSWER, ago=9), SilenceKind.SILENT, Cause.SILENT, False, "does not answer"),
        (8, True, answer(ProbeOutcome.ANSWERED), SilenceKind.MUTE, None, False, "its agent answers"),
        (59, True, answer(ProbeOutcome.ANSWERED), SilenceKind.MUTE, None, False, "after 60 s"),
        (61, True, answer(ProbeOutcome.ANSWERED), SilenceKind.MUTE, Cause.MUTE, False, "its agent answers"),
        # The amphora may serve while UDP or wrong targets block its heartbeats: it must stay.
        (61, False, answer(ProbeOutcome.ANSWERED), SilenceKind.NEVER_SPOKE, Cause.MUTE, False, "its agent answers"),
        (
            8,
            True,
            answer(ProbeOutcome.ANSWERED, words="expired"),
            SilenceKind.MUTE,
            None,
            False,
            "its agent answers (expired)",
        ),
        (8, False, answer(ProbeOutcome.ANSWERED), SilenceKind.NEVER_SPOKE, None, False, "its agent answers"),
        (8, True, answer(ProbeOutcome.INCONCLUSIVE), SilenceKind.SILENT, None, False, "cannot probe"),
        (5000, True, answer(ProbeOutcome.INCONCLUSIVE), SilenceKind.SILENT, None, False, "no fail-over"),
        # The controller's network works again, without heartbeats or answers so far.
        (500, True, answer(ProbeOutcome.NO_ANSWER, blind=3), SilenceKind.SILENT, None, False, "a moment ago"),
        (
            500,
            True,
            answer(ProbeOutcome.NO_ANSWER, blind=7.5),
            SilenceKind.SILENT,
            Cause.SILENT,
            True,
            "does not answer",
        ),
        (61, True, answer(ProbeOutcome.ANSWERED, blind=3), SilenceKind.MUTE, Cause.MUTE, False, "its agent answers"),
    ],
)
def test_the_verdict_of_each_observation(silence, spoke, said, kind, cause, dead, words):
    found = judge_silence(quiet(silence, spoke), said, 1000.0, LIMITS)
    assert (found.kind, found.cause, found.dead) == (kind, cause, dead)
    assert words in found.text


def test_an_old_probe_result_requires_a_new_probe():
    assert judge_silence(quiet(500), answer(ProbeOutcome.NO_ANSWER, ago=30), 1000.0, LIMITS).stale
    assert not judge_silence(quiet(500), answer(ProbeOutcome.NO_ANSWER), 1000.0, LIMITS).stale


def last_signs(watched=2, heard=None, answered=None, witnesses=False, now=1000.0):
    """The last heartbeats and answers, as seconds before now."""
    moments = (None if ago is None else now - ago for ago in (heard, answered))
    return PathEvidence(
        watched=watched, has_witnesses=witnesses, **dict(zip(("heard_at", "answered_at"), moments, strict=True))
    )


@pytest.mark.parametrize(
    ("silence", "around", "doubted"),
    [
        # Another amphora sent a heartbeat after the due time: 3.75 s and 2 s until this is recorded.
        (8, last_signs(heard=1), False),
        (8, last_signs(heard=2.2), False),
        (8, last_signs(heard=2.3), True),
        # The last heartbeat of the other amphora is from just before the network failure.
        (8, last_signs(heard=5), True),
        (8, last_signs(), True),
        # An answer of any agent is equivalent to a heartbeat.
        (8, last_signs(answered=1), False),
        (8, last_signs(answered=7), True),
        # The witnesses were probed together with the agent.
        (8, last_signs(witnesses=True), False),
        (8, last_signs(watched=1, witnesses=True), False),
        (59, last_signs(), True),
        (60, last_signs(), False),
        (59, last_signs(watched=50), True),
        # A single amphora.
        (13, last_signs(watched=1), True),
        (14, last_signs(watched=1), False),
        (8, last_signs(watched=1, heard=1), False),
    ],
)
def test_without_any_heartbeat_the_network_is_suspected(silence, around, doubted):
    why = network_suspected(quiet(silence), around, 1000.0, LIMITS)
    assert bool(why) is doubted
    assert "[amp_failover] witnesses" in why or not doubted
    found = judge_silence(quiet(silence), answer(ProbeOutcome.NO_ANSWER), 1000.0, LIMITS, why)
    assert (found.cause is None, found.dead, why in found.text) == (doubted, not doubted, True)
    assert judge_silence(quiet(61), answer(ProbeOutcome.ANSWERED), 1000.0, LIMITS, why).cause is Cause.MUTE


def test_a_mute_time_shorter_than_the_single_amphora_limit_has_no_effect():
    limits = DetectionLimits(silent_after=7.0, mute_after=7.0)
    assert network_suspected(quiet(13), last_signs(), 1000.0, limits)
    assert not network_suspected(quiet(14), last_signs(), 1000.0, limits)


def test_time_of_the_latest_heartbeat():
    timeline = Timeline()
    timeline.go(STEP)
    assert timeline.watch.last_heartbeat_at is None, "the first observation shows no change"
    timeline.go(5)
    heard = timeline.watch.last_heartbeat_at
    assert heard == timeline.now
    timeline.places["new"] = (1, 5)
    assert timeline.go(5, speaking=()).watch.last_heartbeat_at == heard, "a new amphora has no heartbeat"
    timeline.watch.reset("whatever")
    assert timeline.watch.last_heartbeat_at is None


@pytest.mark.parametrize(
    ("silent_after", "interval", "seconds"), [(7.0, 3.0, 4.55), (30.0, 3.0, 6.5), (4.0, 0.5, 2.6), (7.0, 1.0, 3.5)]
)
def test_missed_heartbeat_counts_as_late(silent_after, interval, seconds):
    assert DetectionLimits(silent_after=silent_after, interval=interval).begins(Phase.OVERDUE) == pytest.approx(seconds)
