# SPDX-License-Identifier: Apache-2.0
"""A pair's whole life with the real loop over a real database; machines, agents and networks are dictionaries."""

import json
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.agent_client import Vrrp
from amphora_driver.compute.interface import Machine, MachineState
from amphora_driver.controller.reconcile import Reconciler
from amphora_driver.controller.steps import Backends
from amphora_driver.errors import AgentUnreachable
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.model.vocabulary import Kind, ListenerProtocol
from amphora_driver.network.interface import FixedAddress, Port, Subnet
from amphora_driver.queue.jobs import Jobs
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, migrate
from amphora_driver.store.amphorae import State
from amphora_driver.store.engine import Database
from amphora_driver.store.intents import Intents
from amphora_driver.store.tables import status, work
from amphora_driver.store.vault import Vault
from amphora_driver.topology.active_standby import ActiveStandbyTopology

LB, LISTENER = "lb", "listener"
TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1"),
    listeners=(Listener(id=LISTENER, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=80),),
)


class World:
    """Compute, network and agents in one; the one with the VIPs is the first that confirmed, or was handed them."""

    roles = ActiveStandbyTopology.roles
    priorities = ActiveStandbyTopology.priorities

    def __init__(self):
        self.machines = {}
        self.served = {}
        self.dead = set()
        self.holder = None
        # Whether connections of the former holder go on.
        self.lasting = False

    # The catalogue, and who issues certificates.

    def network(self, *_names):
        return self

    compute = network

    def topology(self, _name):
        return self

    def issue_server(self, _amphora_id, _days):
        return SimpleNamespace(expires_at=0.0, bundle=lambda: Secret(b"certificate"))

    # Machines and ports.

    def boot(self, order):
        self.machines[order.amphora_id] = len(self.machines) + 20
        return self.get(order.amphora_id)

    def get(self, amphora_id):
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, management_address="203.0.113.9")

    def destroy(self, amphora_id):
        self.machines.pop(amphora_id, None)

    def ensure_port(self, owner, network_id, subnet_ids):
        number = [*self.machines].index(owner) + len(self.served) + 20
        addresses = tuple(FixedAddress(subnet_id=one, address=f"198.51.100.{number}") for one in subnet_ids)
        return Port(id=owner, network_id=network_id, mac="fa:16:3e:00:00:01", mtu=1500, addresses=addresses)

    def subnet(self, subnet_id):
        return Subnet(id=subnet_id, network_id="n1", cidr="198.51.100.0/24", gateway=None)

    def attach(self, amphora_id, port):
        """Nothing is to be joined."""

    def ports(self, _owner):
        return ()

    def release_vip(self, _load_balancer_id):
        self.holder = None

    # Agents.

    def _reach(self, amphora_id):
        if amphora_id in self.dead or amphora_id not in self.machines:
            raise AgentUnreachable("ask", "away")

    def wait_until_ready(self, amphora_id, _address, _deadline):
        self._reach(amphora_id)

    def info(self, amphora_id, _address, *, deadline):
        return self.vrrp(amphora_id, "")

    def put_bundle(self, amphora_id, _address, body, *, deadline=None):
        self._reach(amphora_id)
        document = json.loads(body)
        self.served[amphora_id] = document
        self.holder = self.holder or amphora_id
        return SimpleNamespace(generation=document["generation"], how="reload", reason="")

    def expect_vips(self, amphora_id, _address, _seconds, *, deadline):
        self._reach(amphora_id)

    def release_vips(self, amphora_id, _address, _drain, *, deadline):
        self._reach(amphora_id)
        (self.holder,) = [peer["name"] for peer in self.served[amphora_id]["vrrp"]["peers"]]

    def vrrp(self, amphora_id, _address, *, deadline=None):
        self._reach(amphora_id)
        return Vrrp(holds_vip=amphora_id == self.holder, draining=10.0 if self.lasting else None)


class Control:
    """A controller, and what users and heartbeats do."""

    def __init__(self, conf, database, world=None):
        self.conf = conf
        self.world = world or World()
        self.database = database
        self.jobs = Jobs(database, "me", 60.0)
        self.intents = Intents(database, lambda node: None)
        names = dict.fromkeys(("catalogue", "agents", "authority"), self.world)
        everything = Backends(conf=conf, database=database, vault=Vault([Fernet.generate_key()]), **names)
        self.reconciler = Reconciler(everything, self.jobs, lambda: None)

    def work(self, times=20):
        """Do what is due now; returns how many jobs there were."""
        for number in range(times):
            lease = self.jobs.claim()
            if lease is None:
                return number
            self.reconciler.reconcile(lease)
        raise AssertionError("it never ends")

    def hurry(self):
        """What is to be done later is due now."""
        self.database.write(lambda c: c.execute(work.update().values(free_at=0.0)))

    def heartbeats(self, *, silent=()):
        """Everybody is heard now, but some only were long ago."""

        def write(connection):
            for name in self.observed():
                at = time.time() - (100 if name in silent else 0)
                said = name == self.world.holder or name in silent
                heard = amphorae.Heard(amphora_id=name, at=at, generation=1, epoch=1, sequence=1, holds_vip=said)
                amphorae.seen(connection, [heard])

        self.database.write(write)

    def row(self):
        return self.database.read(lambda c: c.execute(sa.select(work)).one())

    def observed(self):
        found = self.database.read(lambda c: amphorae.of_load_balancer(c, LB))
        return {one.id: one for one in found}

    def provisioning(self):
        rows = self.database.read(lambda c: c.execute(sa.select(status.c.object_id, status.c.provisioning)).all())
        return dict(rows)

    def pending(self):
        return set(
            self.database.read(
                lambda c: c.execute(sa.select(status.c.object_id).where(status.c.pending.is_not(None))).scalars().all()
            )
        )


@pytest.fixture
def control(tmp_path):
    for name in ("client_ca.pem", "ca.pem"):
        (tmp_path / name).write_text("authority")
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n[controller]\nboot_timeout = 0.1\n"
        f"[certificates]\nclient_ca = {tmp_path}/client_ca.pem\nca_certificate = {tmp_path}/ca.pem\n"
    )
    conf = config.load([str(path)])
    migrate.upgrade(conf.store.connection)
    database = Database(conf.store.connection)
    control = Control(conf, database)
    control.intents.create_load_balancer(TREE, read_back=False)
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    yield control
    database.dispose()


def change(control):
    control.intents.update(Kind.LISTENER, LISTENER, {"connection_limit": control.row().generation})


@pytest.mark.parametrize("dead_one_has_vips", [False, True], ids=["the standby", "the one with the VIPs"])
def test_a_dead_one_means_error_until_it_is_replaced(control, dead_one_has_vips):
    world = control.world
    standby = next(one for one in control.observed() if one != world.holder)
    dead = world.holder if dead_one_has_vips else standby
    alive = standby if dead_one_has_vips else world.holder
    world.dead, world.holder = {dead}, alive
    control.heartbeats(silent=(dead,))
    change(control)
    for attempt in range(control.conf.controller.give_up_after):
        assert control.pending() == {LB, LISTENER}, f"nothing is ACTIVE before attempt {attempt}"
        assert control.work() == 1
        assert control.observed()[alive].confirmed == 2, "users are served what they wanted"
        control.hurry()
    assert control.provisioning() == {LB: "ERROR", LISTENER: "ERROR"}
    assert control.pending() == {LB, LISTENER}, "it is still wanted"

    control.intents.fail_over(LB)
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
    assert control.pending() == set()
    while control.row().dirty:
        control.hurry()
        control.work()
    now = control.observed()
    assert now.keys() == world.machines.keys()
    assert not {dead, alive} & now.keys()
    assert sorted(one.role for one in now.values()) == ["BACKUP", "MASTER"]
    assert {one.confirmed for one in now.values()} == {control.row().generation} == {control.row().applied}
    assert world.holder in now, "the one that lived has handed them over"


def draining(control):
    """A fail-over, up to where connections go on by way of the former holder; returns its id."""
    old = control.world.holder
    control.world.lasting = True
    control.intents.fail_over(LB)
    assert control.work() == 1, "one job, that ends and is due later"
    assert control.provisioning()[LB] == "ACTIVE"
    assert control.observed()[old].state is State.RETIRING
    assert len(control.observed()) == 3
    return old


def test_nobody_waits_while_connections_go_on(control):
    old = draining(control)
    row = control.row()
    assert (row.owner, row.dirty) == (None, True)
    assert time.time() < row.free_at < time.time() + 3
    assert control.jobs.next_due() == row.free_at
    known = {peer["name"] for peer in control.world.served[old]["vrrp"]["peers"]}
    assert known == control.observed().keys() - {old}
    assert control.world.served[old]["vrrp"]["priority"] == 1

    change(control)
    assert control.work() == 1, "at once"
    generation = control.row().generation
    assert control.pending() == set()
    assert control.world.served[old]["generation"] < generation, "it is told of no change any more"
    assert old in control.observed()

    control.world.lasting = False
    for _ in range(2):
        control.hurry()
        control.work()
    assert old not in control.observed()
    assert old not in control.world.machines
    assert not control.row().dirty
    for one, document in control.world.served.items():
        if one in control.world.machines:
            assert old not in {peer["name"] for peer in document["vrrp"]["peers"]}


def test_its_time_is_over(control):
    old = draining(control)
    control.database.write(lambda c: amphorae.change(c, old, drains_until=time.time() - 1))
    control.hurry()
    control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_it_dies_meanwhile(control):
    """It does not answer: it is given up with its time, or as soon as it is missed."""
    old = draining(control)
    control.world.dead = {old}
    control.hurry()
    assert control.work() == 1
    assert old in control.observed()

    control.heartbeats(silent=(old,))
    for _ in range(2):
        control.hurry()
        control.work()
    assert old not in control.observed()
    assert not control.row().dirty


def test_the_load_balancer_is_deleted_meanwhile(control):
    draining(control)
    control.intents.delete_load_balancer(LB)
    assert control.work() == 1
    assert control.world.machines == {}
    assert control.observed() == {}
    assert control.provisioning() == {LB: "DELETED", LISTENER: "DELETED"}


def test_fail_over_again_meanwhile(control):
    old = draining(control)
    before = control.observed().keys()
    control.intents.fail_over(LB)
    control.work()
    assert control.provisioning()[LB] == "ACTIVE"
    now = control.observed()
    assert old not in now, "its place was needed"
    assert len(now.keys() - before) == 2
    assert len(now) == 3, "now the second one's connections go on"
