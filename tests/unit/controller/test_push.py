# SPDX-License-Identifier: Apache-2.0
"""The push of a generation to a pair, wave by wave, with a real database and fake agents."""

import json
import time
from types import SimpleNamespace

import migrated
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from msgspec.structs import replace

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, object_status
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AgentRefused, AgentUnreachable, Superseded
from amphora_driver.model.amphora import AmphoraState, AttachedPort
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Profile, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.push import BundlePush
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, config_drift, generations, sealed_secrets, status_outbox
from amphora_driver.store.requests import RequestRecorder

LB, LISTENER, SECOND, THIRD, FOURTH = (f"10000000-0000-4000-8000-00000000000{number}" for number in range(1, 6))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
M, B = "a0000000-0000-4000-8000-000000000001", "b0000000-0000-4000-8000-000000000002"


def listener(listener_id, port):
    return Listener(id=listener_id, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=port)


def virtual(listener_id, protocol):
    return replace(listener(listener_id, 53), protocol=ListenerProtocol(protocol))


TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=VIP,
    profile=Profile(vrrp_advert_interval=0.2),
    listeners=(listener(LISTENER, 80), listener(SECOND, 81)),
)


class Agents:
    """Agents: their answers to a document (None: accepted), and the documents by agent."""

    def __init__(self):
        self.given = []
        self.answers = {}
        # The deadline of each push.
        self.deadlines = {}
        # The VIP state in each agent's answer.
        self.vips = {}

    def info(self, amphora_id, _address, *, deadline):
        said = self.vips.get(amphora_id)
        if isinstance(said, Exception):
            raise said
        return SimpleNamespace(holds_vip=said)

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


class RecordedPair:
    """A recorded pair of one load balancer, and its push."""

    def __init__(self, database, conf):
        self.database = database
        self.agents = Agents()
        self.vault = Vault([Fernet.generate_key()])
        RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
        for number, (name, role) in enumerate(((M, "MASTER"), (B, "BACKUP")), start=21):
            database.write(lambda c, name=name, role=role: amphorae.insert_amphora(c, name, LB, role, b"key"))
            self.change(name, state=AmphoraState.READY, plugged=(plugged(number),), management_address="203.0.113.9")
        nothing = dict.fromkeys(("catalogue", "authority"))
        backends = ReconcileContext(conf=conf, database=database, agents=self.agents, vault=self.vault, **nothing)
        lease = Jobs(database, "me", 60.0).claim()
        self.running_job = Job(lease, database, 60.0)
        self.running_job.record_observation(1, "apply")
        self.pushing = BundlePush(backends, self.running_job, self._write)

    def _write(self, change, applied=None):
        """Write without a lease."""

        def write(connection):
            if applied is not None:
                connection.execute(job.update().values(applied=applied))
            change(connection)

        self.database.write(write)

    def change(self, name, **values):
        self.database.write(lambda c: amphorae.update_amphora(c, name, **values))

    def observed(self):
        return self.database.read(lambda c: amphorae.load_amphorae(c, LB))

    def one(self, name):
        return next(one for one in self.observed() if one.id == name)

    def push(self, waves, *, generation=1, tree=TREE, **more):
        step = step_types.Push(waves=waves, reason="a test", **more)
        self.pushing.push(step, wanted(generation, tree=tree), self.observed())

    def work(self):
        return self.database.read(lambda c: c.execute(sa.select(job)).one())


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
    return step_types.LoadBalancerView(**{**values, **more})


def plugged(number):
    address = FixedAddress(subnet_id="s1", address=f"198.51.100.{number}")
    port = Port(id=f"p{number}", network_id="n1", mac=f"fa:16:3e:00:00:{number}", mtu=1500, addresses=(address,))
    return AttachedPort(port=port, subnets=(Subnet(id="s1", network_id="n1", cidr="198.51.100.0/24", gateway=None),))


def refuses(status, **more):
    return lambda _document: AgentRefused("serve it", "no", status=status, **more)


def older(document):
    """The answer of an agent that does not support virtual servers."""
    if "virtual_servers" not in document:
        return None
    happened = "the agent could not read the bundle: the bundle has unknown keys: virtual_servers"
    return AgentRefused("serve it", happened, "See docs/reference/agent-api.md for its shape.", status=400)


def away(_document):
    return AgentUnreachable("reach it", "no answer")


@pytest.fixture
def pair(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
    conf = config.load([str(path)])
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    yield RecordedPair(database, conf)
    database.dispose()


def test_each_amphora_knows_its_peer_and_one_has_the_higher_priority(pair):
    pair.push(((M, B),))
    given = {amphora_id: document["vrrp"] for amphora_id, document in pair.agents.given}
    assert given[M] == {
        "interface": "eth1",
        "router_id": 1,
        "priority": 254,
        "advert_interval": 0.2,
        "local": {"name": M, "address": "198.51.100.21"},
        "peers": [{"name": B, "address": "198.51.100.22"}],
    }
    assert (given[B]["priority"], given[B]["peers"]) == (253, [{"name": M, "address": "198.51.100.21"}])
    assert [one.id for one in pair.one(M).partners] == [B]
    assert pair.work().applied == 1
    assert planning.plan(wanted(applied=1), pair.observed()) == [], "the plan is empty"


def test_a_new_pair_is_not_active_when_it_has_confirmed(pair):
    (step,) = planning.plan(wanted(), pair.observed())
    pair.push(step.waves, whole=step.whole)
    assert pair.work().applied == 0
    assert all(one.confirmed == 1 and time.time() - 60 < one.confirmed_at <= time.time() for one in pair.observed())
    assert [type(one).__name__ for one in planning.plan(wanted(), pair.observed())] == ["QueryVips"]


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({M: False, B: True}, True),
        ({M: False, B: False}, False),
        ({M: None, B: False}, False),
        ({M: None, B: None}, True),
        ({M: away(None), B: False}, True),
    ],
    ids=["one holder", "no holder", "one unknown", "both unknown", "one unreachable"],
)
def test_query_vips_taken_combines_the_answers_of_both_agents(pair, said, taken):
    pair.agents.vips = said
    assert pair.pushing.query_vips_taken(pair.observed()) is taken


def test_a_deletion_between_two_waves_ends_the_push(pair):
    def answer(_document):
        RequestRecorder(pair.database, lambda node: None).delete_load_balancer(LB)

    pair.agents.answers[B] = answer
    with pytest.raises(Superseded, match="deletion"):
        pair.push(((B,), (M,)))
    assert pair.agents.order == [B], "the second wave is not sent"


def test_after_a_refusal_by_the_standby_the_holder_gets_no_push(pair):
    pair.agents.answers[B] = refuses(422)
    with pytest.raises(AgentRefused):
        pair.push(((B,), (M,)))
    assert pair.agents.order == [B]
    assert pair.work().applied == 0
    assert (pair.one(M).confirmed, pair.one(B).confirmed) == (0, 0)


def test_the_holder_never_receives_what_the_standby_refused(pair):
    pair.agents.answers[B] = lambda document: (
        AgentRefused("serve it", "no", status=422, object_id=SECOND) if SECOND in document["haproxy"] else None
    )
    pair.push(((B,), (M,)))
    assert pair.agents.order == [B, B, M]
    assert SECOND not in pair.agents.given[-1][1]["haproxy"]
    assert LISTENER in pair.agents.given[-1][1]["haproxy"]
    rows = pair.database.read(
        lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.provisioning)).all()
    )
    assert dict(rows) == {LB: "ACTIVE", LISTENER: "ACTIVE", SECOND: "ERROR"}


@pytest.mark.parametrize("old", [(M, B), (M,)], ids=["all", "one of two"])
def test_amphorae_without_virtual_server_support_serve_the_other_listeners(pair, old):
    fronts = {udp: virtual(udp, protocol) for udp, protocol in ((THIRD, "UDP"), (FOURTH, "SCTP"))}
    tree = replace(TREE, listeners=(*TREE.listeners, *fronts.values()))
    for one in fronts.values():
        RequestRecorder(pair.database, lambda node: None).create_object(Kind.LISTENER, one)
    newest = pair.work().generation
    for name in old:
        pair.agents.answers[name] = older
    pair.push(((B,), (M,)), generation=newest, tree=tree)
    assert pair.agents.order == ([B, B, M] if B in old else [B, M, M])
    last = pair.agents.given[-1][1]
    assert "virtual_servers" not in last
    assert all(one in last["haproxy"] for one in (LISTENER, SECOND))
    assert pair.work().applied == newest
    columns = (object_status.c.object_id, object_status.c.provisioning, object_status.c.reason)
    rows = {row[0]: row[1:] for row in pair.database.read(lambda c: c.execute(sa.select(*columns)).all())}
    reason = "its amphorae do not support UDP and SCTP: rotate them (amphoractl rotate)"
    assert rows == {
        LB: ("ACTIVE", "served by an amphora"),
        **dict.fromkeys((LISTENER, SECOND), ("ACTIVE", "confirmed by its amphorae")),
        **dict.fromkeys((THIRD, FOURTH), ("ERROR", reason)),
    }
    pair.agents.answers.clear()
    pair.push(((B, M),), generation=newest, tree=tree)
    assert {one["id"] for one in pair.agents.given[-1][1]["virtual_servers"]} == {THIRD, FOURTH}
    assert pair.database.read(
        lambda c: c.execute(sa.select(object_status.c.provisioning).distinct()).scalars().all()
    ) == ["ACTIVE"]


def test_a_refusal_without_virtual_servers_is_final(pair):
    pair.agents.answers[B] = refuses(400)
    with pytest.raises(AgentRefused):
        pair.push(((B,), (M,)))
    assert pair.agents.order == [B]
    pair.agents.given.clear()
    tree = replace(TREE, listeners=(*TREE.listeners, virtual(THIRD, "UDP")))
    with pytest.raises(AgentRefused):
        pair.push(((B,), (M,)), tree=tree)
    assert pair.agents.order == [B, B], "the agent refuses the document without virtual servers too"
    pair.agents.given.clear()
    pair.agents.answers[B] = refuses(422)
    with pytest.raises(AgentRefused):
        pair.push(((B,), (M,)), tree=tree)
    assert pair.agents.order == [B], "an agent that supports virtual servers gets no second document"


@pytest.mark.parametrize("trouble", [away, refuses(500)], ids=["dead", "error 500"])
def test_a_dead_standby_does_not_delay_a_users_change(pair, trouble):
    pair.agents.answers[B] = trouble
    with pytest.raises((AgentUnreachable, AgentRefused)):
        pair.push(((B,), (M,)))
    assert pair.agents.order == [B, M]
    assert (pair.one(M).confirmed, pair.one(B).confirmed) == (1, 0)
    assert pair.work().applied == 0, "the load balancer is not ACTIVE"
    assert pair.database.read(lambda c: status_outbox.list_due_reports(c, 10)) == []
    del pair.agents.answers[B]
    (again,) = planning.plan(wanted(), pair.observed())
    assert again.waves == ((B,),)
    pair.push(again.waves)
    assert pair.work().applied == 1


def test_an_optional_amphora_does_not_block_the_push(pair):
    pair.agents.answers[M] = away
    pair.push(((M,), (B,)), optional=frozenset({M}))
    assert pair.agents.order == [M, B]
    assert pair.work().applied == 1


def test_a_confirmed_amphora_has_no_drift(pair):
    pair.database.write(lambda c: config_drift.set_drifting(c, {M: True, B: True}))
    pair.agents.answers[M] = away
    with pytest.raises(AgentUnreachable):
        pair.push(((B,), (M,)))
    marked = pair.database.read(lambda c: amphorae.load_serving_states(c, [M]))[LB].drifting
    assert marked == {M}


def test_a_partial_push_does_not_confirm_the_generation(pair):
    pair.push(((B,),), whole=False)
    assert pair.one(B).confirmed == 1
    assert pair.work().applied == 0


def test_a_conflicting_generation_causes_a_new_generation(pair):
    pair.agents.answers[B] = refuses(409, generation=1)
    pair.push(((B,), (M,)))
    assert pair.agents.order == [B]
    assert pair.work().generation == 2


def test_the_ticket_seed_is_created_once_and_sealed(pair):
    name = sealed_secrets.SecretName(LB, sealed_secrets.Purpose.TICKETS, "")
    files = (SimpleNamespace(secret=name),)
    found = pair.pushing._secrets_with_seed(wanted(), files)
    kept = pair.database.read(lambda c: sealed_secrets.load_secrets(c, LB))
    assert kept == {name: found[name]}
    seed = pair.vault.open(kept[name].content, sealed_secrets.secret_location(name)).reveal()
    assert len(seed) == 32
    assert seed not in kept[name].content
    assert (pair.work().tickets, pair.work().tickets_due is None) == (1, False)
    assert pair.pushing._secrets_with_seed(wanted(secrets=kept, tickets=5), files) == kept
    assert pair.pushing._secrets_with_seed(wanted(), ()) == {}, "not requested"


@pytest.mark.parametrize("spoilt", ["key", "length"])
def test_an_unusable_ticket_seed_is_replaced(pair, spoilt):
    name = sealed_secrets.SecretName(LB, sealed_secrets.Purpose.TICKETS, "")
    vault = Vault([Fernet.generate_key()]) if spoilt == "key" else pair.vault
    lost = {
        name: sealed_secrets.SealedSecret(
            content=vault.seal(Secret(b"x" * (32 if spoilt == "key" else 33)), sealed_secrets.secret_location(name))
        )
    }
    pair.database.write(lambda c: sealed_secrets.replace_secrets(c, LB, lost))
    pair.database.write(lambda c: generations.start_ticket_rotation(c, LB, 1.0))
    found = pair.pushing._secrets_with_seed(wanted(secrets=lost, tickets=9), (SimpleNamespace(secret=name),))
    assert len(pair.vault.open(found[name].content, sealed_secrets.secret_location(name)).reveal()) == 32
    assert pair.database.read(lambda c: sealed_secrets.load_secrets(c, LB)) == found


def test_a_draining_amphora_takes_no_vips_and_delays_no_push(pair):
    pair.push(((B,), (M,)))
    pair.change(M, state=AmphoraState.RETIRING, handed_over=True, drains_until=time.time() + 60)
    pair.agents.given.clear()
    pair.push(((M,),), optional=frozenset((M,)), whole=False)
    ((agent, document),) = pair.agents.given
    assert (agent, document["vrrp"]["priority"]) == (M, 1)
    assert [peer["name"] for peer in document["vrrp"]["peers"]] == [B]
    assert pair.agents.deadlines[M].left() < 10
    assert pair.agents.deadlines[B].left() > 10
