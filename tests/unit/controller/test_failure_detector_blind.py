# SPDX-License-Identifier: Apache-2.0
"""The failure detector with failures outside the amphorae: blindness, clock jumps, short outages, mass failures."""

import pytest
import sqlalchemy as sa
from detector_scene import small

from amphora_driver.database.tables import amphora, duty, job
from amphora_driver.database.tables_fleet import failover, silent_amphora
from amphora_driver.errors import StoreError
from amphora_driver.failover import failure_detector as detecting
from amphora_driver.failover.failure_rules import ProbeOutcome
from amphora_driver.queue.jobs import acquire_duty
from amphora_driver.store import amphorae, circuit_breaker, failovers, silent_amphorae

pytestmark = pytest.mark.usefixtures("detector_database")


def test_blind_control_plane_replaces_no_amphora(scene):
    scene.go(5)
    scene.hearing = False
    silent = scene.speaking.copy()
    scene.hush(*silent).go(60)
    assert (scene.replaced(), scene.verdicts()) == (set(), {})
    assert scene.breaker(circuit_breaker.SIGHT).state == "blind"
    assert scene.breaker().state == "closed", "a blind detector does not open the breaker"
    scene.hearing = True
    scene.speaking |= silent
    scene.go(30)
    assert (scene.replaced(), scene.agents.asked) == (set(), [])


def test_breaker_stays_open_without_observations(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.hearing = False
    scene.go(30)
    scene.hearing = True
    scene.go(40)
    assert scene.breaker().state == "open"


@pytest.mark.parametrize("shift", [600.0, 86_400.0, -600.0, -86_400.0])
def test_moved_clock_causes_and_hides_no_failure(scene, shift):
    scene.go(5)
    scene.ahead = shift
    scene.go(30)
    assert (scene.replaced(), scene.verdicts()) == (set(), {})
    scene.hush("a3").go(10)
    assert scene.replaced() == {"a3"}


def test_a_suspended_detector_restarts_its_timers(scene):
    scene.go(5).hush("a3").go(6)
    scene.now += 600
    scene.go(6)
    assert scene.replaced() == set()
    scene.go(4)
    assert scene.replaced() == {"a3"}


def test_the_detector_restarts_its_timers_after_a_database_outage(scene, monkeypatch):
    scene.go(5).hush("a3").go(6)

    def away(_work):
        raise StoreError("read", "away")

    with monkeypatch.context() as patched:
        patched.setattr(scene.database, "read", away)
        with pytest.raises(StoreError):
            scene.detector.run_once()
        scene.detector._suspend("the database is away")
    scene.go(6)
    assert scene.replaced() == set()
    scene.go(5)
    assert scene.replaced() == {"a3"}


def test_only_the_duty_owner_observes_and_a_new_owner_restarts_its_timers(scene):
    scene.go(5).hush("a3").go(6)
    other = scene.made("other")
    scene.go(4, other)
    assert scene.read(sa.select(duty.c.owner)) == [("me",)]
    scene.detector.release_duty("it ends")
    scene.go(7, other)
    assert scene.replaced() == set()
    scene.go(3, other)
    assert scene.replaced() == {"a3"}


def test_a_former_duty_owner_starts_no_failover(scene):
    scene.go(5)
    scene.write(
        duty.update().where(duty.c.name == silent_amphorae.DUTY).values(owner="other", leased_until=scene.wall() + 59)
    )
    scene.hush("a3").go(20)
    assert scene.replaced() == set()
    held = scene.database.write(
        lambda c: silent_amphorae.lock_still_silent(c, "lb4", {"a4": (1, scene.sequence)}, "me")
    )
    assert held == set()
    assert not acquire_duty(scene.database, silent_amphorae.DUTY, "me", 1.0)


def test_a_heartbeat_just_before_the_failover_prevents_it(scene):
    scene.go(5)
    place = (1, scene.sequence)

    def still(**orders):
        return scene.database.write(lambda c: silent_amphorae.lock_still_silent(c, "lb4", orders, "me"))

    assert still(a4=place) == {"a4"}
    assert still(a4=(1, scene.sequence - 1)) == set()
    assert still(a4=None) == set()
    scene.write(amphora.update().where(amphora.c.id == "a4").values(state="retiring"))
    assert still(a4=place) == set()


def test_a_fleet_without_failures_causes_no_writes(scene, monkeypatch):
    scene.agents.saying["a3"] = ProbeOutcome.ANSWERED
    scene.go(5).hush("a3").go(15)
    written = []
    monkeypatch.setattr(silent_amphorae, "write_silent_amphorae", lambda *_: written.append("silence"))
    monkeypatch.setattr(circuit_breaker, "write_breaker_row", lambda *_: written.append("breaker"))
    scene.go(10)
    assert written == []


def test_a_new_duty_owner_cleans_up_rows_of_the_former_owner(scene):
    row = {"amphora_id": "gone", "load_balancer_id": "lb", "kind": "silent", "since": 1.0}
    scene.write(silent_amphora.insert().values(**row))
    scene.go(1)
    assert scene.verdicts() == {}


def test_an_open_breaker_survives_a_change_of_the_duty_owner(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.detector.release_duty("it ends")
    other = scene.made("other")
    scene.go(20, other)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()


def test_a_silent_amphora_that_answers_a_probe_is_not_replaced(scene):
    """UDP is blocked or [amp_health] targets are wrong: the amphora still serves clients."""
    scene.go(5)
    scene.amphora("lb3", "new")
    scene.agents.saying["new"] = ProbeOutcome.ANSWERED
    scene.hush("new").go(28)
    assert scene.replaced() == set()
    scene.go(5)
    assert [(row.amphora_id, row.cause) for row in scene.read(sa.select(failover))] == [("new", "mute")]
    scene.go(1)
    (found,) = (one for one in scene.database.read(lambda c: amphorae.load_amphorae(c, "lb3")) if one.id == "new")
    assert not found.dead


def test_network_failure_with_few_amphorae_causes_no_failover(tmp_path, monkeypatch):
    """A switch failure is not visible to the controller: probes time out without an error."""
    scene = small(tmp_path, monkeypatch, 2)
    scene.go(5).hush("a0", "a1").go(28)
    assert scene.replaced() == set()
    assert "[amp_failover] witnesses is empty" in scene.verdicts()["a0"][1]
    sight = scene.breaker(circuit_breaker.SIGHT)
    assert (sight.state, "no amphora sends heartbeats" in sight.reason) == ("blind", True)
    assert scene.operating("lb0")[0] == "ONLINE"
    scene.speaking |= {"a0", "a1"}
    scene.go(10)
    assert (scene.replaced(), scene.verdicts(), scene.breaker(circuit_breaker.SIGHT).state) == (set(), {}, "seeing")
    scene.hush("a0", "a1").go(35)
    assert scene.replaced() == {"a0", "a1"}, "after mute_after the amphora counts as dead"
    scene.database.dispose()


def test_in_a_small_fleet_the_first_failover_waits_until_the_others_are_due(tmp_path, monkeypatch):
    scene = small(tmp_path, monkeypatch, 2)
    scene.go(5).hush("a0").go(3).hush("a1").go(20)
    assert scene.replaced() == set()
    scene.database.dispose()


@pytest.mark.parametrize("options", ["", "witnesses = 203.0.113.1:22\n"])
def test_in_a_small_fleet_a_single_dead_amphora_is_replaced_at_once(tmp_path, monkeypatch, options):
    scene = small(tmp_path, monkeypatch, 2, options)
    scene.go(5).hush("a0").go(8)
    assert scene.replaced() == {"a0"}
    scene.database.dispose()


def test_reachable_witnesses_allow_both_failovers_at_once(tmp_path, monkeypatch):
    """The probes have shown that the network reaches a witness."""
    scene = small(tmp_path, monkeypatch, 2, "witnesses = 203.0.113.1:22\n")
    scene.go(5).hush("a0", "a1").go(8)
    assert scene.replaced() == {"a0", "a1"}
    scene.database.dispose()


def test_the_only_amphora_is_replaced_after_twice_the_limit(tmp_path, monkeypatch):
    scene = small(tmp_path, monkeypatch, 1)
    scene.go(5).hush("a0").go(12)
    assert scene.replaced() == set()
    scene.go(3)
    assert scene.replaced() == {"a0"}
    scene.database.dispose()


def test_detection_continues_during_a_mass_failure(tmp_path, monkeypatch):
    """One round writes a bounded number of rows in few statements, because detection waits meanwhile."""
    scene = small(tmp_path, monkeypatch, 0, "probe_timeout = 300\n")
    row = {"role": "STANDALONE", "state": "ready", "heartbeat_key": b"", "created_at": 1.0, "ready_at": 1.0}
    names = [f"m{index:04}" for index in range(1000)]
    wanted = {"op": "apply", "generation": 1, "committed": 1, "dirty": False}
    scene.database.write(
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
    scene.go(5 + 7 + 6)
    assert len(scene.verdicts()) == 1000
    assert max(rows for rows, _ in sizes) == 200
    assert max(statements for _, statements in sizes) <= 2
    assert scene.breaker().state == "open"
    scene.speaking |= set(names)
    scene.go(7)
    assert scene.verdicts() == {}
    scene.database.dispose()


def short_outage(scene):
    """The database is unavailable for a moment; no other process takes the duty."""
    scene.detector._suspend("the database is away")


def test_acknowledgements_survive_an_interruption(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(2)
    assert len(scene.replaced()) == 2
    short_outage(scene)
    scene.go(15)
    for one in scene.replaced():
        scene.served(f"lb{one[1:]}", f"instead-of-{one}")
    scene.go(10)
    assert scene.breaker().state == "closed"
    assert len(scene.read(sa.select(failover))) == 4


def test_an_operator_closes_the_breaker_during_an_interruption(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    short_outage(scene)
    scene.database.write(lambda c: circuit_breaker.close_breaker(c, "closed by anna", scene.wall()))
    scene.go(15)
    assert scene.breaker().state == "closed"


def test_a_trial_survives_a_short_outage(scene, caplog):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(115)
    first = scene.replaced()
    assert (len(first), scene.breaker().state) == (1, "trial")
    short_outage(scene)
    scene.go(20)
    assert scene.replaced() == first, "one trial at a time"
    assert scene.breaker().state == "trial"
    assert "succeeded" not in caplog.text
    # The trial time passes while no amphora can become silent: the trial has not succeeded.
    scene.now += scene.detector._boot_timeout
    scene.go(5)
    assert "succeeded" not in caplog.text
    scene.go(10)
    assert scene.breaker().state == "open"
    assert "succeeded" not in caplog.text


@pytest.mark.parametrize("shift", [0.0, -86_400.0])
def test_a_new_duty_owner_waits_for_the_remaining_trial_time(scene, shift):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(8)
    assert scene.breaker().state == "open"
    scene.go(80)
    scene.detector.release_duty("it ends")
    scene.ahead = shift
    other = scene.made("other")
    scene.write(duty.update().values(leased_until=0.0))
    scene.go(15, other)
    assert scene.breaker().state == "open"
    scene.go(10, other)
    assert scene.breaker().state == ("open" if shift else "trial")
    scene.go(100, other)
    assert scene.breaker().state == "trial", "the wait is at most one trial time"


def test_a_new_duty_owner_awaits_a_running_trial(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(115)
    first = scene.replaced()
    scene.detector.release_duty("it ends")
    scene.go(30, scene.made("other"))
    assert (scene.breaker().state, scene.replaced()) == ("trial", first)


def test_both_failovers_of_a_pair_count_as_one_failure(scene):
    """A new duty owner does not count the two rows as two failures in sequence."""
    scene.balancer("pair", "p1", "p2")
    scene.go(5).hush("p1", "p2").go(9)
    assert scene.replaced() == {"p1", "p2"}
    assert len(scene.read(sa.select(failover))) == 2
    found = scene.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))
    assert len(found["pair"].ages) == 1
    other = scene.made("other")
    scene.detector.release_duty("it ends")
    scene.go(1, other)
    assert other._backoff.length("pair") == 20.0


def test_former_partner_is_no_replacement(scene):
    scene.balancer("pair", "p1", "p2")
    scene.go(5).hush("p1").go(9)
    assert scene.replaced() == {"p1"}
    scene.write(
        amphora.insert().values(
            id="p3", load_balancer_id="pair", role="BACKUP", state="ready", heartbeat_key=b"", created_at=scene.wall()
        )
    )
    # A spare that was taken is older than these rows.
    scene.amphora("pair", "spare")
    scene.database.write(lambda c: failovers.record_event(c, "pair", failovers.Event.ADOPTED, scene.wall(), "spare"))
    found = scene.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))["pair"]
    assert found.present == {"p1", "p2"}
    other = scene.made("other")
    scene.detector.release_duty("it ends")
    scene.go(1, other)
    assert not other._backoff.is_replacement("pair", "p2")
    assert other._backoff.is_replacement("pair", "p3")
    assert other._backoff.is_replacement("pair", "spare")


def test_old_observations_are_ignored(scene, monkeypatch):
    monkeypatch.setattr(silent_amphorae, "_RECENT_ROWS", 2)
    row = {"cause": "silent", "begun_at": scene.wall() - 5}
    scene.write(*(failover.insert().values(load_balancer_id=f"lb{index}", **row) for index in range(4)))
    assert set(scene.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 600.0))) == {"lb2", "lb3"}
    assert scene.database.read(lambda c: silent_amphorae.load_recent_failovers(c, 1.0)) == {}


def test_many_refused_failovers_are_written_in_small_batches(tmp_path, monkeypatch):
    scene = small(tmp_path, monkeypatch, 30, "automatic = false\nbreaker_percent = 100\n")
    monkeypatch.setattr(detecting, "_MOST_STATUSES", 10)
    silent = [f"a{index}" for index in range(25)]
    scene.go(5).hush(*silent).go(7)
    told = lambda: sum(scene.operating(f"lb{index}")[0] == "ERROR" for index in range(30))  # noqa: E731 - short
    assert told() == 10
    scene.go(2)
    assert told() == 25
    scene.database.dispose()
