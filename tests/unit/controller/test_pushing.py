# SPDX-License-Identifier: Apache-2.0
"""Giving a pair a generation: wave after wave, over a real database, with agents that answer as told."""

import json
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.controller import plan as planning
from amphora_driver.controller import pushing
from amphora_driver.controller.pushing import Pushing
from amphora_driver.controller.steps import Backends
from amphora_driver.errors import AgentRefused, AgentUnreachable
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Profile, Vip
from amphora_driver.model.vocabulary import ListenerProtocol
from amphora_driver.network.interface import FixedAddress, Port, Subnet
from amphora_driver.queue.jobs import Lease
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, generations, migrate, secrets, statuses
from amphora_driver.store.amphorae import Plugged, State
from amphora_driver.store.engine import Database
from amphora_driver.store.intents import Intents
from amphora_driver.store.tables import status, work
from amphora_driver.store.vault import Vault

LB, LISTENER, SECOND = (f"10000000-0000-4000-8000-00000000000{number}" for number in (1, 2, 3))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
M, B = "a0000000-0000-4000-8000-000000000001", "b0000000-0000-4000-8000-000000000002"


def listener(listener_id, port):
    return Listener(id=listener_id, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=port)


TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=VIP,
    profile=Profile(vrrp_advert_interval=0.2),
    listeners=(listener(LISTENER, 80), listener(SECOND, 81)),
)


class Agents:
    """Agents: what each answers to a document (None: it serves it), and who was given what."""

    def __init__(self):
        self.given = []
        self.answers = {}
        # How long each may take, where that is said.
        self.deadlines = {}
        # What each says about the VIPs, one answer after the other; the last one for ever.
        self.vips = {}

    def info(self, amphora_id, _address):
        said = self.vips.get(amphora_id, [None])
        return SimpleNamespace(holds_vip=said.pop(0) if len(said) > 1 else said[0])

    def put_bundle(self, amphora_id, _address, body, *, deadline=None):
        self.deadlines[amphora_id] = deadline
        document = json.loads(body)
        self.given.append((amphora_id, document))
        answer = self.answers.get(amphora_id, lambda document: None)(document)
        if answer is not None:
            raise answer
        return SimpleNamespace(generation=document["generation"], how="reload", reason="")

    @property
    def order(self):
        return [amphora_id for amphora_id, _ in self.given]


class House:
    """A recorded pair of one load balancer, and who pushes it."""

    def __init__(self, database, conf):
        self.database = database
        self.agents = Agents()
        self.vault = Vault([Fernet.generate_key()])
        Intents(database, lambda node: None).create_load_balancer(TREE, read_back=False)
        for number, (name, role) in enumerate(((M, "MASTER"), (B, "BACKUP")), start=21):
            database.write(lambda c, name=name, role=role: amphorae.record(c, name, LB, role, b"key"))
            self.change(name, state=State.READY, plugged=(plugged(number),), management_address="203.0.113.9")
        nothing = dict.fromkeys(("catalogue", "authority"))
        backends = Backends(conf=conf, database=database, agents=self.agents, vault=self.vault, **nothing)
        lease = Lease(load_balancer_id=LB, owner="me", epoch=1, attempts=0)
        self.pushing = Pushing(backends, lease, self.database.write)

    def change(self, name, **values):
        self.database.write(lambda c: amphorae.change(c, name, **values))

    def observed(self):
        return self.database.read(lambda c: amphorae.of_load_balancer(c, LB))

    def one(self, name):
        return next(one for one in self.observed() if one.id == name)

    def push(self, waves, *, generation=1, **more):
        step = planning.Push(waves=waves, reason="a test", **more)
        self.pushing.push(step, wanted(generation), self.observed())

    def work(self):
        return self.database.read(lambda c: c.execute(sa.select(work)).one())


def wanted(generation=1, **more):
    values = {
        "load_balancer_id": LB,
        "generation": generation,
        "applied": 0,
        "gone": False,
        "readable": True,
        "tree": TREE,
        "networks": {"n1": ("s1",)},
        "roles": ("MASTER", "BACKUP"),
        "priorities": {"MASTER": 254, "BACKUP": 253},
    }
    return planning.Wanted(**{**values, **more})


def plugged(number):
    address = FixedAddress(subnet_id="s1", address=f"198.51.100.{number}")
    port = Port(id=f"p{number}", network_id="n1", mac=f"fa:16:3e:00:00:{number}", mtu=1500, addresses=(address,))
    return Plugged(port=port, subnets=(Subnet(id="s1", network_id="n1", cidr="198.51.100.0/24", gateway=None),))


@pytest.fixture
def house(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
    conf = config.load([str(path)])
    migrate.upgrade(conf.store.connection)
    database = Database(conf.store.connection)
    yield House(database, conf)
    database.dispose()


def refuses(status, **more):
    return lambda _document: AgentRefused("serve it", "no", status=status, **more)


def away(_document):
    return AgentUnreachable("reach it", "nobody answers")


def test_both_know_each_other_and_one_is_preferred(house):
    house.push(((M, B),))
    given = {amphora_id: document["vrrp"] for amphora_id, document in house.agents.given}
    assert given[M] == {
        "interface": "eth1",
        "router_id": 1,
        "priority": 254,
        "advert_interval": 0.2,
        "local": {"name": M, "address": "198.51.100.21"},
        "peers": [{"name": B, "address": "198.51.100.22"}],
    }
    assert (given[B]["priority"], given[B]["peers"]) == (253, [{"name": M, "address": "198.51.100.21"}])
    assert [one.id for one in house.one(M).partners] == [B]
    assert house.work().applied == 1
    assert planning.plan(wanted(applied=1), house.observed()) == [], "nothing is left to do"


def test_a_pair_that_begins_is_active_when_one_of_them_has_the_vips(house, monkeypatch):
    applied = []
    monkeypatch.setattr(pushing.time, "sleep", lambda _: applied.append(house.work().applied))
    house.agents.vips = {M: [False, False, False], B: [False, False, True]}
    house.push(((M, B),))
    assert applied == [0, 0], "asked three times, and not ACTIVE before"
    assert house.work().applied == 1


def test_a_pair_that_goes_on_waits_for_nothing(house):
    house.push(((M, B),))
    house.agents.vips = {M: [False], B: [False]}
    house.database.write(lambda c: generations.renew(c, LB, 1))
    begin = time.monotonic()
    house.push(((B,), (M,)), generation=2)
    assert house.work().applied == 2
    # It would be 3.8 seconds: four advertisements and the patience.
    assert time.monotonic() - begin < 3


def test_a_pair_in_which_nobody_takes_the_vips_is_served_nevertheless(house, monkeypatch, caplog):
    monkeypatch.setattr(pushing, "_VIP_PATIENCE", -0.5)
    house.agents.vips = {M: [False], B: [False]}
    house.push(((M, B),))
    assert house.work().applied == 1
    assert "nobody has taken the VIPs" in caplog.text


def test_the_standby_refuses_and_the_other_one_is_not_asked(house):
    house.agents.answers[B] = refuses(422)
    with pytest.raises(AgentRefused):
        house.push(((B,), (M,)))
    assert house.agents.order == [B]
    assert house.work().applied == 0
    assert (house.one(M).confirmed, house.one(B).confirmed) == (0, 0)


def test_what_the_standby_refuses_of_it_the_other_one_is_never_given(house):
    house.agents.answers[B] = lambda document: (
        AgentRefused("serve it", "no", status=422, object_id=SECOND) if SECOND in document["haproxy"] else None
    )
    house.push(((B,), (M,)))
    assert house.agents.order == [B, B, M]
    assert SECOND not in house.agents.given[-1][1]["haproxy"]
    assert LISTENER in house.agents.given[-1][1]["haproxy"]
    rows = house.database.read(lambda c: c.execute(sa.select(status.c.object_id, status.c.provisioning)).all())
    assert dict(rows) == {LB: "ACTIVE", LISTENER: "ACTIVE", SECOND: "ERROR"}


@pytest.mark.parametrize("trouble", [away, refuses(500)], ids=["dead", "broken machine"])
def test_a_dead_standby_keeps_no_change_from_the_users(house, trouble):
    house.agents.answers[B] = trouble
    with pytest.raises((AgentUnreachable, AgentRefused)):
        house.push(((B,), (M,)))
    assert house.agents.order == [B, M]
    assert (house.one(M).confirmed, house.one(B).confirmed) == (1, 0)
    assert house.work().applied == 0, "but ACTIVE it is not"
    assert house.database.read(lambda c: statuses.due(c, 10)) == []
    del house.agents.answers[B]
    (again,) = planning.plan(wanted(), house.observed())
    assert again.waves == ((B,),)
    house.push(again.waves, whole=again.whole)
    assert house.work().applied == 1


def test_nothing_depends_on_one_that_is_about_to_go(house):
    house.agents.answers[M] = away
    house.push(((M,), (B,)), optional=frozenset({M}))
    assert house.agents.order == [M, B]
    assert house.work().applied == 1


def test_nothing_is_confirmed_before_the_whole_pair_is_there(house):
    house.push(((B,),), whole=False)
    assert house.one(B).confirmed == 1
    assert house.work().applied == 0


def test_a_generation_that_is_taken(house):
    house.agents.answers[B] = refuses(409, generation=1)
    house.push(((B,), (M,)))
    assert house.agents.order == [B]
    assert house.work().generation == 2


def test_what_ticket_keys_come_from_is_made_once_and_sealed(house):
    name = secrets.SecretName(LB, secrets.Purpose.TICKETS, "")
    files = (SimpleNamespace(secret=name),)
    found, number = house.pushing._tickets(wanted(), files)
    assert number == 1
    kept = house.database.read(lambda c: secrets.of_load_balancer(c, LB))
    assert kept == {name: found[name]}
    seed = house.vault.open(kept[name].content).reveal()
    assert len(seed) == 32
    assert seed not in kept[name].content
    assert (house.work().tickets, house.work().tickets_due is None) == (1, False)
    again, number = house.pushing._tickets(wanted(secrets=kept, tickets=5), files)
    assert (again, number) == (kept, 5)
    assert house.pushing._tickets(wanted(), ()) == ({}, 1), "nobody asked"


def test_a_seed_no_key_opens_any_more_is_made_anew(house):
    name = secrets.SecretName(LB, secrets.Purpose.TICKETS, "")
    lost = {name: secrets.Sealed(content=Vault([Fernet.generate_key()]).seal(Secret(b"x" * 32)))}
    house.database.write(lambda c: secrets.put(c, LB, lost))
    house.database.write(lambda c: generations.begin_tickets(c, LB, 1.0))
    found, number = house.pushing._tickets(wanted(secrets=lost, tickets=9), (SimpleNamespace(secret=name),))
    assert number == 1
    assert len(house.vault.open(found[name].content).reveal()) == 32
    assert house.database.read(lambda c: secrets.of_load_balancer(c, LB)) == found


def test_one_whose_connections_go_on_takes_no_vips_and_holds_nobody_up(house):
    house.push(((B,), (M,)))
    house.change(M, state=State.RETIRING, handed_over=True, drains_until=time.time() + 60)
    house.agents.given.clear()
    house.push(((M,),), optional=frozenset((M,)), whole=False)
    ((who, document),) = house.agents.given
    assert (who, document["vrrp"]["priority"]) == (M, 1)
    assert [peer["name"] for peer in document["vrrp"]["peers"]] == [B]
    assert house.agents.deadlines[M] - time.monotonic() < 10
    assert house.agents.deadlines[B] is None
