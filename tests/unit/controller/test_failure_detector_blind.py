# SPDX-License-Identifier: Apache-2.0
"""The failure detector with failures outside the amphorae: blindness, clock jumps, short outages, mass failures."""

import logging

import pytest
import sqlalchemy as sa
from detector_lab import small

from amphora_driver.database.tables import amphora, duty, job
from amphora_driver.database.tables_fleet import failover, silent_amphora
from amphora_driver.errors import StoreError
from amphora_driver.failover import failure_detector as detecting
from amphora_driver.failover.failure_rules import ProbeOutcome
from amphora_driver.queue.jobs import acquire_duty
from amphora_driver.store import amphorae, circuit_breaker, failovers, silent_amphorae

pytestmark = pytest.mark.usefixtures("detector_database")


def test_blind_control_plane_replaces_no_amphora(lab):
    lab.go(5)
    lab.hearing = False
    silent = lab.speaking.copy()
    lab.silence(*silent).go(60)
    assert (lab.replaced(), lab.verdicts()) == (set(), {})
    assert lab.breaker(circuit_breaker.SIGHT).state == "blind"
    assert lab.breaker().state == "closed", "a blind detector does not open the breaker"
    lab.hearing = True
    lab.speaking |= silent
    lab.go(30)
    assert (lab.replaced(), lab.agents.asked) == (set(), [])


def test_breaker_stays_open_without_observations(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    lab.hearing = False
    lab.go(30)
    lab.hearing = True
    lab.go(40)
    assert lab.breaker().state == "open"


@pytest.mark.parametrize("shift", [600.0, 86_400.0, -600.0, -86_400.0])
def test_moved_clock_causes_and_hides_no_failure(lab, shift):
    lab.go(5)
    lab.ahead = shift
    lab.go(30)
    assert (lab.replaced(), lab.verdicts()) == (set(), {})
    lab.silence("a3").go(10)
    assert lab.replaced() == {"a3"}


def test_a_suspended_detector_restarts_its_timers(lab):
    lab.go(5).silence("a3").go(6)
    lab.now += 600
    lab.go(6)
    assert lab.replaced() == set()
    lab.go(4)
    assert lab.replaced() == {"a3"}


def test_the_detector_restarts_its_timers_after_a_database_outage(lab, monkeypatch):
    lab.go(5).silence("a3").go(6)

    def away(_work):
        raise StoreError("read", "away")

    with monkeypatch.context() as patched:
        patched.setattr(lab.database, "read", away)
        with pytest.raises(StoreError):
            lab.detector.run_once()
        lab.detector._suspend("the database is away")
    lab.go(6)
    assert lab.replaced() == set()
    lab.go(5)
    assert lab.replaced() == {"a3"}


def test_only_the_duty_owner_observes_and_a_new_owner_restarts_its_timers(lab):
    lab.go(5).silence("a3").go(6)
    other = lab.made("other")
    lab.go(4, other)
    assert lab.read(sa.select(duty.c.owner)) == [("me",)]
    lab.detector.release_duty("it ends")
    lab.go(7, other)
    assert lab.replaced() == set()
    lab.go(3, other)
    assert lab.replaced() == {"a3"}


def test_a_former_duty_owner_starts_no_failover(lab):
    lab.go(5)
    lab.write(
        duty.update().where(duty.c.name == silent_amphorae.DUTY).values(owner="other", leased_until=lab.wall() + 59)
    )
    lab.silence("a3").go(20)
    assert lab.replaced() == set()
    held = lab.database.write(lambda c: silent_amphorae.lock_still_silent(c, "lb4", {"a4": (1, lab.sequence)}, "me"))
    assert held == set()
    assert not acquire_duty(lab.database, silent_amphorae.DUTY, "me", 1.0)


def test_a_heartbeat_just_before_the_failover_prevents_it(lab):
    lab.go(5)
    place = (1, lab.sequence)

    def still(**orders):
        return lab.database.write(lambda c: silent_amphorae.lock_still_silent(c, "lb4", orders, "me"))

    assert still(a4=place) == {"a4"}
    assert still(a4=(1, lab.sequence - 1)) == set()
    assert still(a4=None) == set()
    lab.write(amphora.update().where(amphora.c.id == "a4").values(state="retiring"))
    assert still(a4=place) == set()


def test_a_fleet_without_failures_causes_no_writes(lab, monkeypatch):
    lab.agents.saying["a3"] = ProbeOutcome.ANSWERED
    lab.go(5).silence("a3").go(15)
    written = []
    monkeypatch.setattr(silent_amphorae, "write_silent_amphorae", lambda *_: written.append("silence"))
    monkeypatch.setattr(circuit_breaker, "write_breaker_row", lambda *_: written.append("breaker"))
    lab.go(10)
    assert written == []


def test_a_new_duty_owner_cleans_up_rows_of_the_former_owner(lab):
    row = {"amphora_id": "gone", "load_balancer_id": "lb", "kind": "silent", "since": 1.0}
    lab.write(silent_amphora.insert().values(**row))
    lab.go(1)
    assert lab.verdicts() == {}


def test_an_open_breaker_survives_a_change_of_the_duty_owner(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    lab.detector.release_duty("it ends")
    other = lab.made("other")
    lab.go(20, other)
    assert lab.breaker().state == "open"
    assert lab.replaced() == set()


def test_a_silent_amphora_that_answers_a_probe_is_not_replaced(lab):
    """UDP is blocked or [amp_health] targets are wrong: the amphora still serves clients."""
    lab.go(5)
    lab.amphora("lb3", "new")
    lab.agents.saying["new"] = ProbeOutcome.ANSWERED
    lab.silence("new").go(28)
    assert lab.replaced() == set()
    lab.go(5)
    assert [(row.amphora_id, row.cause) for row in lab.read(sa.select(failover))] == [("new", "mute")]
    lab.go(1)
    (found,) = (one for one in lab.database.read(lambda c: amphorae.load_amphorae(c, "lb3")) if one.id == "new")
    assert not found.dead


def test_network_failure_with_few_amphorae_causes_no_failover(tmp_path, monkeypatch):
    """A switch failure is not visible to the controller: probes time out without an error."""
    lab = small(tmp_path, monkeypatch, 2)
    lab.go(5).silence("a0", "a1").go(28)
    assert lab.replaced() == set()
    assert "[amp_failover] witnesses is empty" in lab.verdicts()["a0"][1]
    sight = lab.breaker(circuit_breaker.SIGHT)
    assert (sight.state, "no amphora sends heartbeats" in sight.reason) == ("blind", True)
    assert lab.operating("lb0")[0] == "ONLINE"
    lab.speaking |= {"a0", "a1"}
    lab.go(10)
    assert (lab.replaced(), lab.verdicts(), lab.breaker(circuit_breaker.SIGHT).state) == (set(), {}, "seeing")
    lab.silence("a0", "a1").go(35)
    assert lab.replaced() == {"a0", "a1"}, "after mute_after the amphora counts as dead"
    lab.database.dispose()


def test_in_a_small_fleet_the_first_failover_waits_until_the_others_are_due(tmp_path, monkeypatch):
    lab = small(tmp_path, monkeypatch, 2)
    lab.go(5).silence("a0").go(3).silence("a1").go(20)
    assert lab.replaced() == set()
    lab.database.dispose()


@pytest.mark.parametrize("options", ["", "witnesses = 203.0.113.1:22\n"])
def test_in_a_small_fleet_a_single_dead_amphora_is_replaced_at_once(tmp_path, monkeypatch, options):
    lab = small(tmp_path, monkeypatch, 2, options)
    lab.go(5).silence("a0").go(8)
    assert lab.replaced() == {"a0"}
    lab.database.dispose()


def test_reachable_witnesses_allow_both_failovers_at_once(tmp_path, monkeypatch):
    """The probes have shown that the network reaches a witness."""
    lab = small(tmp_path, monkeypatch, 2, "witnesses = 203.0.113.1:22\n")
    lab.go(5).silence("a0", "a1").go(8)
    assert lab.replaced() == {"a0", "a1"}
    lab.database.dispose()


def test_the_only_amphora_is_replaced_after_twice_the_limit(tmp_path, monkeypatch):
    lab = small(tmp_path, monkeypatch, 1)
    lab.go(5).silence("a0").go(12)
    assert lab.replaced() == set()
    lab.go(3)
    assert lab.replaced() == {"a0"}
    lab.database.dispose()


def test_detection_continues_during_a_mass_failure(tmp_path, monkeypatch):
    """One round writes a bounded number of rows in few statements, because detection waits meanwhile."""
    lab = small(tmp_path, monkeypatch, 0, "probe_timeout = 300\n")
    row = {"role": "STANDALONE", "state": "ready", "heartbeat_key": b"", "created_at": 1.0, "ready_at": 1.0}
    names = [f"m{index:04}" for index in range(1000)]
    wanted = {"op": "apply", "generation": 1, "committed": 1, "dirty": False}
    lab.database.write(
        lambda c: (
            c.execute(job.insert(), [{"load_balancer_id": f"of-{one}", **wanted} for one in names]),
            c.execute(amphora.insert(), [{"id": one, "load_balancer_id": f"of-{one}", **row} for one in names]),
        )
    )
    sizes = []
    real = silent_amphorae.write_silent_amphorae

    def counting(connection, changed, gone):
        statements = []
        sa.event.listen(connection, "before_cursor_execute", lambda *_: statements.append(1))
        real(connection, changed, gone)
        sizes.append((len(changed) + len(gone), len(statements)))

    monkeypatch.setattr(silent_amphorae, "write_silent_amphorae", counting)
    lab.go(5 + 7 + 6)
    assert len(lab.verdicts()) == 1000
    assert max(rows for rows, _ in sizes) == 200
    assert max(statements for _, statements in sizes) <= 2
    assert lab.breaker().state == "open"
    lab.speaking |= set(names)
    lab.go(7)
    assert lab.verdicts() == {}
    lab.database.dispose()


def short_outage(lab):
    """The database is unavailable for a moment; no other process takes the duty."""
    lab.detector._suspend("the database is away")


def test_acknowledgements_survive_an_interruption(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    lab.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", lab.wall()))
    lab.go(2)
    assert len(lab.replaced()) == 2
    short_outage(lab)
    lab.go(15)
    for one in lab.replaced():
        lab.served(f"lb{one[1:]}", f"instead-of-{one}")
    lab.go(10)
    assert lab.breaker().state == "closed"
    assert len(lab.read(sa.select(failover))) == 4


def test_an_operator_closes_the_breaker_during_an_interruption(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(20)
    short_outage(lab)
    lab.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", lab.wall()))
    lab.go(15)
    assert lab.breaker().state == "closed"


def test_a_trial_survives_a_short_outage(lab, caplog):
    caplog.set_level(logging.INFO)
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(115)
    first = lab.replaced()
    assert (len(first), lab.breaker().state) == (1, "trial")
    short_outage(lab)
    lab.go(20)
    assert lab.replaced() == first, "one trial at a time"
    assert lab.breaker().state == "trial"
    assert "succeeded" not in caplog.text
    # The trial time passes while no amphora can become silent: the trial has not succeeded.
    lab.now += lab.detector._boot_timeout
    lab.go(5)
    assert "succeeded" not in caplog.text
    lab.go(10)
    assert lab.breaker().state == "open"
    assert "succeeded" not in caplog.text


@pytest.mark.parametrize("shift", [0.0, -86_400.0])
def test_a_new_duty_owner_waits_for_the_remaining_trial_time(lab, shift):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(8)
    assert lab.breaker().state == "open"
    lab.go(80)
    lab.detector.release_duty("it ends")
    lab.ahead = shift
    other = lab.made("other")
    lab.write(duty.update().values(leased_until=0.0))
    lab.go(15, other)
    assert lab.breaker().state == "open"
    lab.go(10, other)
    assert lab.breaker().state == ("open" if shift else "trial")
    lab.go(100, other)
    assert lab.breaker().state == "trial", "the wait is at most one trial time"


def test_a_new_duty_owner_awaits_a_running_trial(lab):
    lab.go(5).silence(*(f"a{index}" for index in range(6))).go(115)
    first = lab.replaced()
    lab.detector.release_duty("it ends")
    lab.go(30, lab.made("other"))
    assert (lab.breaker().state, lab.replaced()) == ("trial", first)


def test_both_failovers_of_a_pair_count_as_one_failure(lab):
    """A new duty owner does not count the two rows as two failures in sequence."""
    lab.balancer("pair", "p1", "p2")
    lab.go(5).silence("p1", "p2").go(9)
    assert lab.replaced() == {"p1", "p2"}
    assert len(lab.read(sa.select(failover))) == 2
    found = lab.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))
    assert len(found["pair"].ages) == 1
    other = lab.made("other")
    lab.detector.release_duty("it ends")
    lab.go(1, other)
    assert other._backoff.length("pair") == 20.0


def test_former_partner_is_no_replacement(lab):
    lab.balancer("pair", "p1", "p2")
    lab.go(5).silence("p1").go(9)
    assert lab.replaced() == {"p1"}
    lab.write(
        amphora.insert().values(
            id="p3", load_balancer_id="pair", role="BACKUP", state="ready", heartbeat_key=b"", created_at=lab.wall()
        )
    )
    # A spare that was taken is older than these rows.
    lab.amphora("pair", "spare")
    lab.database.write(lambda c: failovers.record_event(c, "pair", failovers.Event.ADOPTED, lab.wall(), "spare"))
    found = lab.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))["pair"]
    assert found.present == {"p1", "p2"}
    other = lab.made("other")
    lab.detector.release_duty("it ends")
    lab.go(1, other)
    assert not other._backoff.is_replacement("pair", "p2")
    assert other._backoff.is_replacement("pair", "p3")
    assert other._backoff.is_replacement("pair", "spare")


def test_old_observations_are_ignored(lab, monkeypatch):
    monkeypatch.setattr(silent_amphorae, "_RECENT_ROWS", 2)
    row = {"cause": "silent", "begun_at": lab.wall() - 5}
    lab.write(*(failover.insert().values(load_balancer_id=f"lb{index}", **row) for index in range(4)))
    assert set(lab.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))) == {"lb2", "lb3"}
    assert lab.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 1.0)) == {}


def test_many_refused_failovers_are_written_in_small_batches(tmp_path, monkeypatch):
    lab = small(tmp_path, monkeypatch, 30, "automatic = false\nbreaker_percent = 100\n")
    monkeypatch.setattr(detecting, "_MOST_STATUSES", 10)
    silent = [f"a{index}" for index in range(25)]
    lab.go(5).silence(*silent).go(7)
    told = lambda: sum(lab.operating(f"lb{index}")[0] == "ERROR" for index in range(30))  # noqa: E731 - short
    assert told() == 10
    lab.go(2)
    assert told() == 25
    lab.database.dispose()
