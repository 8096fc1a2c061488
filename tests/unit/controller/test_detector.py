# SPDX-License-Identifier: Apache-2.0
"""The detector over a real database: what it begins, what it leaves alone, and what it says of it."""

import shutil
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.controller.detection import Answer, How
from amphora_driver.controller.detector import Detector
from amphora_driver.errors import StoreError
from amphora_driver.queue.jobs import hold_duty
from amphora_driver.store import breakers, failovers, migrate, silences
from amphora_driver.store.engine import Database
from amphora_driver.store.fleet_tables import failover, process, silence
from amphora_driver.store.tables import amphora, amphora_seen, duty, status, work

OPTIONS = """
[failover]
silent_after = 7
mute_after = 30
breaker_trial = 100
breaker_calm = 10
most_at_once = 2
pause_first = 20
"""
STEP = 1.0
BEGIN = 1_900_000_000.0


class Agents:
    """Answers lie ready; who is asked is remembered. `saying` has those that do something else than not to answer."""

    def __init__(self, scene):
        self.scene = scene
        self.saying = {}
        self.asked = []
        self.answers = {}

    def ask(self, amphora_id, _address):
        self.asked.append(amphora_id)
        how = self.saying.get(amphora_id, How.UNANSWERED)
        self.answers[amphora_id] = Answer(how=how, at=self.scene.now, words="timed out")

    def answer(self, amphora_id):
        return self.answers.get(amphora_id)

    def keep(self, amphora_ids):
        self.answers = {one: said for one, said in self.answers.items() if one in amphora_ids}

    def close(self):
        """Nobody is being asked."""


class Scene:
    """Load balancers with one amphora each (`a0` of `lb0`, ...), a health manager, and a clock moved by hand."""

    def __init__(self, folder, monkeypatch, number=20, options=OPTIONS):
        self.now, self.ahead, self.told = 5000.0, 0.0, []
        moved = SimpleNamespace(monotonic=lambda: self.now, time=self.wall, sleep=time.sleep)
        for place in ("controller.detector", "controller.findings", "store.clock", "store.engine", "store.statuses"):
            monkeypatch.setattr(f"amphora_driver.{place}.time", moved)
        path = folder / "driver.conf"
        path.write_text(f"[store]\nconnection = sqlite:///{folder}/driver.sqlite\n{options}")
        self.conf = config.load([str(path)])
        self.database = Database(self.conf.store.connection, durable=False)
        self.detector = self.made("me")
        self.sequence = 0
        self.speaking = set()
        self.hearing = True
        self.write(process.insert().values(name="hm", kind="health-manager", host="h", started_at=0, seen_at=0, beat=1))
        for index in range(number):
            self.balancer(f"lb{index}", f"a{index}")

    def wall(self):
        """Seconds since 1970, as everybody sees them."""
        return BEGIN + self.now + self.ahead

    def made(self, owner):
        detector = Detector(self.conf, self.database, None, owner, self.told.append)
        detector._witnesses.close()
        detector._witnesses = self.agents = Agents(self)
        return detector

    def write(self, *statements):
        return self.database.write(lambda c: [c.execute(one).rowcount for one in statements])

    def read(self, query):
        return self.database.read(lambda c: c.execute(query).all())

    def balancer(self, load_balancer_id, *amphora_ids, op="apply"):
        row = {"load_balancer_id": load_balancer_id, "op": op, "generation": 1, "committed": 1, "dirty": False}
        said = {"object_id": load_balancer_id, "kind": "loadbalancers", "provisioning": "ACTIVE", "operating": "ONLINE"}
        self.write(work.insert().values(**row), status.insert().values(load_balancer_id=load_balancer_id, **said))
        for one in amphora_ids:
            self.amphora(load_balancer_id, one)

    def amphora(self, load_balancer_id, amphora_id, state="ready"):
        row = {"id": amphora_id, "load_balancer_id": load_balancer_id, "role": "STANDALONE", "state": state}
        more = {"heartbeat_key": b"", "created_at": 1.0, "ready_at": 1.0, "management_address": "203.0.113.7"}
        self.write(amphora.insert().values(**row, **more))
        self.speaking.add(amphora_id)

    def go(self, seconds, detector=None):
        """Time passes; whoever speaks is heard."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.sequence += 1
            self.database.write(self._hear)
            (detector or self.detector).turn()
        return self

    def _hear(self, connection):
        known = set(connection.execute(sa.select(amphora_seen.c.amphora_id)).scalars())
        place = {"epoch": 1, "sequence": self.sequence, "seen_at": self.wall()}
        if old := self.speaking & known:
            connection.execute(amphora_seen.update().where(amphora_seen.c.amphora_id.in_(old)).values(**place))
        for one in self.speaking - known:
            connection.execute(amphora_seen.insert().values(amphora_id=one, **place))
        if self.hearing:
            connection.execute(process.update().values(beat=process.c.beat + 1))

    def hush(self, *amphora_ids):
        self.speaking -= set(amphora_ids)
        return self

    # What came of it.

    def replaced(self):
        return {row.id for row in self.read(sa.select(amphora.c.id).where(amphora.c.state == "retiring"))}

    def verdicts(self):
        return {row.amphora_id: (row.kind, row.verdict) for row in self.read(sa.select(silence))}

    def breaker(self, name=breakers.AUTOMATIC):
        return self.database.read(breakers.every)[name]

    def operating(self, load_balancer_id):
        (row,) = self.read(sa.select(status.c.operating, status.c.reason).where(status.c.object_id == load_balancer_id))
        return tuple(row)

    def served(self, load_balancer_id, amphora_id):
        """What a controller does: another amphora serves in the place of those that were replaced."""
        self.write(amphora.delete().where(amphora.c.load_balancer_id == load_balancer_id))
        self.amphora(load_balancer_id, amphora_id)
        self.database.write(lambda c: failovers.served(c, load_balancer_id, self.wall()))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database with the schema, made once."""
    path = tmp_path_factory.mktemp("empty") / "driver.sqlite"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(autouse=True)
def copied(empty, tmp_path):
    shutil.copy(empty, tmp_path / "driver.sqlite")


@pytest.fixture
def scene(tmp_path, monkeypatch):
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.database.dispose()


def test_a_dead_amphora_is_replaced(scene):
    scene.go(5).hush("a3").go(6)
    assert scene.replaced() == set()
    assert scene.agents.asked == ["a3"], "it is late, and asked already"
    scene.go(2)
    assert scene.replaced() == {"a3"}
    (row,) = scene.read(sa.select(failover))
    assert (row.load_balancer_id, row.amphora_id, row.cause) == ("lb3", "a3", "silent")
    assert row.silent_since == pytest.approx(scene.wall(), abs=20)
    found = {one.word: one.detail for one in scene.database.read(lambda c: failovers.events(c, row.id))}
    assert found["found"].startswith("heard last at 2")
    assert "does not answer (timed out)" in found["found"]
    assert set(scene.told) == {"controller", "reporter"}
    assert scene.operating("lb3") == ("ERROR", "amphora a3 is not heard and does not answer")
    assert [row.dirty for row in scene.read(sa.select(work).where(work.c.load_balancer_id == "lb3"))] == [True]
    scene.go(1)
    assert scene.verdicts() == {}, "who is being replaced is not silent, but on its way out"


def test_everybody_is_left_alone_while_everybody_speaks(scene):
    scene.go(60)
    assert (scene.replaced(), scene.verdicts(), scene.told, scene.agents.asked) == (set(), {}, [], [])
    assert scene.breaker().state == "closed"
    assert (scene.breaker(breakers.SIGHT).state, scene.breaker(breakers.SIGHT).watched) == ("seeing", 20)


def test_who_answers_is_mute_and_has_more_time(scene):
    scene.agents.saying["a3"] = How.ANSWERS
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert scene.verdicts() == {"a3": ("mute", "its agent answers; it is replaced after 30 s of silence")}
    assert scene.operating("lb3") == ("ONLINE", None), "it may well serve"
    scene.go(12)
    assert scene.replaced() == {"a3"}
    assert [row.cause for row in scene.read(sa.select(failover))] == ["mute"]


def test_who_never_spoke_counts_from_when_it_was_seen(scene):
    scene.go(5)
    scene.amphora("lb3", "new")
    scene.hush("new").go(6)
    assert scene.replaced() == set()
    scene.go(2)
    (row,) = scene.read(sa.select(failover))
    assert (row.amphora_id, row.cause) == ("new", "never_spoke")
    assert scene.operating("lb3")[0] == "ONLINE", "the other one is heard"


@pytest.mark.parametrize(("op", "state"), [("delete", "ready"), ("spares", "ready"), ("apply", "booting")])
def test_what_is_not_the_detectors_business(scene, op, state):
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
    assert all("it waits: the breaker is open" in words for _, words in scene.verdicts().values())
    assert scene.operating("lb0")[0] == "ONLINE", "who may be blind says nothing"
    assert "the breaker is open, no amphora is replaced unasked" in caplog.text
    scene.speaking |= {f"a{index}" for index in range(5)}
    scene.go(12)
    assert scene.breaker().state == "closed"
    assert (scene.replaced(), scene.verdicts()) == (set(), {})


def test_those_that_fall_silent_one_after_the_other_are_waited_for(scene):
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
    scene.database.write(lambda c: breakers.hold(c, "anna: switches are replaced", scene.wall()))
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "an operator holds the breaker open (anna: switches are replaced)" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR", "that it is dead is not in doubt"
    scene.database.write(lambda c: breakers.close(c, "closed by anna", scene.wall()))
    scene.go(1)
    assert scene.replaced() == {"a3"}


def test_an_operator_closes_it(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    assert scene.breaker().state == "open"
    scene.database.write(lambda c: breakers.close(c, "closed by anna", scene.wall()))
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
    assert "it waits: 2 fail-overs nobody asked for go on already" in next(iter(scene.verdicts().values()))[1]
    # One that never ends holds up the others no longer than a boot may take.
    scene.go(300)
    assert len(scene.replaced()) == 4


def test_a_replacement_that_dies_too_waits_for_its_pause(scene):
    scene.go(5).hush("a3").go(8.5)
    assert scene.replaced() == {"a3"}
    scene.served("lb3", "second")
    scene.go(1).hush("second").go(10)
    assert scene.replaced() == set()
    assert "the pause of 20 s after the last one is not over" in scene.verdicts()["second"][1]
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


def test_one_of_a_pair_says_nothing_of_the_load_balancer(scene):
    scene.balancer("pair", "p1", "p2")
    scene.go(5).hush("p1").go(9)
    assert scene.replaced() == {"p1"}
    assert scene.operating("pair") == ("ONLINE", None)


def test_what_is_switched_off_is_not_in_error(scene):
    scene.write(status.update().where(status.c.object_id == "lb3").values(operating="OFFLINE"))
    scene.go(5).hush("a3").go(9)
    assert scene.replaced() == {"a3"}
    assert scene.operating("lb3")[0] == "OFFLINE"


def test_switched_off_it_only_says_who_is_dead(tmp_path, monkeypatch):
    scene = Scene(tmp_path, monkeypatch, options=OPTIONS + "automatic = false\n")
    scene.go(5).hush("a3").go(20)
    assert scene.replaced() == set()
    assert "[failover] automatic is off" in scene.verdicts()["a3"][1]
    assert scene.operating("lb3")[0] == "ERROR"
    scene.database.dispose()


def test_what_blinds_us_kills_nobody(scene):
    scene.go(5)
    scene.hearing = False
    silent = scene.speaking.copy()
    scene.hush(*silent).go(60)
    assert (scene.replaced(), scene.verdicts()) == (set(), {})
    assert scene.breaker(breakers.SIGHT).state == "blind"
    assert scene.breaker().state == "closed", "who sees nothing opens nothing"
    scene.hearing = True
    scene.speaking |= silent
    scene.go(30)
    assert (scene.replaced(), scene.agents.asked) == (set(), [])


def test_a_breaker_does_not_close_because_nobody_looks(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.hearing = False
    scene.go(30)
    scene.hearing = True
    scene.go(40)
    assert scene.breaker().state == "open"


@pytest.mark.parametrize("shift", [600.0, 86_400.0, -600.0, -86_400.0])
def test_a_clock_that_is_moved_kills_nobody_and_hides_nobody(scene, shift):
    scene.go(5)
    scene.ahead = shift
    scene.go(30)
    assert (scene.replaced(), scene.verdicts()) == (set(), {})
    scene.hush("a3").go(10)
    assert scene.replaced() == {"a3"}


def test_a_process_that_stood_still_counts_anew(scene):
    scene.go(5).hush("a3").go(6)
    scene.now += 600
    scene.go(6)
    assert scene.replaced() == set()
    scene.go(4)
    assert scene.replaced() == {"a3"}


def test_a_database_that_was_away_counts_anew(scene, monkeypatch):
    scene.go(5).hush("a3").go(6)

    def away(_work):
        raise StoreError("read", "away")

    with monkeypatch.context() as patched:
        patched.setattr(scene.database, "read", away)
        with pytest.raises(StoreError):
            scene.detector.turn()
        scene.detector._lose("the database is away")
    scene.go(6)
    assert scene.replaced() == set()
    scene.go(5)
    assert scene.replaced() == {"a3"}


def test_only_who_has_the_duty_looks_and_who_gets_it_counts_anew(scene):
    scene.go(5).hush("a3").go(6)
    other = scene.made("other")
    scene.go(4, other)
    assert scene.read(sa.select(duty.c.owner)) == [("me",)]
    scene.detector.leave("it ends")
    scene.go(7, other)
    assert scene.replaced() == set()
    scene.go(3, other)
    assert scene.replaced() == {"a3"}


def test_who_has_lost_the_duty_begins_nothing(scene):
    scene.go(5)
    scene.write(duty.update().where(duty.c.name == silences.DUTY).values(owner="other", leased_until=scene.wall() + 99))
    scene.hush("a3").go(20)
    assert scene.replaced() == set()
    held = scene.database.write(lambda c: silences.unchanged(c, "lb4", {"a4": (1, scene.sequence)}, "me"))
    assert held == set()
    assert not hold_duty(scene.database, silences.DUTY, "me", 1.0)


def test_who_was_heard_in_the_last_moment_is_not_replaced(scene):
    scene.go(5)
    place = (1, scene.sequence)

    def still(**orders):
        return scene.database.write(lambda c: silences.unchanged(c, "lb4", orders, "me"))

    assert still(a4=place) == {"a4"}
    assert still(a4=(1, scene.sequence - 1)) == set()
    assert still(a4=None) == set()
    scene.write(amphora.update().where(amphora.c.id == "a4").values(state="retiring"))
    assert still(a4=place) == set()


def test_a_quiet_fleet_costs_no_writes(scene, monkeypatch):
    scene.agents.saying["a3"] = How.ANSWERS
    scene.go(5).hush("a3").go(15)
    written = []
    monkeypatch.setattr(silences, "write", lambda *_: written.append("silence"))
    monkeypatch.setattr(breakers, "put", lambda *_: written.append("breaker"))
    scene.go(10)
    assert written == []


def test_rows_of_the_one_before_are_cleaned_up(scene):
    row = {"amphora_id": "gone", "load_balancer_id": "lb", "kind": "silent", "since": 1.0}
    scene.write(silence.insert().values(**row))
    scene.go(1)
    assert scene.verdicts() == {}


def test_an_open_breaker_outlives_its_detector(scene):
    scene.go(5).hush(*(f"a{index}" for index in range(6))).go(20)
    scene.detector.leave("it ends")
    other = scene.made("other")
    scene.go(20, other)
    assert scene.breaker().state == "open"
    assert scene.replaced() == set()
