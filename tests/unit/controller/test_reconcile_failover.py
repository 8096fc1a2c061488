# SPDX-License-Identifier: Apache-2.0
"""Fail-overs with the real job loop and a real database: history, urgency and warm spares."""

import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from control import LB, LISTENER, TREE, FakeCloud, controlled

from amphora_driver.compute.boot_rate import BootRate
from amphora_driver.compute.interface import Machine, MachineState
from amphora_driver.database.tables import URGENT, amphora, job
from amphora_driver.database.tables_fleet import failover, failover_event
from amphora_driver.errors import AgentUnreachable, ComputeError
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, failovers, resyncs, spare_pools
from amphora_driver.store.failovers import Cause, FailoverTrigger
from amphora_driver.topology import SingleTopology

SILENT = FailoverTrigger(cause=Cause.SILENT, reason="not heard for 10 s", silent_since=5.0)


class Fleet(FakeCloud):
    """A fake cloud whose machines have an image version; their destruction can be made to fail."""

    def __init__(self, roles=FakeCloud.roles, priorities=FakeCloud.priorities):
        super().__init__()
        self.roles, self.priorities = roles, priorities
        self.version = "one"
        self.images = {}
        self.stuck = False
        self.refusal = None

    def boot(self, order):
        if self.refusal is not None:
            raise self.refusal
        self.images.setdefault(order.amphora_id, self.version)
        return super().boot(order)

    def get(self, amphora_id):
        image = self.images.get(amphora_id)
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, management_address="203.0.113.9", image=image)

    def issue_server(self, _amphora_id, _days):
        return SimpleNamespace(expires_at=time.time() + 7 * 86400, bundle=lambda: Secret(b"certificate"))

    def image(self, _tag):
        return self.version

    def destroy(self, amphora_id):
        if self.stuck:
            raise ComputeError(f"destroy {amphora_id}", "the backend is slow")
        super().destroy(amphora_id)


def single():
    return Fleet(SingleTopology.roles, SingleTopology.priorities)


@pytest.fixture
def pair(tmp_path):
    with controlled(tmp_path, Fleet()) as control:
        yield ready(control)


@pytest.fixture
def alone(tmp_path):
    with controlled(tmp_path, single()) as control:
        yield ready(control)


def ready(control, tree=TREE):
    control.recorder.create_load_balancer(tree, read_back=False)
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    return control


def begin(control, names, why=SILENT):
    now = control.database.now()
    return control.database.write(lambda c: failovers.open_failovers(c, LB, names, why, now))


def fail_amphora(control, name):
    """Make the amphora silent and dead, and begin its fail-over."""
    control.cloud.dead |= {name}
    if control.cloud.holder == name:
        control.cloud.holder = next((one for one in control.observed() if one not in control.cloud.dead), None)
    assert begin(control, [name]) == 1


def rows(control):
    return control.database.read(lambda c: c.execute(sa.select(failover).order_by(failover.c.id)).all())


def line(control, number=None):
    """Return the events of a fail-over's history."""
    query = sa.select(failover_event.c.word).order_by(failover_event.c.id)
    if number is not None:
        query = query.where(failover_event.c.failover_id == number)
    return list(control.database.read(lambda c: c.execute(query).scalars().all()))


def settle(control):
    while control.row().dirty:
        control.make_all_due()
        control.work()


# --- history ----------------------------------------------------------------------------------------------------------


def test_the_history_of_a_single_amphora(alone):
    (old,) = alone.observed()
    fail_amphora(alone, old)
    assert alone.work() == 1
    assert line(alone) == ["begun", "recorded", "booted", "ready", "confirmed", "served", "released", "ended"]
    (row,) = rows(alone)
    assert (row.cause, row.reason, row.silent_since, row.outcome) == ("silent", "not heard for 10 s", 5.0, "done")
    assert row.begun_at <= row.served_at <= row.ended_at
    (new,) = alone.observed()
    assert new != old
    assert alone.cloud.machines.keys() == {new}
    assert alone.provisioning()[LB] == "ACTIVE"
    assert alone.pending() == set(), "Octavia gets no status update"
    assert alone.row().generation == 1


def test_the_history_of_a_vip_holder(pair):
    old = pair.cloud.holder
    fail_amphora(pair, old)
    partner = pair.cloud.holder
    pair.work()
    assert line(pair) == [
        "begun",
        "recorded",
        "booted",
        "ready",
        "released",
        "confirmed",
        "confirmed",
        "served",
        "ended",
    ]
    assert pair.cloud.holder == partner, "the new amphora does not take the VIPs"
    assert pair.cloud.machines.keys() == pair.observed().keys()
    assert not pair.row().dirty


def test_a_failover_by_octavia_has_a_history(pair):
    pair.recorder.fail_over(LB)
    pair.work()
    settle(pair)
    found = rows(pair)
    assert [(row.cause, row.outcome) for row in found] == [("asked", "done")] * 2
    assert all(row.served_at is not None for row in found)
    assert "handed_over" in line(pair, found[0].id)
    standby = next(row for row in found if line(pair, row.id).index("released") < line(pair, row.id).index("served"))
    assert standby.ended_at >= standby.served_at, "the release of the standby waits until all serve"


def test_a_deletion_ends_the_failover(alone):
    (old,) = alone.observed()
    alone.cloud.refusal = ComputeError("boot it", "the backend is away")
    fail_amphora(alone, old)
    alone.work()
    alone.recorder.delete_load_balancer(LB)
    (row,) = rows(alone)
    assert row.outcome == "gone"
    assert row.served_at is None
    alone.work()
    assert alone.provisioning()[LB] == "DELETED"
    assert begin(alone, None) == 0, "an amphora of a deleted load balancer is not replaced"


def test_a_failure_appears_once_in_the_history(alone):
    (old,) = alone.observed()
    alone.cloud.refusal = ComputeError("boot it", "the quota is used up")
    fail_amphora(alone, old)
    for _ in range(3):
        alone.work()
        alone.make_all_due()
    assert line(alone) == ["begun", "recorded", "failed"]
    assert alone.provisioning()[LB] == "ACTIVE", "the operating status reports the failure"
    alone.cloud.refusal = None
    alone.work()
    assert line(alone)[-1] == "ended"


def test_a_replacement_that_fails_before_it_confirmed_is_replaced(alone):
    (old,) = alone.observed()
    fail_amphora(alone, old)
    push = alone.cloud.put_bundle

    def lost(amphora_id, *_args, **_more):
        alone.cloud.dead |= {amphora_id}
        raise AgentUnreachable("push", "no answer")

    alone.cloud.put_bundle = lost
    alone.work()
    (second,) = [one for one in alone.observed().values() if one.state is AmphoraState.READY]
    alone.cloud.put_bundle = push
    assert begin(alone, [second.id]) == 1
    assert alone.row().due_at == URGENT
    assert alone.work() == 1, "the retry time after the failure is skipped"
    (new,) = alone.observed()
    assert new not in (old, second.id)
    assert [row.outcome for row in rows(alone)] == ["done", "done"]
    assert line(alone, 1).count("recorded") == 2, "the first fail-over continues until an amphora serves"
    assert alone.cloud.machines.keys() == {new}


def test_an_undeletable_machine_delays_no_other_work(pair):
    old = pair.cloud.holder
    pair.cloud.stuck = True
    fail_amphora(pair, old)
    pair.work()
    assert pair.row().attempts == 1, "one attempt before its partner forgets the machine"
    assert pair.observed()[old].plugged == (), "the ports are released in any case"
    pair.make_all_due()
    pair.work()
    now = pair.observed()
    assert len([one for one in now.values() if one.state is AmphoraState.READY and one.confirmed]) == 2
    assert old in now, "the release is retried"
    (row,) = rows(pair)
    assert row.served_at is not None
    assert row.ended_at is None
    pair.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 7})
    pair.work()
    assert pair.provisioning()[LB] == "ACTIVE", "a user's change is not delayed"
    pair.cloud.stuck = False
    pair.make_all_due()
    pair.work()
    assert old not in pair.cloud.machines
    assert rows(pair)[0].outcome == "done"


def test_both_amphorae_of_a_pair_are_dead(pair):
    before = set(pair.observed())
    pair.cloud.dead |= before
    pair.cloud.holder = None
    pair.cloud.stuck = True
    assert begin(pair, None) == 2
    for _ in range(2):
        pair.make_all_due()
        pair.work()
    fresh = [one for one in pair.observed().values() if one.id not in before]
    assert sorted(one.role for one in fresh) == ["BACKUP", "MASTER"]
    assert all(one.confirmed for one in fresh), "the replacements serve before a machine is destroyed"
    assert all(row.served_at is not None for row in rows(pair))
    pair.cloud.stuck = False
    pair.make_all_due()
    pair.work()
    assert pair.observed().keys() == {one.id for one in fresh}
    assert [row.outcome for row in rows(pair)] == ["done", "done"]


def test_one_of_two_replacements_cannot_be_booted(pair):
    """The other replacement boots in the same round and serves."""
    before = set(pair.observed())
    pair.cloud.dead |= before
    pair.cloud.holder = None
    boot, asked = pair.cloud.boot, []

    def some(order):
        asked.append(order.amphora_id)
        if order.amphora_id == asked[0]:
            raise ComputeError("boot it", "no host has room")
        return boot(order)

    pair.cloud.boot = some
    assert begin(pair, None) == 2
    for _ in range(4):
        pair.make_all_due()
        pair.work()
    served = [one for one in pair.observed().values() if one.confirmed and one.id not in before]
    assert [one.id == asked[0] for one in served] == [False]
    assert pair.cloud.holder == served[0].id
    pair.cloud.boot = boot
    settle(pair)
    assert len(pair.observed()) == 2
    assert [row.outcome for row in rows(pair)] == ["done", "done"]


def test_a_failover_does_not_wait_for_the_boot_rate(tmp_path):
    limit = BootRate(1 / 3600, 1)
    with controlled(tmp_path, single(), boot_rate=limit) as control:
        ready(control)
        assert limit.reserve("an amphora of another load balancer", time.monotonic()) > 3000
        (old,) = control.observed()
        fail_amphora(control, old)
        assert control.work() == 1
        assert old not in control.observed()
        assert line(control)[-1] == "ended"


# --- the end of a job keeps later requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("waker", ["a user", "read back", "taken back"])
def test_urgent_job_stays_urgent_after_another_due_time(alone, waker):
    (old,) = alone.observed()
    assert begin(alone, [old]) == 1
    if waker == "a user":
        alone.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 7})
    elif waker == "read back":
        alone.database.write(lambda c: resyncs.finish_reread(c, LB))
    else:
        alone.database.write(lambda c: c.execute(amphora.update().values(state="ready")))
        assert alone.database.write(lambda c: amphorae.lower_confirmed(c, old, 1, 0))
    assert alone.row().due_at == URGENT


def test_a_job_with_a_retiring_amphora_stays_due(alone):
    """Also if the urgent due time is lost."""
    alone.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 7})
    lease = alone.jobs.claim()
    generation = alone.row().generation
    alone.database.write(lambda c: c.execute(job.update().values(applied=generation)))
    alone.database.write(lambda c: c.execute(amphora.update().values(confirmed=generation)))
    (old,) = alone.observed()
    begin(alone, [old])
    alone.database.write(lambda c: c.execute(job.update().values(due_at=0.0)))
    alone.jobs.complete(lease, generation)
    assert alone.row().dirty


@pytest.mark.parametrize("end", ["finish", "finish for now", "wait", "postpone"])
def test_failover_begins_during_a_job(alone, end):
    alone.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 7})
    lease = alone.jobs.claim()
    generation = alone.row().generation
    alone.database.write(lambda c: c.execute(job.update().values(applied=generation)))
    alone.database.write(lambda c: c.execute(amphora.update().values(confirmed=generation)))
    (old,) = alone.observed()
    assert begin(alone, [old]) == 1
    later = alone.database.now() + 100
    if end == "finish":
        alone.jobs.complete(lease, generation)
    elif end == "finish for now":
        alone.jobs.complete(lease, generation, later)
    elif end == "wait":
        alone.jobs.defer(lease, generation, 100)
    else:
        alone.jobs.retry_later(lease, 100, "it failed", generation)
    row = alone.row()
    assert (row.dirty, row.owner, row.due_at) == (True, None, 0.0)
    assert alone.work() == 1
    assert old not in alone.observed()


def test_a_failover_preempts_a_job(alone):
    alone.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 7})
    (old,) = alone.observed()
    push = alone.cloud.put_bundle

    def found(amphora_id, *args, **more):
        alone.cloud.put_bundle = push
        fail_amphora(alone, old)
        raise AgentUnreachable("push", "no answer")

    alone.cloud.put_bundle = found
    assert alone.work() == 2, "the fail-over starts without the retry time of a failure"
    assert old not in alone.observed()
    assert alone.row().attempts == 0
    assert alone.pending() == set()


def test_urgent_job_stays_urgent_after_a_hint(alone):
    (old,) = alone.observed()
    begin(alone, [old])
    alone.jobs.make_due([LB])
    assert alone.row().due_at == URGENT


def test_no_amphora_is_replaced_twice(pair):
    first, _ = pair.observed()
    assert begin(pair, [first]) == 1
    assert begin(pair, [first]) == 0
    assert begin(pair, None) == 1
    assert len(rows(pair)) == 2


# --- warm spares ------------------------------------------------------------------------------------------------------


def with_spares(tmp_path, number=1):
    tree = type(TREE)(
        id=LB, project_id="demo", vip=TREE.vip, listeners=TREE.listeners, profile=Profile(warm_spares=number)
    )
    return controlled(tmp_path, single()), tree


def pool_of(control):
    query = sa.select(job).where(job.c.op == spare_pools.OP)
    return control.database.read(lambda c: c.execute(query).first())


def warm(control):
    found = control.database.read(lambda c: amphorae.load_amphorae(c, pool_of(control).load_balancer_id))
    return {one.id: one for one in found}


@pytest.fixture
def spared(tmp_path):
    controlling, tree = with_spares(tmp_path)
    with controlling as control:
        control.row = lambda: control.database.read(
            lambda c: c.execute(sa.select(job).where(job.c.load_balancer_id == LB)).one()
        )
        ready(control, tree)
        assert len(warm(control)) == 1
        yield control


def test_a_spare_replaces_a_dead_amphora_and_a_new_spare_is_booted(spared):
    (old,) = spared.observed()
    (spare,) = warm(spared)
    fail_amphora(spared, old)
    spared.work()
    assert list(spared.observed()) == [spare]
    assert spared.observed()[spare].role == "STANDALONE"
    assert spared.cloud.served[spare]["generation"] == 1
    assert line(spared) == ["begun", "adopted", "confirmed", "served", "released", "ended"]
    assert len(warm(spared)) == 1
    assert spare not in warm(spared)
    assert all(one.role == "SPARE" and one.state is AmphoraState.READY for one in warm(spared).values())


def test_a_spare_that_does_not_answer_is_not_adopted(spared):
    (old,) = spared.observed()
    (spare,) = warm(spared)
    spared.cloud.dead |= {spare}
    fail_amphora(spared, old)
    spared.work()
    (new,) = spared.observed()
    assert new not in (old, spare)
    assert "adopted" not in line(spared)
    assert rows(spared)[0].outcome == "done"


def test_a_spare_of_an_old_image_is_replaced(spared):
    (old,) = spared.observed()
    (spare,) = warm(spared)
    spared.cloud.version = "two"
    fail_amphora(spared, old)
    spared.work()
    (new,) = spared.observed().values()
    assert new.id != spare
    assert "adopted" not in line(spared)
    spared.database.write(lambda c: spare_pools.make_pool_due(c, pool_of(spared).load_balancer_id))
    spared.work()
    assert spare in warm(spared), "a spare that was just booted is not replaced again"
    spared.database.write(lambda c: amphorae.update_amphora(c, spare, booted_at=time.time() - 100))
    spared.database.write(lambda c: spare_pools.make_pool_due(c, pool_of(spared).load_balancer_id))
    spared.work()
    assert spare not in warm(spared)
    assert {spared.cloud.images[one] for one in warm(spared)} == {"two"}
    assert spare not in spared.cloud.machines


def test_unused_spare_pool_is_deleted(spared):
    pool = pool_of(spared).load_balancer_id
    spared.recorder.delete_load_balancer(LB)
    spared.database.write(lambda c: c.execute(job.update().where(job.c.load_balancer_id == LB).values(spare_pool=None)))
    spared.database.write(lambda c: spare_pools.make_pool_due(c, pool))
    spared.work()
    assert pool_of(spared) is None
    assert spared.cloud.machines == {}


def test_a_spare_is_assigned_to_one_load_balancer_only(spared):
    (spare,) = warm(spared)
    pool = pool_of(spared).load_balancer_id
    taken = [
        spared.database.write(lambda c: spare_pools.assign_spare(c, spare, pool, LB, "STANDALONE")) for _ in range(2)
    ]
    assert taken == [True, False]


def test_a_retiring_spare_is_not_adopted(spared):
    (spare,) = warm(spared)
    pool = pool_of(spared).load_balancer_id
    spared.database.write(lambda c: spare_pools.retire_spare(c, spare, pool, "too many"))
    assert not spared.database.write(lambda c: spare_pools.assign_spare(c, spare, pool, LB, "STANDALONE"))


def test_the_configured_number_of_spares_applies_without_a_flavor_option():
    assert spare_pools.spec_of(Profile(), "netns", "local", 0) is None
    assert spare_pools.spec_of(Profile(), "netns", "local", 3).number is None, "the number follows the configuration"
    assert spare_pools.spec_of(Profile(warm_spares=0), "netns", "local", 3) is None
    assert spare_pools.spec_of(Profile(warm_spares=2), "netns", "local", 0).number == 2
    spec = spare_pools.spec_of(Profile(warm_spares=2, compute_flavor="big"), "netns", "local", 0)
    assert spec.profile() == Profile(compute="netns", network="local", compute_flavor="big")
