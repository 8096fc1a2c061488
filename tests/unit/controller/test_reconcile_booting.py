# SPDX-License-Identifier: Apache-2.0
"""What boots is waited for without a lease: the real loop over a real database, with a machine that comes or not."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from control import LB, LISTENER, TREE, FakeCloud, controlled

from amphora_driver.compute.boot_rate import BootRate
from amphora_driver.compute.interface import Location, Machine, MachineState
from amphora_driver.compute.placement import boot_partners
from amphora_driver.database.tables import job, object_status
from amphora_driver.errors import AgentUnreachable, AgentUntrusted, ComputeError, StoreError
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.store import amphorae, rotations
from amphora_driver.topology import ActiveStandbyTopology, SingleTopology


class SlowCloud(FakeCloud):
    """One amphora, whose agent answers when `listens` is set, and whose machine may end or be late with its address."""

    roles = SingleTopology.roles
    priorities = SingleTopology.priorities

    def __init__(self):
        super().__init__()
        self.listens = False
        self.ended = False
        self.unavailable = False
        self.address = "203.0.113.9"
        self.location = Location()
        self.refusal = None
        self.greeting = None
        self.zones = ()
        self.boots = 0
        self.destroyed = 0

    def boot(self, order):
        self.boots += 1
        self.zones = order.zones
        if self.refusal is not None:
            raise self.refusal
        self.ended = False
        self.machines[order.amphora_id] = 20
        return self.get(order.amphora_id)

    def get(self, amphora_id):
        if self.unavailable:
            raise ComputeError("look up an amphora", "Nova does not answer")
        if self.ended:
            return Machine(compute_id=amphora_id, state=MachineState.FAILED, reason="it ended")
        values = {"management_address": self.address, "location": self.location}
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, **values)

    def destroy(self, amphora_id):
        self.destroyed += 1
        super().destroy(amphora_id)

    def wait_until_ready(self, _amphora_id, _address, deadline):
        assert deadline.left() <= 5, "no long wait here"
        if self.greeting is not None:
            raise self.greeting
        if not self.listens:
            raise AgentUnreachable("reach it", "connection refused")


class SlowPair(SlowCloud):
    """A pair. The backend can keep its machines apart when `separates` is set."""

    roles = ActiveStandbyTopology.roles
    priorities = ActiveStandbyTopology.priorities

    def __init__(self):
        super().__init__()
        self.separates = False
        self.asked = []

    def can_separate(self, partners, zones):
        self.asked.append([one.amphora_id for one in partners])
        return self.separates


class BootWaitRecorder:
    """Records the amphorae of the wait."""

    def __init__(self, entries=0):
        self.awaited = []
        self.entries = entries

    def __len__(self):
        return self.entries

    def add(self, awaited):
        self.awaited += awaited


@contextmanager
def waiting(tmp_path, cloud, **more):
    with controlled(tmp_path, cloud, **more) as control:
        control.boot_wait = control.reconciler._boot_wait = BootWaitRecorder()
        control.recorder.create_load_balancer(TREE, read_back=False)
        yield control


@pytest.fixture
def control(tmp_path):
    with waiting(tmp_path, SlowCloud()) as control:
        yield control


@pytest.fixture
def pair(tmp_path):
    with waiting(tmp_path, SlowPair()) as control:
        yield control


def only(control):
    (one,) = control.observed().values()
    return one


def test_booting_amphora_occupies_no_worker(control):
    before = time.time()
    assert control.work() == 1, "one job, which ends"
    row = control.row()
    assert (row.owner, row.dirty, row.attempts) == (None, True, 0)
    assert before + 0.5 < row.due_at < time.time() + 2
    one = only(control)
    assert before <= one.booted_at <= time.time()
    assert [(each.amphora_id, each.address, each.load_balancer_id) for each in control.boot_wait.awaited] == [
        (one.id, "203.0.113.9", LB)
    ]

    control.cloud.listens = True
    control.jobs.make_due([LB])
    assert control.work() == 1
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    assert not control.row().dirty
    assert control.cloud.boots == 1


def test_an_outage_of_the_compute_backend_does_not_delay_an_amphora_that_answers(control):
    control.work()
    control.cloud.listens = control.cloud.unavailable = True
    control.jobs.make_due([LB])
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}


def test_many_booting_amphorae_are_checked_less_often(control):
    control.boot_wait.entries = 200
    control.work()
    assert control.row().due_at > time.time() + 8


def test_a_machine_that_fails_during_the_boot_is_booted_again(control):
    control.work()
    name = only(control).id
    control.cloud.ended = True
    control.make_all_due()
    control.work()
    assert control.row().attempts == 1
    assert only(control).booted_at is None
    control.make_all_due()
    control.work()
    assert control.cloud.boots == 2
    assert only(control).id == name
    assert control.row().attempts == 1, "a wait is neither an attempt nor a success"
    control.cloud.listens = True
    control.make_all_due()
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"


def test_an_amphora_without_its_machine_is_no_partner_of_a_boot(control):
    """A scheduler hint must not name a server that no longer exists."""
    control.cloud.location = Location(host="a", zone="az1")
    control.work()
    assert [one.location for one in boot_partners(control.observed().values())] == [control.cloud.location]
    control.cloud.ended = True
    control.make_all_due()
    control.work()
    one = only(control)
    assert (one.compute_id, one.host, one.zone) == (None, None, None)
    assert boot_partners([one]) == ()


def test_a_machine_keeps_its_recorded_zone_until_the_backend_reports_another(control):
    control.cloud.address, control.cloud.location = None, Location(zone="az1")
    control.work()
    assert (only(control).host, only(control).zone) == (None, "az1")

    # The machine is still being built: the backend reports no zone.
    control.cloud.location = Location()
    control.make_all_due()
    control.work()
    assert (control.cloud.boots, only(control).zone) == (2, "az1")

    control.cloud.address, control.cloud.listens, control.cloud.location = "203.0.113.9", True, Location(host="a")
    control.make_all_due()
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"
    assert (only(control).host, only(control).zone) == ("a", "az1")


@pytest.mark.parametrize(
    ("permitted", "evacuated", "zones"),
    [
        (("az1", "az2"), "az1", ("az2",)),
        (("az1", "az2"), "az3", ("az1", "az2")),
        (("az1", "az2"), None, ("az1", "az2")),
        (("az1",), "az1", ("az1",)),
        ((), "az1", ()),
    ],
)
def test_a_machine_avoids_the_zone_that_a_rotation_evacuates(control, monkeypatch, permitted, evacuated, zones):
    control.cloud.default_zones = permitted
    rotation = SimpleNamespace(wanted=rotations.Selection(zone=evacuated))
    monkeypatch.setattr(rotations, "get_active_rotation", lambda _connection: rotation)
    control.work()
    assert control.cloud.zones == zones


def test_a_failed_boot_is_reported_and_repeated(control):
    control.work()
    most = control.conf.amp_controller.boot_timeout
    control.database.write(lambda c: amphorae.update_amphora(c, only(control).id, booted_at=time.time() - most - 1))
    control.make_all_due()
    control.work()
    assert control.provisioning() == {LB: "ERROR", LISTENER: "ERROR"}
    assert control.cloud.destroyed == 1
    assert only(control).management_address is None
    assert "has not answered in 300 s: connection refused" in control.row().error
    control.cloud.listens = True
    control.make_all_due()
    control.work()
    assert control.cloud.boots == 2
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}


def test_a_clock_jump_is_no_boot_timeout(control, monkeypatch):
    control.work()
    most = control.conf.amp_controller.boot_timeout
    control.database.write(lambda c: amphorae.update_amphora(c, only(control).id, booted_at=time.time() - 3600))
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: most - 1)
    control.make_all_due()
    control.work()
    assert (control.row().attempts, control.cloud.destroyed) == (0, 0)
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: most)
    control.make_all_due()
    control.work()
    assert control.cloud.destroyed == 1


def test_an_untrusted_agent_is_booted_again_after_the_boot_timeout(control):
    control.cloud.greeting = AgentUntrusted("greet it", "its certificate is another one's")
    control.work()
    assert (control.row().attempts, control.cloud.destroyed) == (1, 0), "the failure may be temporary"
    most = control.conf.amp_controller.boot_timeout
    control.database.write(lambda c: amphorae.update_amphora(c, only(control).id, booted_at=time.time() - most - 1))
    control.make_all_due()
    control.work()
    assert control.provisioning()[LB] == "ERROR"
    assert control.cloud.destroyed == 1
    control.cloud.greeting, control.cloud.listens = None, True
    control.make_all_due()
    control.work()
    assert control.cloud.boots == 2
    assert control.provisioning()[LB] == "ACTIVE"


def test_an_error_is_reported_even_if_the_exact_attempt_limit_is_skipped(control):
    control.cloud.refusal = ComputeError("boot it", "the backend is away")
    control.work()
    most = control.conf.amp_controller.give_up_after
    control.database.write(lambda c: c.execute(job.update().values(attempts=most, due_at=0.0)))
    control.work()
    assert control.provisioning()[LB] == "ERROR"

    def versions():
        return control.database.read(lambda c: c.execute(sa.select(object_status.c.version)).scalars().all())

    told = versions()
    control.make_all_due()
    control.work()
    assert control.row().attempts == most + 2
    assert versions() == told, "the error is reported once"


def test_a_deletion_after_the_claim_is_detected(control):
    load = control.reconciler._tree_cache.load

    def loads(connection, row, epoch):
        control.reconciler._tree_cache.load = load
        raise StoreError("read it", "it was deleted in this moment")

    control.reconciler._tree_cache.load = loads
    lease = control.jobs.claim()
    running_job = control.reconciler.create_job(lease)
    control.reconciler.reconcile(lease, running_job)
    assert (running_job.generation, running_job.op) == (1, "apply"), "the job knows the older request only"


def test_a_backend_may_report_the_management_address_later(control):
    control.cloud.address = None
    assert control.work() == 1
    assert control.row().attempts == 0
    begun = only(control).booted_at
    control.cloud.address, control.cloud.listens = "203.0.113.9", True
    control.make_all_due()
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"
    assert only(control).booted_at == begun, "the machine is ordered once"


def test_a_final_error_is_reported_at_once(control):
    control.cloud.refusal = ComputeError("boot it", "the quota is used up", final=True)
    control.work()
    assert control.provisioning()[LB] == "ERROR"
    assert "quota" in control.row().error


def test_a_temporary_error_is_retried_first(control):
    control.cloud.refusal = ComputeError("boot it", "the backend is away")
    control.work()
    assert control.pending() == {LB, LISTENER}
    assert control.row().attempts == 1


def test_a_deletion_during_the_boot(control):
    control.work()
    control.recorder.delete_load_balancer(LB)
    assert control.work() == 1
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}
    assert control.cloud.machines == {}


def test_a_deletion_during_a_failing_step_follows_at_once_without_an_error(control):
    def fails(order):
        control.recorder.delete_load_balancer(LB)
        raise ComputeError("boot it", "the quota is used up", final=True)

    control.cloud.boot = fails
    assert control.work() == 2, "the deletion follows at once"
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}


def test_a_deletion_preempts_the_remaining_steps(control):
    boot = control.cloud.boot

    def boots(order):
        control.recorder.delete_load_balancer(LB)
        return boot(order)

    control.cloud.boot = boots
    assert control.work() == 2, "the pre-empted job and the deletion"
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}
    assert control.boot_wait.awaited == []


def test_a_users_change_does_not_preempt_the_job(control):
    boot = control.cloud.boot
    more = Listener(id="more", loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=81)

    def boots(order):
        control.recorder.create_object(Kind.LISTENER, more)
        return boot(order)

    control.cloud.boot, control.cloud.listens = boots, True
    assert control.work() == 1
    assert set(control.provisioning().values()) == {"ACTIVE"}


def test_the_second_boot_of_a_pair_waits_until_the_backend_can_keep_it_apart(pair):
    before = time.time()
    assert pair.work() == 1
    (first,) = pair.cloud.machines
    assert (pair.cloud.boots, pair.cloud.asked) == (1, [[first]])
    row = pair.row()
    assert (row.attempts, before + 0.5 < row.due_at < time.time() + 2) == (0, True), "a wait is no failed attempt"
    assert [one.amphora_id for one in pair.boot_wait.awaited] == [first]

    pair.make_all_due()
    pair.work()
    assert (pair.cloud.boots, pair.cloud.asked) == (1, [[first]] * 2)
    pair.cloud.separates = True
    pair.make_all_due()
    pair.work()
    assert (pair.cloud.boots, len(pair.cloud.machines)) == (2, 2)


@pytest.mark.parametrize("seconds", [-61, 3600], ids=["too long ago", "before the clock was set back"])
def test_a_partner_that_is_built_too_long_delays_no_boot(pair, seconds):
    pair.work()
    (first,) = pair.cloud.machines
    pair.database.write(lambda c: amphorae.update_amphora(c, first, booted_at=time.time() + seconds))
    pair.make_all_due()
    pair.work()
    assert pair.cloud.boots == 2


def test_without_a_placement_no_boot_waits(pair):
    pair.conf.set_override("placement", "none", "amp_compute")
    pair.work()
    assert (pair.cloud.boots, pair.cloud.asked) == (2, [])


@pytest.fixture
def limited(tmp_path):
    """A pair whose boots have a rate limit of one in a minute."""
    with waiting(tmp_path, SlowPair(), boot_rate=BootRate(1 / 60, 1)) as control:
        control.cloud.separates = True
        yield control


def test_the_rate_limit_delays_the_second_boot_of_a_pair(limited):
    for _ in range(2):
        limited.work()
        (first,) = limited.cloud.machines
        assert limited.cloud.boots == 1
        assert limited.row().attempts == 0
        booted = {one.id: one.booted_at is not None for one in limited.observed().values()}
        assert (len(booted), booted.pop(first), *booted.values()) == (2, True, False)
        limited.make_all_due()
