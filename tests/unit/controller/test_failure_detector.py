# SPDX-License-Identifier: Apache-2.0
"""The failure detector with a real database: fail-overs, amphorae that it leaves alone, and reported states."""

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
    assert scene.agents.asked == ["a3"], "the amphora is late and was probed"
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
    assert scene.operating("lb3") == ("ONLINE", None), "the amphora may still serve"
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
    assert scene.operating("lb3")[0] == "ONLINE", "the other amphora sends heartbeats"


@pytest.mark.parametrize(("op", "state"), [("delete", "ready"), ("spares", "ready"), ("apply", "booting")])
def test_amphorae_outside_the_detection_are_ignored(scene, op, state):
    scene.balancer("other", op=op)
    scene.amphora("other", "theirs", state)
    scene.hush("theirs").go(30)
    assert scene.replaced() == set()
    assert scene.verdicts() == {}


def test_a_retiring_amphora_causes_no_second_failover(scene):
    scene.go(5).hush("a3").go(60)
    assert len(scene.read(sa.select(failover))) == 1


def test_many_silent_amphorae_open_the_breaker_and_none_is_replaced(scene, caplog):
    scene.go(5).hush(*(f"a{index}" for index in range(5))).go(20)
    assert scene.replaced() == set()
    found = scene.breaker()
    assert (found.state, found.reason) == ("open", "5 of 20 amphorae fell silent within 120 s, more than 20 %")
    assert found.trial_at is not None
    assert all("fail-over held: the breaker is open" in words for _, words in scene.verdicts().values())
    assert scene.operating("lb0")[0] == "ONLINE", "a blind control plane reports no ERROR"
    assert "circuit breaker opened, so no automatic fail-over begins" in caplog.text
    scene.speaking |= {f"a{index}" for index in range(5)}
    scene.go(12)
    assert scene.breaker().state == "closed"
    assert (scene.replaced(), scene.verdicts()) == (set(), {})


def test_successive_silences_are_collected(scene):
    """Heartbeat times differ: the detector waits for the others before it replaces the first of many."""
    for index in range(3):
        scene.balancer(f"other{index}", f"b{index}")
    scene.go(5)
    for index in range(3):
        scene.hush(f"a{index}", f"b{index}").go(STEP)
    scene.go(20)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()


def test_a_successful_trial_allows_the_next_trial(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.go(95)
    assert scene.breaker().state == "trial"
    first = scene.replaced()
    assert len(first) == 1
    scene.go(20)
    assert scene.replaced() == first, "one trial at a time"
    (one,) = first
    scene.served(f"lb{one[1:]}", "replacement")
    scene.go(2)
    assert len(scene.replaced()) == 1
    assert scene.replaced() != first
    assert scene.breaker().state == "trial"


def test_a_failed_trial_opens_the_breaker_again(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(115)
    (one,) = scene.replaced()
    scene.served(f"lb{one[1:]}", "replacement")
    scene.hush("replacement")
    scene.write(failover.update().values(served_at=None, ended_at=None))
    scene.go(10)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()


def test_an_operator_holds_the_breaker_open(scene):
    scene.database.write(lambda c: circuit_breaker.hold_breaker_open(c, "anna: switches are replaced", scene.wall()))
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "an operator holds the breaker open (anna: switches are replaced)" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR", "the amphora is reported dead"
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(1)
    assert scene.replaced() == {"a3"}


def test_an_operator_closes_the_breaker(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    assert scene.breaker().state == "open"
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(2)
    assert scene.breaker().state == "closed"
    assert len(scene.replaced()) == 2, "the limit of simultaneous fail-overs applies"
    scene.go(10)
    assert scene.breaker().state == "closed", "the silent amphorae are acknowledged"
    for one in scene.replaced():
        scene.served(f"lb{one[1:]}", f"instead-of-{one}")
    scene.go(2)
    assert len(scene.read(sa.select(failover))) == 4


def test_the_number_of_simultaneous_failovers_is_limited(scene):
    scene.go(5).hush("a0", "a1", "a2", "a3").go(10)
    assert len(scene.replaced()) == 2
    assert "fail-over held: 2 automatic fail-overs are in progress" in next(iter(scene.verdicts().values()))[1]
    # A fail-over that never ends delays the others no longer than the boot time-out.
    scene.go(300)
    assert len(scene.replaced()) == 4


def test_a_replacement_that_fails_too_waits_for_its_backoff(scene):
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


def test_both_amphorae_of_a_pair_are_replaced_together(scene):
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


def test_without_automatic_failover_the_detector_only_records_verdicts(tmp_path, monkeypatch):
    scene = Scene(tmp_path, monkeypatch, options=OPTIONS + "automatic = false\n")
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "[amp_failover] automatic is off" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR"
    scene.database.dispose()
