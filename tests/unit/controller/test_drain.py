# SPDX-License-Identifier: Apache-2.0
"""Hand-over and drain: the order of requests to both agents, and the effect of their answers."""

import time
from types import SimpleNamespace

import migrated
import pytest

from amphora_driver import config
from amphora_driver.agent.client import Vrrp
from amphora_driver.database.engine import Database
from amphora_driver.errors import AgentRefused, AgentUnreachable, Superseded
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.executor import StepExecutor
from amphora_driver.reconcile.job import Job
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

LB, OLD, NEW = "lb", "old", "new"
TREE = LoadBalancer(
    id=LB, project_id="demo", vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
)
STEP = step_types.HandOver(amphora_id=OLD, to=NEW, reason="a test")


class Agents:
    """Records requests by agent; `trouble` has errors by request name, a single error or a list in order."""

    def __init__(self, trouble, says):
        self.asked = []
        self.trouble = trouble
        self.says = says
        self.running_job = None

    def expect_vips(self, amphora_id, _address, seconds, *, deadline):
        self._ask("expect", amphora_id, seconds)

    def release_vips(self, amphora_id, _address, drain, *, direct_answers, deadline):
        self.direct_answers = direct_answers
        self._ask("release", amphora_id, drain)

    def vrrp(self, amphora_id, _address, *, deadline=None):
        self._ask("vrrp", amphora_id, deadline)
        return self.says

    def _ask(self, what, amphora_id, seconds):
        self.asked.append((what, amphora_id, seconds))
        trouble = self.trouble.get(what)
        if isinstance(trouble, list):
            trouble = trouble.pop(0) if trouble else None
        if trouble is not None:
            raise trouble

    @property
    def order(self):
        return [what for what, _, _ in self.asked]


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
    for name, role, state in ((OLD, "MASTER", AmphoraState.RETIRING), (NEW, "BACKUP", AmphoraState.READY)):
        database.write(lambda c, name=name, role=role: amphorae.insert_amphora(c, name, LB, role, b"key"))
        database.write(lambda c, name=name, state=state: amphorae.update_amphora(c, name, state=state, confirmed=1))
    yield database
    database.dispose()


def take(conf, database, step, agents, *, steps=False, direct=True):
    """Perform the step; return the recorded old amphora."""
    backends = SimpleNamespace(network=lambda _: Machines(direct), compute=lambda *_: Machines())
    everything = ReconcileContext(
        conf=conf, database=database, catalogue=backends, agents=agents, authority=None, vault=None
    )
    lease = Jobs(database, "me", 60.0).claim()
    observed = database.read(lambda c: amphorae.load_amphorae(c, LB))
    wanted = step_types.LoadBalancerView(
        load_balancer_id=LB,
        generation=1,
        applied=0,
        gone=False,
        readable=True,
        tree=TREE,
        networks={},
        roles=("MASTER", "BACKUP"),
        priorities={"MASTER": 254, "BACKUP": 253},
        now=database.now(),
    )
    agents.running_job = Job(lease, database, 60.0)
    taking = StepExecutor(everything, agents.running_job)
    taking.execute(step, wanted, observed)
    if steps:
        return taking
    after = database.read(lambda c: amphorae.load_amphorae(c, LB))
    return next((one for one in after if one.id == OLD), None)


HOLDS, GONE, EMPTY = Vrrp(holds_vip=True), Vrrp(holds_vip=False, draining=12.0), Vrrp(holds_vip=False)
REFUSED, AWAY = AgentRefused("ask", "no", status=409), AgentUnreachable("ask", "away")


def test_the_new_holder_expects_the_vips_before_the_old_holder_releases_them(conf, database):
    agents = Agents({}, HOLDS)
    before = time.time()
    old = take(conf, database, STEP, agents)
    assert [(what, agent) for what, agent, _ in agents.asked] == [("expect", NEW), ("release", OLD)]
    drain = conf.amp_controller.drain_timeout
    assert agents.asked[1][2] == drain
    assert agents.asked[0][2] > drain, "the new holder redirects longer than the drain lasts"
    assert old.handed_over
    assert before + drain <= old.drains_until <= time.time() + drain
    assert old.state is AmphoraState.RETIRING


@pytest.mark.parametrize("direct", [True, False])
def test_the_release_says_whether_ports_pass_direct_answers(conf, database, direct):
    agents = Agents({}, HOLDS)
    old = take(conf, database, STEP, agents, direct=direct)
    assert agents.order == ["expect", "release"]
    assert agents.direct_answers is direct
    assert old.handed_over


def test_an_amphora_without_tunnelled_answers_hands_over_without_a_drain(conf, database):
    agents = Agents({"release": [REFUSED]}, HOLDS)
    take(conf, database, STEP, agents, direct=False)
    assert [(what, seconds) for what, _, seconds in agents.asked if what == "release"][-1] == ("release", 0.0)


@pytest.mark.parametrize(
    ("trouble", "says", "order", "left"),
    [
        ({"expect": REFUSED}, HOLDS, ["expect", "release"], 0.0),
        ({"expect": AWAY}, HOLDS, ["expect", "release"], 0.0),
        ({"release": [REFUSED]}, HOLDS, ["expect", "release", "vrrp", "release"], 0.0),
        ({"release": REFUSED}, HOLDS, ["expect", *["release", "vrrp"] * 2], None),
        ({"release": REFUSED}, GONE, ["expect", "release", "vrrp"], 12.0),
        ({"release": AWAY}, GONE, ["expect", "release", "vrrp"], 12.0),
        ({"release": REFUSED}, EMPTY, ["expect", "release", "vrrp"], 0.0),
        ({"release": AWAY, "vrrp": AWAY}, HOLDS, ["expect", "release", "vrrp"], None),
        ({"expect": AWAY, "release": AWAY, "vrrp": AWAY}, HOLDS, ["expect", "release", "vrrp"], None),
    ],
    ids=[
        "the partner refuses",
        "the partner is unreachable",
        "release with a drain refused",
        "every release refused",
        "released before, draining",
        "the answer is lost",
        "released before, drained",
        "unreachable",
        "both are unreachable",
    ],
)
def test_the_hand_over_handles_all_answers(conf, database, trouble, says, order, left):
    agents = Agents(trouble, says)
    old = take(conf, database, STEP, agents)
    assert agents.order == order
    assert old.handed_over, "after the request the amphora is replaced"
    if left is None:
        assert old.drains_until is None, "the amphora may still have its VIPs"
    else:
        assert old.drains_until == pytest.approx(time.time() + left, abs=5.0)


def test_a_drain_timeout_of_zero_releases_the_vips_at_once(conf, database):
    conf.set_override("drain_timeout", 0.0, group="amp_controller")
    agents = Agents({}, HOLDS)
    old = take(conf, database, STEP, agents)
    assert agents.asked == [("release", OLD, 0.0)], "no agent expects the VIPs"
    assert old.drains_until <= time.time()


@pytest.mark.parametrize(
    ("trouble", "says", "silent", "over"),
    [
        ({}, GONE, False, False),
        ({}, GONE, True, False),
        ({}, EMPTY, False, True),
        ({}, Vrrp(holds_vip=True, draining=12.0), False, True),
        ({"vrrp": AWAY}, EMPTY, False, False),
        ({"vrrp": REFUSED}, EMPTY, False, False),
        ({"vrrp": AWAY}, EMPTY, True, True),
    ],
    ids=["draining", "draining, heartbeats late", "drained", "holder again", "unreachable", "refused", "dead"],
)
def test_the_drain_ends_by_the_agents_answer(conf, database, trouble, says, silent, over):
    ends = time.time() + 60
    database.write(lambda c: amphorae.update_amphora(c, OLD, handed_over=True, drains_until=ends))
    agents = Agents(trouble, says)
    old = take(conf, database, step_types.CheckDrain(amphora_id=OLD, silent=silent, reason="a test"), agents)
    assert agents.order == ["vrrp"]
    assert old.drains_until == (0.0 if over else ends)


@pytest.mark.parametrize(
    ("changes", "trouble", "says", "stays"),
    [
        ({}, {}, GONE, True),
        ({}, {}, EMPTY, False),
        ({}, {}, HOLDS, False),
        ({}, {"vrrp": AWAY}, GONE, False),
        ({"handed_over": True, "drains_until": 0.0}, {}, GONE, False),
    ],
    ids=["draining", "no connections", "holds the VIPs", "unreachable", "drain time is over"],
)
def test_a_drain_continues_after_a_controller_crash(conf, database, changes, trouble, says, stays):
    """The controller crashes after the hand-over request and before it records the hand-over."""
    heard = amphorae.LastHeartbeat(
        amphora_id=OLD, seen_at=time.time(), generation=1, epoch=1, sequence=1, holds_vip=False
    )
    database.write(lambda c: amphorae.record_heartbeats(c, [heard]))
    if changes:
        database.write(lambda c: amphorae.update_amphora(c, OLD, **changes))
    agents = Agents(trouble, says)
    left = take(conf, database, step_types.Release(amphora_id=OLD, reason="a test"), agents)
    assert (left is not None) == stays
    if stays:
        assert left.handed_over
        assert left.drains_until == pytest.approx(time.time() + 12.0, abs=5.0)


ASK = step_types.QueryVipHolder(amphora_ids=(OLD, NEW), reason="a test")


@pytest.mark.parametrize(
    ("trouble", "says", "told"),
    [
        ({}, HOLDS, (True, True)),
        ({}, EMPTY, (False, False)),
        ({}, Vrrp(holds_vip=None), (False, None)),
        ({"vrrp": [AWAY]}, HOLDS, (False, True)),
        ({"vrrp": REFUSED}, HOLDS, (False, None)),
    ],
    ids=["both hold the VIPs", "none holds the VIPs", "no VRRP", "one is unreachable", "refused"],
)
def test_answers_precede_older_heartbeats(conf, database, trouble, says, told):
    """OLD reports no VIPs by heartbeat, and NEW has sent none. The answers count until a newer heartbeat."""
    _record_heartbeat(database, OLD, at=100.0, sequence=1)
    agents = Agents(trouble, says)
    steps = take(conf, database, ASK, agents, steps=True)
    assert agents.order == ["vrrp", "vrrp"]
    assert steps.removal.holder_queried
    assert _known_holders(database, steps) == told
    _record_heartbeat(database, OLD, at=101.0, sequence=2)
    assert _known_holders(database, steps) == (False, told[1]), "the newer heartbeat counts"


def test_an_answer_counts_until_a_heartbeat_reports_the_vips(conf, database):
    """An overloaded health manager records the times of heartbeats without their values."""
    steps = take(conf, database, ASK, Agents({}, HOLDS), steps=True)
    for sequence, (holds_vip, known) in enumerate([(None, True), (None, True), (False, False), (None, None)], start=1):
        _record_heartbeat(database, OLD, at=100.0 + sequence, sequence=sequence, holds_vip=holds_vip)
        assert _known_holders(database, steps) == (known, True)


def _record_heartbeat(database, name, *, at, sequence, holds_vip=False):
    heard = amphorae.LastHeartbeat(
        amphora_id=name, seen_at=at, generation=1, epoch=1, sequence=sequence, holds_vip=holds_vip
    )
    database.write(lambda c: amphorae.record_heartbeats(c, [heard]))


def _known_holders(database, steps):
    found = steps.removal.with_answers(database.read(lambda c: amphorae.load_amphorae(c, LB)))
    by_id = {one.id: one.holds_vip for one in found}
    return by_id[OLD], by_id[NEW]


class Machines:
    """Compute and network backends without resources."""

    def __init__(self, direct=True):
        self._direct = direct

    def direct_answers_allowed(self, port_ids):
        return self._direct

    def destroy(self, amphora_id):
        pass

    def ports(self, owner):
        return ()


class CancelledDuringRequest(Agents):
    """Agents; the controller's shutdown cancels the job during a request."""

    def __init__(self, question):
        super().__init__({question: AgentUnreachable("ask", "the deadline")}, Vrrp(holds_vip=True, draining=None))
        self.question = question

    def _ask(self, what, amphora_id, seconds):
        if what == self.question:
            self.running_job.preempt("this controller ends")
        super()._ask(what, amphora_id, seconds)


@pytest.mark.parametrize("question", ["expect", "release"])
def test_a_cancelled_request_records_no_hand_over(conf, database, question):
    with pytest.raises(Superseded):
        take(conf, database, STEP, CancelledDuringRequest(question))
    after = database.read(lambda c: amphorae.load_amphorae(c, LB))
    assert not any(one.handed_over for one in after), "the next controller asks again"


def test_a_cancelled_drain_check_ends_no_connections(conf, database):
    database.write(lambda c: amphorae.update_amphora(c, OLD, handed_over=True, drains_until=time.time() + 60))
    with pytest.raises(Superseded):
        take(
            conf,
            database,
            step_types.CheckDrain(amphora_id=OLD, silent=True, reason="a test"),
            CancelledDuringRequest("vrrp"),
        )
    after = database.read(lambda c: amphorae.load_amphorae(c, LB))
    assert next(one for one in after if one.id == OLD).drains_until > time.time()
