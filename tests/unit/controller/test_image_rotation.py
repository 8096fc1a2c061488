# SPDX-License-Identifier: Apache-2.0
"""Image rotation from its first row to its last, with controllers that end, stop or compete."""

import itertools
import threading
import time
from types import SimpleNamespace

import migrated
import pytest
import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job, object_status
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import StoreError
from amphora_driver.maintenance import image_rotation as module
from amphora_driver.maintenance.image_rotation import DUTY, ImageRotator, RotationWatch
from amphora_driver.maintenance.image_rotation_plan import FinishItem, StartItem
from amphora_driver.store import amphorae, circuit_breaker, failovers, process_registry, rotations
from amphora_driver.store.rotations import ItemState, RotationState, Selection

SETTLE = 5.0
CATALOGUE = SimpleNamespace(topology=lambda name: SimpleNamespace(roles=("A", "B") if name == "PAIR" else ("A",)))


class Fleet:
    """Load balancers as rows, with stand-ins for controllers and health managers."""

    def __init__(self, conf, database):
        self.conf = conf
        self.database = database
        self.told = []
        self.clock = itertools.count(1000.0)
        self.numbers = itertools.count(1)
        self.one = self.rotator("one")

    def rotator(self, name):
        return ImageRotator(self.conf, self.database, CATALOGUE, name, lambda: self.told.append(name))

    def write(self, *statements):
        self.database.write(lambda c: [c.execute(one) for one in statements])

    def add(self, name, number=1):
        values = {"generation": 1, "committed": 1, "applied": 1, "topology": "PAIR" if number == 2 else "SINGLE"}
        self.write(
            job.insert().values(load_balancer_id=name, op="apply", dirty=False, **values),
            object_status.insert().values(
                object_id=name, kind="loadbalancers", load_balancer_id=name, operating="ONLINE", provisioning="ACTIVE"
            ),
        )
        for _ in range(number):
            self.boot(name)

    def boot(self, name, **more):
        values = {"role": "A", "state": "ready", "confirmed": 1, "heartbeat_key": b"", "created_at": time.time()}
        one = f"{name}-{next(self.numbers)}"
        self.write(amphora.insert().values(id=one, load_balancer_id=name, **{**values, **more}))
        return one

    def replace(self, name):
        """Replace the retiring amphorae, as the plan does."""
        for one in self.machines(name, "retiring"):
            self.write(amphora.delete().where(amphora.c.id == one))
            self.boot(name)

    def machines(self, name, state="ready"):
        query = sa.select(amphora.c.id).where(amphora.c.load_balancer_id == name, amphora.c.state == state)
        return self.database.read(lambda c: c.execute(query.order_by(amphora.c.id)).scalars().all())

    def send_heartbeats(self, *silent):
        """Record heartbeats of all amphorae except these."""
        number = int(next(self.clock))

        def write(connection):
            ids = connection.execute(sa.select(amphora.c.id)).scalars().all()
            heard = [
                amphorae.LastHeartbeat(amphora_id=one, seen_at=float(number), generation=1, epoch=1, sequence=number)
                for one in ids
                if one not in silent
            ]
            amphorae.record_heartbeats(connection, heard)

        self.database.write(write)

    def look(self, times=1, *, by=None, silent=()):
        """Record heartbeats and run the rotator one second later."""
        moves = []
        for _ in range(times):
            self.send_heartbeats(*silent)
            moves += (by or self.one).advance()
        return moves

    def ask(self, most=1, **selection):
        wanted = Selection(**(selection or {"everything": True}))
        return self.database.write(lambda c: rotations.request_rotation(c, wanted, most, "admin")).id

    def states(self, rotation_id):
        return {
            one.load_balancer_id: one.state
            for one in self.database.read(lambda c: rotations.list_items(c, rotation_id))
        }

    def state(self, rotation_id):
        return self.database.read(lambda c: rotations.get_rotation(c, rotation_id))


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n"
        f"[amp_rotation]\nsettle = {SETTLE}\nreplacement_timeout = 20\n[amp_health]\ninterval = 1\n"
    )
    conf = config.load([str(path)])
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection, durable=False)
    seconds = itertools.count(1.0)
    # One second passes between two rounds.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    yield Fleet(conf, database)
    database.dispose()


def test_amphorae_rotate_one_by_one_after_an_observation_time(fleet):
    for name in ("a", "b"):
        fleet.add(name)
    number = fleet.ask()
    (begin,) = fleet.look()
    assert isinstance(begin, StartItem)
    assert fleet.told == ["one"]
    (row,) = fleet.database.read(lambda c: c.execute(sa.select(failover)).all())
    assert (row.cause, row.rotation_id, row.asked_by, row.load_balancer_id) == ("rotation", number, "admin", "a")
    assert fleet.machines("a", "retiring") == ["a-1"]
    assert fleet.look(10) == [], "the amphora is not replaced yet"
    fleet.replace("a")
    assert fleet.look(5) == [], "the replacement is observed first"
    moves = fleet.look(3)
    assert [type(move) for move in moves] == [FinishItem, StartItem]
    assert fleet.states(number) == {"a": ItemState.DONE, "b": ItemState.RUNNING}
    fleet.replace("b")
    fleet.look(10)
    found = fleet.state(number)
    assert (found.state, fleet.states(number)) == (RotationState.DONE, {"a": ItemState.DONE, "b": ItemState.DONE})
    assert found.ended_at is not None
    assert fleet.look() == []
    assert DUTY not in fleet.database.read(process_registry.list_duties).get("one", []), (
        "the duty is free for another process"
    )


def test_both_amphorae_of_a_pair_are_retired_together(fleet):
    fleet.add("a", 2)
    fleet.ask()
    fleet.look()
    assert fleet.machines("a", "retiring") == ["a-1", "a-2"]
    fleet.replace("a")
    assert any(isinstance(move, FinishItem) for move in fleet.look(10))


def test_a_silent_new_amphora_pauses_the_rotation(fleet):
    for name in ("a", "b"):
        fleet.add(name)
    number = fleet.ask()
    fleet.look()
    fleet.replace("a")
    (new,) = fleet.machines("a")
    assert fleet.look(15, silent=[new]) == []
    fleet.look(10, silent=[new])
    found = fleet.state(number)
    assert found.state is RotationState.PAUSED
    assert found.reason == f"load balancer a: not done in 20 s: amphora {new} sends no heartbeats"
    assert fleet.states(number) == {"a": ItemState.FAILED, "b": ItemState.WAITING}
    # The operator repairs the cause.
    fleet.database.write(lambda c: rotations.resume_rotation(c, number))
    fleet.look(10)
    assert fleet.states(number) == {"a": ItemState.DONE, "b": ItemState.RUNNING}


def test_failed_attempts_pause_the_rotation_and_are_retried_after_resume(fleet):
    fleet.add("a")
    fleet.write(job.update().values(attempts=1))
    number = fleet.ask()
    fleet.look(2)
    fleet.write(job.update().values(attempts=7, error="no quota"))
    assert fleet.look() == []
    fleet.write(job.update().values(attempts=8), object_status.update().values(provisioning="ERROR"))
    fleet.look()
    assert fleet.state(number).reason == "load balancer a: it is in ERROR: no quota"
    fleet.write(job.update().values(due_at=1e12))
    fleet.database.write(lambda c: rotations.resume_rotation(c, number))
    row = fleet.database.read(lambda c: c.execute(sa.select(job)).one())
    assert row.due_at < 1.0, "the retry starts at once"
    assert fleet.look(3) == []
    fleet.replace("a")
    fleet.write(object_status.update().values(provisioning="ACTIVE"))
    fleet.look(10)
    assert fleet.states(number) == {"a": ItemState.DONE}


def test_another_controller_continues_the_rotation_from_its_rows(fleet):
    for name in ("a", "b"):
        fleet.add(name)
    number = fleet.ask()
    fleet.look()
    two = fleet.rotator("two")
    assert fleet.look(3, by=two) == [], "another process has the duty"
    # The first controller is killed; its memory is lost.
    fleet.one.release()
    fleet.replace("a")
    assert fleet.look(5, by=two) == []
    moves = fleet.look(5, by=two)
    assert [type(move) for move in moves] == [FinishItem, StartItem]
    assert fleet.states(number) == {"a": ItemState.DONE, "b": ItemState.RUNNING}


def test_two_rotators_with_the_same_duty_exceed_no_limit(fleet, monkeypatch):
    monkeypatch.setattr(module, "acquire_duty", lambda *_: True)
    for name in "abcdef":
        fleet.add(name)
    number = fleet.ask(most=2)
    gate = threading.Barrier(3)

    def go(name):
        one = fleet.rotator(name)
        gate.wait()
        one.advance()

    threads = [threading.Thread(target=go, args=(name,)) for name in ("x", "y", "z")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(fleet.states(number).values()).count(ItemState.RUNNING) == 2
    assert len(fleet.database.read(failovers.list_open_failovers)) == 2


def test_user_requests_precede_the_rotation(fleet, monkeypatch):
    fleet.add("a")
    number = fleet.ask()
    hold = rotations.lock_work

    def too_late(connection, load_balancer_ids):
        connection.execute(job.update().values(generation=2))
        hold(connection, load_balancer_ids)

    monkeypatch.setattr(rotations, "lock_work", too_late)
    fleet.look()
    assert fleet.states(number) == {"a": ItemState.WAITING}
    assert fleet.machines("a") == ["a-1"]
    assert fleet.state(number).reason == "waiting for load balancer a: it is being changed"
    fleet.write(job.update().values(applied=2, committed=2))
    fleet.write(amphora.update().values(confirmed=2))
    fleet.look(2)
    assert fleet.states(number) == {"a": ItemState.RUNNING}
    assert fleet.state(number).reason is None


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        (circuit_breaker.AUTOMATIC, "open", "the circuit breaker is open (9 are silent)"),
        (circuit_breaker.AUTOMATIC, "trial", "the circuit breaker is trial (9 are silent)"),
        (circuit_breaker.OPERATOR, "open", "the circuit breaker is open (9 are silent)"),
        (circuit_breaker.SIGHT, "blind", "the failure detector is blind (9 are silent)"),
    ],
)
def test_the_rotation_waits_while_the_breaker_is_open(fleet, name, state, words):
    fleet.add("a")
    number = fleet.ask()

    def put(one):
        row = circuit_breaker.BreakerRow(name=name, state=one, since=1.0, reason="9 are silent")
        fleet.database.write(lambda c: circuit_breaker.write_breaker_row(c, row))

    put(state)
    fleet.look(25)
    found = fleet.state(number)
    assert found.state is RotationState.RUNNING, "the wait has no limit"
    assert found.reason == f"no replacement starts: {words}"
    put(circuit_breaker.SEEING if name == circuit_breaker.SIGHT else circuit_breaker.CLOSED)
    fleet.look(2)
    assert fleet.states(number) == {"a": ItemState.RUNNING}


@pytest.mark.parametrize("change", ["pause", "abort"])
def test_a_started_replacement_completes(fleet, change):
    for name in ("a", "b"):
        fleet.add(name)
    number = fleet.ask()
    fleet.look()
    if change == "pause":
        fleet.database.write(lambda c: rotations.pause_rotation(c, number, "for a while"))
    else:
        fleet.database.write(lambda c: rotations.abort_rotation(c, number))
    fleet.replace("a")
    fleet.look(20)
    left = {"pause": ItemState.WAITING, "abort": ItemState.SKIPPED}[change]
    assert fleet.states(number) == {"a": ItemState.DONE, "b": left}
    assert fleet.machines("b") == ["b-2"]
    found = fleet.state(number)
    assert found.state is {"pause": RotationState.PAUSED, "abort": RotationState.ABORTED}[change]
    assert (found.ended_at is None) is (change == "pause")


def test_a_draining_controller_releases_the_duty_and_an_outage_does_not_end_the_thread(fleet, monkeypatch):
    fleet.add("a")
    number = fleet.ask()
    monkeypatch.setattr(module, "_EVERY", 0.001)
    stopping, draining = threading.Event(), threading.Event()
    read, failing = fleet.database.read, threading.Event()
    failed = threading.Event()

    def breaking(task):
        if failing.is_set():
            failing.clear()
            failed.set()
            raise StoreError("read", "it is away")
        return read(task)

    fleet.database.read = breaking
    failing.set()
    thread = threading.Thread(target=fleet.one.run, args=(stopping, draining))
    thread.start()
    try:
        assert failed.wait(20)
        assert eventually(lambda: fleet.states(number) == {"a": ItemState.RUNNING})
        assert DUTY in fleet.database.read(process_registry.list_duties)["one"]
        draining.set()
        assert eventually(lambda: not fleet.database.read(process_registry.list_duties))
    finally:
        stopping.set()
        thread.join(20)
    assert not thread.is_alive()


def eventually(question, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_last_heartbeats_by_amphora():
    watch = RotationWatch(3.0)
    watch.observe_heartbeats({"a": (1, 1)}, 1.0)
    assert watch.is_heard("a") is None
    watch.observe_heartbeats({"a": (1, 2)}, 1.0)
    assert watch.is_heard("a") is True
    for _ in range(3):
        watch.observe_heartbeats({"a": (1, 2)}, 1.0)
    assert watch.is_heard("a") is True
    watch.observe_heartbeats({"a": (1, 2)}, 1.0)
    assert watch.is_heard("a") is False
    assert watch.is_heard("b") is None
