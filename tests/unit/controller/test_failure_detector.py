# SPDX-License-Identifier: Apache-2.0
"""The detector over a real database: what it begins, what it leaves alone, and what it says of it."""

import pytest
import sqlalchemy as sa
from detector_scene import OPTIONS, STEP, Scene

from amphora_driver.database.tables import job, object_status
from amphora_driver.database.tables_fleet import failover
from amphora_driver.failover.failure_rules import ProbeOutcome
from amphora_driver.store import circuit_breaker, failovers

pytestmark = pytest.mark.usefixtures("detector_database")


def test_a_dead_amphora_is_replaced(scene):
    scene.go(5).hush("a3").go(6)
    assert scene.replaced() == set()
    assert scene.agents.asked == ["a3"], "it is late, and asked already"
    scene.go(2)
    assert scene.replaced() == {"a3"}
    (row,) = scene.read(sa.select(failover))
    assert (row.load_balancer_id, row.amphora_id, row.cause) == ("lb3", "a3", "silent")
    assert row.silent_since == pytest.approx(scene.wall(), abs=20)
    found = {one.word: one.detail for one in scene.database.read(lambda c: failovers.list_failover_events(c, row.id))}
    assert found["found"].startswith("last heartbeat at 2")
    assert "does not answer (timed out)" in found["found"]
    assert set(scene.told) == {"controller", "reporter"}
    assert scene.operating("lb3") == ("ERROR", "amphora a3 sends no heartbeats and does not answer")
    assert [row.dirty for row in scene.read(sa.select(job).where(job.c.load_balancer_id == "lb3"))] == [True]
    scene.go(1)
    assert scene.verdicts() == {}, "an amphora in replacement is not silent"


def test_no_replacement_while_all_send_heartbeats(scene):
    scene.go(60)
    assert (scene.replaced(), scene.verdicts(), scene.told, scene.agents.asked) == (set(), {}, [], [])
    assert scene.breaker().state == "closed"
    assert (scene.breaker(circuit_breaker.SIGHT).state, scene.breaker(circuit_breaker.SIGHT).watched) == ("seeing", 20)


def test_answering_amphora_is_mute_and_has_more_time(scene):
    scene.agents.saying["a3"] = ProbeOutcome.ANSWERED
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert scene.verdicts() == {"a3": ("mute", "its agent answers; it is replaced after 30 s of silence")}
    assert scene.operating("lb3") == ("ONLINE", None), "it may well serve"
    scene.go(12)
    assert scene.replaced() == {"a3"}
    assert [row.cause for row in scene.read(sa.select(failover))] == ["mute"]


def test_amphora_without_heartbeats_counts_from_its_observation(scene):
    scene.go(5)
    scene.amphora("lb3", "new")
    scene.hush("new").go(6)
    assert scene.replaced() == set()
    scene.go(2)
    (row,) = scene.read(sa.select(failover))
    assert (row.amphora_id, row.cause) == ("new", "never_spoke")
    assert scene.operating("lb3")[0] == "ONLINE", "the other one is heard"


@pytest.mark.parametrize(("op", "state"), [("delete", "ready"), ("spares", "ready"), ("apply", "booting")])
def test_amphorae_outside_the_detection_are_ignored(scene, op, state):
    scene.balancer("other", op=op)
    scene.amphora("other", "theirs", state)
    scene.hush("theirs").go(30)
    assert scene.replaced() == set()
    assert scene.verdicts() == {}


def test_a_retiring_one_is_not_begun_with_twice(scene):
    scene.go(5).hush("a3").go(60)
    assert len(scene.read(sa.select(failover))) == 1


def test_many_at_once_open_the_breaker_and_nothing_is_replaced(scene, caplog):
    scene.go(5).hush(*(f"a{index}" for index in range(5))).go(20)
    assert scene.replaced() == set()
    found = scene.breaker()
    assert (found.state, found.reason) == ("open", "5 of 20 amphorae fell silent within 120 s, more than 20 %")
    assert found.trial_at is not None
    assert all("fail-over held: the breaker is open" in words for _, words in scene.verdicts().values())
    assert scene.operating("lb0")[0] == "ONLINE", "a blind control plane reports nothing"
    assert "circuit breaker opened, no automatic fail-over begins" in caplog.text
    scene.speaking |= {f"a{index}" for index in range(5)}
    scene.go(12)
    assert scene.breaker().state == "closed"
    assert (scene.replaced(), scene.verdicts()) == (set(), {})


def test_successive_silences_are_collected(scene):
    """Heartbeats come at different times: the first of many is not replaced before the others are silent too."""
    for index in range(3):
        scene.balancer(f"other{index}", f"b{index}")
    scene.go(5)
    for index in range(3):
        scene.hush(f"a{index}", f"b{index}").go(STEP)
    scene.go(20)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()


def test_a_trial_that_succeeds_lets_the_next_one_through(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.go(95)
    assert scene.breaker().state == "trial"
    first = scene.replaced()
    assert len(first) == 1
    scene.go(20)
    assert scene.replaced() == first, "one at a time"
    (one,) = first
    scene.served(f"lb{one[1:]}", "replacement")
    scene.go(2)
    assert len(scene.replaced()) == 1
    assert scene.replaced() != first
    assert scene.breaker().state == "trial"


def test_a_trial_that_fails_opens_it_again(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(115)
    (one,) = scene.replaced()
    scene.served(f"lb{one[1:]}", "replacement")
    scene.hush("replacement")
    scene.write(failover.update().values(served_at=None, ended_at=None))
    scene.go(10)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()


def test_an_operator_holds_it_open(scene):
    scene.database.write(lambda c: circuit_breaker.hold_breaker_open(c, "anna: switches are replaced", scene.wall()))
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "an operator holds the breaker open (anna: switches are replaced)" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR", "that it is dead is not in doubt"
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(1)
    assert scene.replaced() == {"a3"}


def test_an_operator_closes_it(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    assert scene.breaker().state == "open"
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(2)
    assert scene.breaker().state == "closed"
    assert len(scene.replaced()) == 2, "at most so many at once"
    scene.go(10)
    assert scene.breaker().state == "closed", "those that are silent are believed"
    for one in scene.replaced():
        scene.served(f"lb{one[1:]}", f"instead-of-{one}")
    scene.go(2)
    assert len(scene.read(sa.select(failover))) == 4


def test_at_most_so_many_at_once(scene):
    scene.go(5).hush("a0", "a1", "a2", "a3").go(10)
    assert len(scene.replaced()) == 2
    assert "fail-over held: 2 automatic fail-overs are in progress" in next(iter(scene.verdicts().values()))[1]
    # One that never ends holds up the others no longer than a boot may take.
    scene.go(300)
    assert len(scene.replaced()) == 4


def test_a_replacement_that_dies_too_waits_for_its_pause(scene):
    scene.go(5).hush("a3").go(8.5)
    assert scene.replaced() == {"a3"}
    scene.served("lb3", "second")
    scene.go(1).hush("second").go(10)
    assert scene.replaced() == set()
    assert "the back-off of 20 s after the last fail-over is not over" in scene.verdicts()["second"][1]
    assert scene.operating("lb3")[0] == "ERROR"
    scene.go(10)
    assert scene.replaced() == {"second"}
    words = [row.word for row in scene.read(sa.select(failovers.failover_event)) if row.amphora_id == "second"]
    assert words.count("begun") == 1


def test_both_of_a_pair_are_replaced_together(scene):
    scene.balancer("pair", "p1", "p2")
    scene.go(5).hush("p1").go(1).hush("p2").go(9)
    assert scene.replaced() == {"p1", "p2"}
    assert scene.operating("pair")[0] == "ERROR"


def test_a_silent_amphora_of_a_pair_sets_no_error(scene):
    scene.balancer("pair", "p1", "p2")
    scene.go(5).hush("p1").go(9)
    assert scene.replaced() == {"p1"}
    assert scene.operating("pair") == ("ONLINE", None)


def test_disabled_load_balancers_are_not_in_error(scene):
    scene.write(object_status.update().where(object_status.c.object_id == "lb3").values(operating="OFFLINE"))
    scene.go(5).hush("a3").go(9)
    assert scene.replaced() == {"a3"}
    assert scene.operating("lb3")[0] == "OFFLINE"


def test_without_automatic_failover_only_verdicts(tmp_path, monkeypatch):
    scene = Scene(tmp_path, monkeypatch, options=OPTIONS + "automatic = false\n")
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "[amp_failover] automatic is off" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR"
    scene.database.dispose()
