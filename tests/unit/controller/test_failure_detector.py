# SPDX-License-Identifier: Apache-2.0
"""The failure detector with a real database: fail-overs, amphorae that it leaves alone, and reported states."""

import pytest
import sqlalchemy as sa
from detector_lab import OPTIONS, STEP, DetectorLab

from amphora_driver.database.tables import job, object_status
from amphora_driver.database.tables_fleet import failover
from amphora_driver.failover.failure_rules import ProbeOutcome
from amphora_driver.store import circuit_breaker, failovers

pytestmark = pytest.mark.usefixtures("detector_database")


def test_a_dead_amphora_is_replaced(lab):
    lab.go(5).silence("a3").go(6)
    assert lab.replaced() == set()
    assert lab.agents.asked == ["a3"], "the amphora is late and was probed"
    lab.go(2)
    assert lab.replaced() == {"a3"}
    (row,) = lab.read(sa.select(failover))
    assert (row.load_balancer_id, row.amphora_id, row.cause) == ("lb3", "a3", "silent")
    assert row.silent_since == pytest.approx(lab.wall(), abs=20)
    found = {one.word: one.detail for one in lab.database.read(lambda c: failovers.list_failover_events(c, row.id))}
    assert found["found"].startswith("last heartbeat at 2")
    assert "does not answer (timed out)" in found["found"]
    assert set(lab.told) == {"controller", "reporter"}
    assert lab.operating("lb3") == ("ERROR", "amphora a3 sends no heartbeats and does not answer")
    assert [row.dirty for row in lab.read(sa.select(job).where(job.c.load_balancer_id == "lb3"))] == [True]
    lab.go(1)
    assert lab.verdicts() == {}, "an amphora in replacement is not silent"


def test_no_replacement_while_all_send_heartbeats(lab):
    lab.go(60)
    assert (lab.replaced(), lab.verdicts(), lab.told, lab.agents.asked) == (set(), {}, [], [])
    assert lab.breaker().state == "closed"
    assert (lab.breaker(circuit_breaker.SIGHT).state, lab.breaker(circuit_breaker.SIGHT).watched) == ("seeing", 20)


def test_answering_amphora_is_mute_and_has_more_time(lab):
    lab.agents.saying["a3"] = ProbeOutcome.ANSWERED
    lab.go(5).silence("a3").go(20)
    assert lab.replaced() == set()
    assert lab.verdicts() == {"a3": ("mute", "its agent answers; it is replaced after 30 s of silence")}
    assert lab.operating("lb3") == ("ONLINE", None), "the amphora may still serve"
    lab.go(12)
    assert lab.replaced() == {"a3"}
    assert [row.cause for row in lab.read(sa.select(failover))] == ["mute"]


def test_amphora_without_heartbeats_counts_from_its_observation(lab):
    lab.go(5)
    lab.amphora("lb3", "new")
    lab.silence("new").go(6)
    assert lab.replaced() == set()
    lab.go(2)
    (row,) = lab.read(sa.select(failover))
    assert (row.amphora_id, row.cause) == ("new", "never_spoke")
    assert lab.operating("lb3")[0] == "ONLINE", "the other amphora sends heartbeats"


@pytest.mark.parametrize(("op", "state"), [("delete", "ready"), ("spares", "ready"), ("apply", "booting")])
def test_amphorae_outside_the_detection_are_ignored(lab, op, state):
    lab.balancer("other", op=op)
    lab.amphora("other", "theirs", state)
    lab.silence("theirs").go(30)
    assert lab.replaced() == set()
    assert lab.verdicts() == {}


def test_a_retiring_amphora_causes_no_second_failover(lab):
    lab.go(5).silence("a3").go(60)
    assert len(lab.read(sa.select(failover))) == 1


def test_many_silent_amphorae_open_the_breaker_and_none_is_replaced(lab, caplog):
    lab.go(5).silence(*(f"a{index}" for index in range(5))).go(20)
    assert lab.replaced() == set()
    found = lab.breaker()
    assert (found.state, found.reason) == ("open", "5 of 20 amphorae fell silent within 120 s, more than 20 %")
    assert found.trial_at is not None
    assert all("fail-over held: the breaker is open" in words for _, words in lab.verdicts().values())
    assert lab.operating("lb0")[0] == "ONLINE", "a blind control plane reports no ERROR"
    assert "circuit breaker opened, so no automatic fail-over begins" in caplog.text
    lab.speaking |= {f"a{index}" for index in range(5)}
    lab.go(12)
    assert lab.breaker().state == "closed"
    assert (lab.replaced(), lab.verdicts()) == (set(), {})


def test_successive_silences_are_collected(lab):
    """Heartbeat times differ: the detector waits for the others before it replaces the first of many."""
    for index in range(3):
        lab.balancer(f"other{index}", f"b{index}")
    lab.go(5)
    for index in range(3):
        lab.silence(f"a{index}", f"b{index}").go(STEP)
    lab.go(20)
    assert lab.breaker().state == "open"
    assert lab.replaced() == set()


def test_a_successful_trial_allows_the_next_trial(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    lab.go(95)
    assert lab.breaker().state == "trial"
    first = lab.replaced()
    assert len(first) == 1
    lab.go(20)
    assert lab.replaced() == first, "one trial at a time"
    (one,) = first
    lab.served(f"lb{one[1:]}", "replacement")
    lab.go(2)
    assert len(lab.replaced()) == 1
    assert lab.replaced() != first
    assert lab.breaker().state == "trial"


def test_a_failed_trial_opens_the_breaker_again(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(115)
    (one,) = lab.replaced()
    lab.served(f"lb{one[1:]}", "replacement")
    lab.silence("replacement")
    lab.write(failover.update().values(served_at=None, ended_at=None))
    lab.go(10)
    assert lab.breaker().state == "open"
    assert lab.replaced() == set()


def test_an_operator_holds_the_breaker_open(lab):
    lab.database.write(lambda c: circuit_breaker.hold_breaker_open(c, "anna: switches are replaced", lab.wall()))
    lab.go(5).silence("a3").go(20)
    assert lab.replaced() == set()
    assert "an operator holds the breaker open (anna: switches are replaced)" in lab.verdicts()["a3"][1]
    assert lab.operating("lb3")[0] == "ERROR", "the amphora is reported dead"
    lab.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", lab.wall()))
    lab.go(1)
    assert lab.replaced() == {"a3"}


def test_an_operator_closes_the_breaker(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    assert lab.breaker().state == "open"
    lab.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", lab.wall()))
    lab.go(2)
    assert lab.breaker().state == "closed"
    assert len(lab.replaced()) == 2, "the limit of simultaneous fail-overs applies"
    lab.go(10)
    assert lab.breaker().state == "closed", "the silent amphorae are acknowledged"
    for one in lab.replaced():
        lab.served(f"lb{one[1:]}", f"instead-of-{one}")
    lab.go(2)
    assert len(lab.read(sa.select(failover))) == 4


def test_the_number_of_simultaneous_failovers_is_limited(lab):
    lab.go(5).silence("a0", "a1", "a2", "a3").go(10)
    assert len(lab.replaced()) == 2
    assert "fail-over held: 2 automatic fail-overs are in progress" in next(iter(lab.verdicts().values()))[1]
    # A fail-over that never ends delays the others no longer than the boot time-out.
    lab.go(300)
    assert len(lab.replaced()) == 4


def test_a_replacement_that_fails_too_waits_for_its_backoff(lab):
    lab.go(5).silence("a3").go(8.5)
    assert lab.replaced() == {"a3"}
    lab.served("lb3", "second")
    lab.go(1).silence("second").go(10)
    assert lab.replaced() == set()
    assert "the back-off of 20 s after the last fail-over is not over" in lab.verdicts()["second"][1]
    assert lab.operating("lb3")[0] == "ERROR"
    lab.go(10)
    assert lab.replaced() == {"second"}
    words = [row.word for row in lab.read(sa.select(failovers.failover_event)) if row.amphora_id == "second"]
    assert words.count("begun") == 1


def test_both_amphorae_of_a_pair_are_replaced_together(lab):
    lab.balancer("pair", "p1", "p2")
    lab.go(5).silence("p1").go(1).silence("p2").go(9)
    assert lab.replaced() == {"p1", "p2"}
    assert lab.operating("pair")[0] == "ERROR"


def test_a_silent_amphora_of_a_pair_sets_no_error(lab):
    lab.balancer("pair", "p1", "p2")
    lab.go(5).silence("p1").go(9)
    assert lab.replaced() == {"p1"}
    assert lab.operating("pair") == ("ONLINE", None)


def test_disabled_load_balancers_are_not_in_error(lab):
    lab.write(object_status.update().where(object_status.c.object_id == "lb3").values(operating="OFFLINE"))
    lab.go(5).silence("a3").go(9)
    assert lab.replaced() == {"a3"}
    assert lab.operating("lb3")[0] == "OFFLINE"


def test_without_automatic_failover_the_detector_only_records_verdicts(tmp_path, monkeypatch):
    lab = DetectorLab(tmp_path, monkeypatch, options=OPTIONS + "automatic = false\n")
    lab.go(5).silence("a3").go(20)
    assert lab.replaced() == set()
    assert "[amp_failover] automatic is off" in lab.verdicts()["a3"][1]
    assert lab.operating("lb3")[0] == "ERROR"
    lab.database.dispose()
