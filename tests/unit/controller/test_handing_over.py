# SPDX-License-Identifier: Apache-2.0
"""The step that moves the VIPs: in which order the two are asked, and that nothing depends on what they say."""

from types import SimpleNamespace

import pytest

from amphora_driver import config
from amphora_driver.controller import plan as planning
from amphora_driver.controller.steps import Backends, Steps
from amphora_driver.errors import AgentRefused, AgentUnreachable
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.queue.jobs import Jobs
from amphora_driver.store import amphorae, migrate
from amphora_driver.store.amphorae import State
from amphora_driver.store.engine import Database
from amphora_driver.store.intents import Intents

LB, OLD, NEW = "lb", "old", "new"
TREE = LoadBalancer(
    id=LB, project_id="demo", vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
)
STEP = planning.HandOver(amphora_id=OLD, to=NEW, reason="a test")


class Agents:
    """What is asked of whom; `trouble` is raised instead of an answer, by name of the question."""

    def __init__(self, trouble):
        self.asked = []
        self.trouble = trouble

    def expect_vips(self, amphora_id, _address, seconds):
        self._ask("expect", amphora_id, seconds)

    def release_vips(self, amphora_id, _address, drain):
        self._ask("release", amphora_id, drain)

    def _ask(self, what, amphora_id, seconds):
        self.asked.append((what, amphora_id, seconds))
        if what in self.trouble:
            raise self.trouble[what]


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrate.upgrade(conf.store.connection)
    database = Database(conf.store.connection)
    Intents(database, lambda node: None).create_load_balancer(TREE, read_back=False)
    for name, role, state in ((OLD, "MASTER", State.RETIRING), (NEW, "BACKUP", State.READY)):
        database.write(lambda c, name=name, role=role: amphorae.record(c, name, LB, role, b"key"))
        database.write(lambda c, name=name, state=state: amphorae.change(c, name, state=state, confirmed=1))
    yield database
    database.dispose()


def hand_over(conf, database, trouble):
    """Take the step; what was asked, and the old one as it is recorded then."""
    agents = Agents(trouble)
    backends = SimpleNamespace(network=lambda _: None, compute=lambda *_: None)
    everything = Backends(conf=conf, database=database, catalogue=backends, agents=agents, authority=None, vault=None)
    lease = Jobs(database, "me", 60.0).claim()
    observed = database.read(lambda c: amphorae.of_load_balancer(c, LB))
    wanted = planning.Wanted(
        load_balancer_id=LB, generation=1, applied=0, gone=False, readable=True, tree=TREE, networks={}
    )
    Steps(everything, lease).take(STEP, wanted, observed)
    after = database.read(lambda c: amphorae.of_load_balancer(c, LB))
    return agents.asked, next(one for one in after if one.id == OLD)


def test_the_one_that_stays_is_ready_before_the_other_one_lets_go(conf, database):
    asked, old = hand_over(conf, database, {})
    assert [(what, who) for what, who, _ in asked] == [("expect", NEW), ("release", OLD)]
    assert asked[0][2] > asked[1][2], "it is ready for longer than the connections may go on"
    assert old.handed_over
    assert old.state is State.RETIRING


@pytest.mark.parametrize("question", ["expect", "release"])
@pytest.mark.parametrize("error", [AgentRefused("ask", "no", status=404), AgentUnreachable("ask", "away")])
def test_what_they_say_changes_nothing(conf, database, question, error):
    assert hand_over(conf, database, {question: error})[1].handed_over, "it was asked, and is replaced now"
