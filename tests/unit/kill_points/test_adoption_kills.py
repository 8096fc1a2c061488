# SPDX-License-Identifier: Apache-2.0
"""Adoptions from the request to the end, undisturbed, with failures, and after SIGKILL at each point.

Database, Octavia's tables and octavia-lib are real. Machines, agents and Neutron are fake.
"""

import itertools
import time

import pytest
from adoption_lab import OURS, assert_adopted, assert_reverted, open_lab
from killed_forks import limited
from unit.adoption.octavia_rows import AMPHORAE, LB, MEMBER

from amphora_driver.adoption import adopter
from amphora_driver.adoption import records as adoptions
from amphora_driver.adoption.new_amphorae import NewAmphorae
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.adoption.records import Step
from amphora_driver.database import clock
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import process
from amphora_driver.errors import AgentRefused, Conflict, NetworkError, StoreError
from amphora_driver.failpoints import Moment
from amphora_driver.network.interface import NotYet
from amphora_driver.network.local import LocalNetwork

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
_MOST_SECONDS = 120
KEPT = 3600.0
FORWARD = [
    *(Step.WAITING, Step.LOCK, Step.PREPARE, Step.TAKE, Step.CUT, Step.COMMIT, Step.REPORT, Step.KEEP, Step.REMOVE)
]


@pytest.fixture(scope="module")
def lab():
    with open_lab() as made:
        yield made


@pytest.fixture(autouse=True)
def processor_time():
    with limited(_MOST_SECONDS):
        yield


@pytest.mark.parametrize("pair", [False, True], ids=["single", "pair"])
def test_a_load_balancer_is_adopted(lab, pair):
    lab.begin(pair=pair)
    lab.ask()
    lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_the_former_amphorae_serve_until_the_new_ones_have_the_vips(lab):
    lab.begin(pair=True)
    lab.ask()
    lab.rounds(Step.PREPARE)
    for _ in range(100):
        ahead = FORWARD[FORWARD.index(lab.step()) :] if lab.step() in FORWARD else []
        assert lab.old_serve() is (Step.CUT in ahead)
        # The new amphorae get the VIPs in `TAKE`.
        assert lab.step() is Step.TAKE or lab.new_serve() is (Step.TAKE not in ahead)
        if lab.step() is Step.DONE:
            break
        before = lab.step()
        lab.rounds(FORWARD[FORWARD.index(before) + 1] if before in FORWARD[:-1] else Step.DONE)
    assert_adopted(lab)


def test_users_are_locked_out_until_the_report(lab):
    lab.begin()
    lab.ask(remove_after=KEPT)
    for step in (Step.PREPARE, Step.REPORT):
        lab.rounds(step)
        assert lab.octavia()[1] == "PENDING_UPDATE"
    assert [said for name, said in lab.deployment.octavia.told if name == LB] == ["PENDING_UPDATE"]
    lab.rounds(Step.KEEP)
    lab.settle()
    assert lab.octavia() == (OURS, "ACTIVE")


@pytest.mark.parametrize("step", [Step.WAITING, Step.PREPARE, Step.REPORT, Step.KEEP])
@pytest.mark.parametrize("pair", [False, True], ids=["single", "pair"])
def test_the_operator_reverts(lab, pair, step):
    lab.begin(pair=pair)
    lab.ask(remove_after=KEPT)
    if step is not Step.WAITING:
        lab.rounds(step)
    lab.settle()
    lab.revert()
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)


def test_a_changed_load_balancer_is_not_reverted(lab):
    lab.kept(KEPT)
    lab.change_octavia(f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'")
    lab.revert()
    lab.settle()
    found = lab.found()
    assert (found.step, found.revert) == (Step.KEEP, False)
    assert "the configuration has changed since the adoption" in found.reason
    assert lab.new_serve()
    assert lab.octavia() == (OURS, "ACTIVE")


def test_a_lock_that_a_report_has_replaced_is_set_again(lab):
    lab.kept(KEPT)
    lab.revert()
    lab.die_at("Adopt-return-before", Step.REVERTED)
    assert not lab.found().reporting
    assert lab.found().vips_held
    lab.change_octavia(f"UPDATE load_balancer SET provisioning_status = 'ACTIVE' WHERE id = '{LB}'")
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)


def test_a_refused_revert_releases_its_lock(lab):
    """A process ends after the lock, and a change that began before the lock ends afterwards."""
    lab.kept(KEPT)
    lab.revert()
    lab.die_at("Adopt-relock-done", Step.REVERTED)
    assert lab.octavia() == (OURS, "PENDING_UPDATE")
    lab.change_octavia(f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'")
    lab.rounds(Step.KEEP)
    assert "the configuration has changed since the adoption" in lab.found().reason
    assert lab.octavia() == (OURS, "ACTIVE")
    assert lab.new_serve()


def test_the_way_back_ends_with_the_removal(lab):
    lab.begin()
    lab.ask()
    lab.rounds(Step.DONE)
    with pytest.raises(Conflict, match="its step is done"):
        lab.revert()


def test_a_refusal_of_neutron_leads_back(lab):
    lab.begin(pair=True)
    lab.former.refuse(1)
    lab.ask()
    lab.rounds(Step.REVERTED)
    assert "Neutron refuses it" in lab.found().reason
    assert_reverted(lab)


@pytest.mark.parametrize(
    ("of", "method"),
    [(adopter.Adopter, "_claim_vip_port"), (adopter.Adopter, "_cut"), (NewAmphorae, "have_vips")],
)
def test_an_unexpected_error_leads_back(lab, monkeypatch, of, method):
    """No component returns such an answer here, so a method of the adoption raises the error after its work."""
    work = getattr(of, method)

    def fail(*given):
        work(*given)
        raise KeyError("admin_state_up")

    lab.begin(pair=True)
    lab.change_octavia(f"UPDATE vip SET octavia_owned = 0 WHERE load_balancer_id = '{LB}'")
    lab.original = lab.rows()
    lab.ask()
    with monkeypatch.context() as patch:
        patch.setattr(LocalNetwork, "allocate_vip", lambda *_given: ())
        patch.setattr(of, method, fail)
        lab.rounds(Step.REVERTED)
    assert "an unexpected error occurred (KeyError)" in lab.found().reason
    assert_reverted(lab)


def test_a_refused_port_of_a_user_leads_back_before_the_vips_move(lab):
    """The network backend does not know the VIP port, so it refuses the claim."""
    lab.begin()
    lab.change_octavia(f"UPDATE vip SET octavia_owned = 0 WHERE load_balancer_id = '{LB}'")
    lab.ask()
    lab.rounds(Step.TAKE)
    assert lab.step() is Step.REVERTED
    assert "allocate a VIP" in lab.found().reason
    assert_reverted(lab)


def test_the_vips_wait_for_a_slow_claim(lab, monkeypatch):
    lab.begin()
    lab.change_octavia(f"UPDATE vip SET octavia_owned = 0 WHERE load_balancer_id = '{LB}'")
    lab.ask()
    with monkeypatch.context() as patch:
        patch.setattr(LocalNetwork, "allocate_vip", lambda *_given: NotYet(reason="Neutron is slow"))
        for _ in range(3):
            lab.settle()
        assert (lab.step(), lab.found().reason) == (Step.PREPARE, "Neutron is slow")
        patch.setattr(LocalNetwork, "allocate_vip", lambda *_given: ())
        lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_a_revert_during_the_report_leads_back(lab):
    lab.begin(pair=True)
    lab.ask(remove_after=KEPT)
    lab.rounds(Step.REPORT)
    lab.revert()
    lab.rounds(Step.KEEP)
    assert lab.step() is Step.REVERTED
    assert_reverted(lab)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"UPDATE member SET weight = 9 WHERE id = '{MEMBER}'", "its configuration has changed"),
        (f"UPDATE amphora SET vrrp_port_id = 'other' WHERE id = '{AMPHORAE[0]}'", "its amphorae have changed"),
    ],
)
def test_a_change_during_the_preparation_leads_back(lab, change, said):
    lab.begin()
    lab.ask()
    lab.rounds(Step.PREPARE)
    lab.change_octavia(change)
    lab.rounds(Step.REVERTED)
    assert said in lab.found().reason
    assert lab.old_serve()
    assert lab.octavia() == ("amphora", "ACTIVE")


def test_a_lost_lock_leads_back_without_a_status(lab):
    lab.begin()
    lab.ask()
    lab.rounds(Step.PREPARE)
    lab.change_octavia(f"UPDATE load_balancer SET provisioning_status = 'ACTIVE' WHERE id = '{LB}'")
    told = len(lab.deployment.octavia.told)
    lab.rounds(Step.REVERTED)
    assert "the lock is lost" in lab.found().reason
    assert lab.deployment.octavia.told[told:] == []


def test_a_busy_load_balancer_is_refused_and_stays(lab):
    lab.begin()
    lab.change_octavia(f"UPDATE load_balancer SET provisioning_status = 'ERROR' WHERE id = '{LB}'")
    lab.ask()
    lab.rounds(Step.REFUSED)
    assert lab.found().reason == "its provisioning status is ERROR"
    assert lab.octavia() == ("amphora", "ERROR")
    assert lab.deployment.octavia.told == []


def test_an_unknown_load_balancer_is_refused_and_does_not_delay_the_next_one(lab):
    lab.begin()
    lab.ask("unknown", LB)
    lab.rounds(Step.PREPARE)
    assert lab.step() is Step.PREPARE
    refused = lab.deployment.database.read(lambda c: adoptions.get_adoption(c, "unknown"))
    assert refused.step is Step.REFUSED
    assert "Octavia does not know it" in refused.reason


def test_no_adoption_starts_beside_a_controller_of_an_earlier_version(lab):
    lab.begin()
    lab.ask()
    database, old = lab.deployment.database, "old:1"
    row = {"name": old, "kind": "controller", "host": "old", "schema_revision": "0005", "started_at": 0.0}
    database.write(lambda c: c.execute(process.insert().values(**row, seen_at=clock.now(c) + 3600)))
    lab.settle()
    assert lab.step() is Step.WAITING
    assert old in lab.found().reason
    database.write(lambda c: c.execute(process.delete().where(process.c.name == old)))
    lab.rounds(Step.PREPARE)
    assert lab.step() is Step.PREPARE


def test_an_unreadable_adoption_does_not_stop_the_others(lab, caplog):
    lab.begin()
    lab.ask("damaged", LB)
    damaged = lab.deployment.database.read(lambda c: adoptions.get_adoption(c, "damaged"))
    lab.deployment.database.write(lambda c: adoptions.move(c, damaged, Step.KEEP, state="{"))
    lab.rounds(Step.DONE)
    assert_adopted(lab)
    assert "the controller failed in step keep of the adoption of load balancer damaged" in caplog.text
    assert caplog.text.count("load balancer damaged, and tries again in 60 s") == 2, "once for each process"
    damaged = lab.deployment.database.read(lambda c: adoptions.get_adoption(c, "damaged"))
    assert "an unexpected error occurred (DecodeError)" in damaged.reason


def test_a_controller_that_loses_the_duty_performs_no_further_step(lab, monkeypatch):
    lab.begin()
    lab.ask()
    lab.rounds(Step.PREPARE)
    plane = lab.plane()
    reached = []

    def lose(step, moment):
        if (step, moment) == ("Adopt-prepare", Moment.MARKED):
            lease = {"owner": "another", "leased_until": time.time() + 20}
            lab.deployment.database.write(lambda c: c.execute(duty.update().values(**lease)))
            reached.append(step)

    monkeypatch.setattr("amphora_driver.failpoints.reach_step", lose)
    while not reached:
        plane.round()
        lab.deployment.clock.advance(plane.pause())
    assert lab.step() is Step.TAKE
    plane.round()
    assert lab.step() is Step.TAKE
    assert lab.old_serve()


def test_the_preparation_has_its_own_time_limit(lab, monkeypatch):
    """Octavia's database does not answer for longer than the VIPs may take to move."""
    lab.begin()
    lab.ask()
    lab.rounds(Step.PREPARE)

    def fail(*_arguments):
        raise StoreError("read a load balancer", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(OctaviaDatabase, "read", fail)
        lab.deployment.clock.advance(lab.deployment.conf.amp_adoption.take_timeout + 1)
        lab.settle()
    assert (lab.step(), "no answer" in lab.found().reason) == (Step.PREPARE, True)
    lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_a_kept_load_balancer_is_read_rarely_until_a_revert(lab, monkeypatch):
    lab.begin()
    lab.ask(remove_after=KEPT)
    lab.rounds(Step.KEEP)
    reads = []
    keep = adopter.Adopter._keep
    monkeypatch.setattr(adopter.Adopter, "_keep", lambda *given: reads.append(time.monotonic()) or keep(*given))
    plane = lab.plane()
    begun = time.monotonic()
    while time.monotonic() < begun + 35:
        plane.round()
        lab.deployment.clock.advance(0.5)
    assert 2 <= len(reads) <= 5
    lab.revert()
    number = len(reads)
    plane.round()
    assert len(reads) == number + 1
    lab._adopter.release()
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)


def attempts(lab, monkeypatch, method, error, seconds):
    """Return the seconds between the attempts of a step whose method fails."""
    times = []

    def fail(*_):
        times.append(time.monotonic())
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(adopter.Adopter, method, fail)
        plane = lab.plane()
        for _ in range(2 * seconds):
            plane.round()
            lab.deployment.clock.advance(0.5)
        lab._adopter.release()
    return [after - before for before, after in itertools.pairwise(times)]


def test_a_failing_step_is_repeated_less_and_less_often_while_the_load_balancer_serves(lab, monkeypatch):
    lab.begin()
    lab.ask()
    lab.rounds(Step.REMOVE)
    pauses = attempts(lab, monkeypatch, "_remove", NetworkError("delete a port", "no answer"), 125)
    assert pauses == pytest.approx([2, 4, 8, 16, 30, 30, 30], abs=1.0)
    lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_a_failing_step_is_repeated_soon_while_the_vips_move(lab, monkeypatch):
    lab.begin()
    lab.ask()
    lab.rounds(Step.TAKE)
    pauses = attempts(lab, monkeypatch, "_progress", StoreError("read the progress", "no answer"), 9)
    assert pauses == pytest.approx([2, 2, 2, 2], abs=0.6)
    lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_a_step_of_release_0_1_0_continues(lab):
    """That release disables the former ports before the new amphorae get the VIPs."""
    lab.begin(pair=True)
    lab.ask()
    lab.rounds(Step.TAKE)
    lab.deployment.database.write(lambda c: adoptions.move(c, lab.found(), Step.CUT, vips_held=True))
    lab.rounds(Step.TAKE)
    assert lab.step() is Step.TAKE
    lab.rounds(Step.DONE)
    assert_adopted(lab)


def test_an_amphora_that_cannot_announce_does_not_stop_the_adoption(lab, monkeypatch, caplog):
    lab.begin()
    lab.ask()

    def refuse(*_given, **_named):
        raise AgentRefused("announce the VIPs", "the agent does not know the request", status=404)

    monkeypatch.setattr(lab.deployment.cloud, "announce_vips", refuse)
    lab.rounds(Step.DONE)
    assert_adopted(lab)
    assert "did not announce its VIPs again" in caplog.text


def test_a_controller_without_octavias_sockets_leaves_the_adoption_to_others(lab, monkeypatch, caplog):
    lab.begin()
    lab.ask()
    monkeypatch.setattr("amphora_driver.adoption.survey.missing_sockets", lambda _conf: ["get_socket"])
    lab.settle()
    assert lab.step() is Step.WAITING
    assert lab.deployment.scalars(duty.c.owner, duty.c.name == "adoption") == []
    assert caplog.text.count("this controller performs no adoption") == 1


def test_a_failure_pauses_the_load_balancers_that_wait(lab):
    lab.begin()
    lab.former.refuse(1)
    lab.ask()
    database = lab.deployment.database
    more = {"max_in_progress": 1, "remove_after": 0.0, "asked_by": None}
    database.write(lambda c: adoptions.request_adoptions(c, ["other"], **more))
    lab.rounds(Step.REVERTED)
    assert database.read(lambda c: adoptions.get_adoption(c, "other")).paused


POINTS = [f"Adopt-{step.value}-{moment.value}" for step in FORWARD for moment in Moment]
BACK = [Step.RELOCK, Step.REJOIN, Step.RESTORE, Step.RETURN, Step.DISCARD]
POINTS_BACK = [f"Adopt-{step.value}-{moment.value}" for step in BACK for moment in Moment]


def killed_at_each(lab, points, until):
    """Processes are killed one after the other, each at the first armed point that it reaches."""
    lab.deployment.points.arm(points)
    met = []
    while (point := lab.deployment.run_in_fork(lambda: lab.rounds(until))) is not None:
        assert lab.old_serve() or lab.new_serve()
        met.append(point)
    assert met == points


def test_an_adoption_continues_after_each_kill(lab):
    lab.begin(pair=True)
    lab.ask()
    killed_at_each(lab, POINTS, Step.DONE)
    assert_adopted(lab)


def test_a_revert_continues_after_each_kill(lab):
    lab.kept(KEPT, pair=True)
    lab.revert()
    killed_at_each(lab, POINTS_BACK, Step.REVERTED)
    assert_reverted(lab)


def killed(lab, point, until):
    """A process is killed at the point; its successor continues."""
    lab.die_at(point, until)
    assert lab.old_serve() or lab.new_serve()
    lab.rounds(until)


@pytest.mark.extended
@pytest.mark.parametrize("point", POINTS)
def test_an_adoption_continues_after_a_kill(lab, point):
    lab.begin(pair=True)
    lab.ask()
    killed(lab, point, Step.DONE)
    assert_adopted(lab)


@pytest.mark.extended
@pytest.mark.parametrize("point", POINTS_BACK)
def test_a_revert_continues_after_a_kill(lab, point):
    lab.kept(KEPT, pair=True)
    lab.revert()
    killed(lab, point, Step.REVERTED)
    assert_reverted(lab)


@pytest.mark.extended
@pytest.mark.parametrize("point", [one for one in POINTS if one.split("-")[1] in ("lock", "prepare", "take", "cut")])
def test_a_revert_after_a_kill_before_the_commit(lab, point):
    lab.begin()
    lab.ask(remove_after=KEPT)
    lab.die_at(point, Step.DONE)
    lab.revert()
    lab.rounds(Step.REVERTED)
    assert_reverted(lab)
