# SPDX-License-Identifier: Apache-2.0
"""Database statements of a member change: a fixed number, whatever the size of the load balancer."""

import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import migrated
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.agent.client import Applied
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job as job_table
from amphora_driver.database.tables import object_status
from amphora_driver.database.vault import Vault
from amphora_driver.model.amphora import AmphoraState, AttachedPort
from amphora_driver.model.enums import Algorithm, Kind, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.plugins import Catalogue
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

# The incumbent takes 208 for the job alone, and 2,297 where the load balancer is larger.
# Two of these write the member's operating status into the report of ACTIVE.
MOST = 17
PORT = Port(
    id="p9", network_id="n1", mac="fa:16:3e:00:00:01", mtu=1500,
    addresses=(FixedAddress(subnet_id="s1", address="198.51.100.20"),),
)  # fmt: skip
PLUGGED = AttachedPort(port=PORT, subnets=(Subnet(id="s1", network_id="n1", cidr="198.51.100.0/24", gateway=None),))


def member(number, pool="pool0"):
    return Member(
        id=f"{pool}-{number}", pool_id=pool, address=f"203.0.{number // 200}.{number % 200}", protocol_port=80
    )


def tree(pools, members):
    return LoadBalancer(
        id="lb",
        project_id="demo",
        vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1"),
        pools=tuple(
            Pool(
                id=f"pool{pool}", loadbalancer_id="lb", protocol=PoolProtocol.HTTP,
                lb_algorithm=Algorithm.ROUND_ROBIN,
                members=tuple(member(number, f"pool{pool}") for number in range(members)),
            )
            for pool in range(pools)
        ),
        listeners=tuple(
            Listener(
                id=f"li{pool}", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80 + pool,
                default_pool_id=f"pool{pool}",
            )
            for pool in range(pools)
        ),
    )  # fmt: skip


class RecordedLoadBalancer:
    """A load balancer with one serving amphora; backends and agents are fakes."""

    def __init__(self, tmp_path, whole):
        options = tmp_path / "driver.conf"
        options.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
        self.conf = config.load([str(options)])
        migrated.write(self.conf.amp_database.connection)
        self.database = Database(self.conf.amp_database.connection, durable=False)
        self.given, self.told = [], []
        self.recorder = RequestRecorder(self.database, lambda node: None)
        self.jobs = Jobs(self.database, "me", 60.0)
        catalogue = SimpleNamespace(
            topology=Catalogue(self.conf, self.database).topology,
            network=lambda _name: SimpleNamespace(listener_rules=False),
            compute=lambda _name, _network: SimpleNamespace(plugs_while_booting=True),
        )
        backends = ReconcileContext(
            conf=self.conf, database=self.database, catalogue=catalogue, agents=self, authority=None,
            vault=Vault([Fernet.generate_key()]),
        )  # fmt: skip
        self.reconciler = Reconciler(backends, self.jobs, lambda: None)
        self.reporter = Reporter(self.conf, self.database)
        self.reporter._library = SimpleNamespace(
            update_loadbalancer_status=self.told.append, get_loadbalancer=lambda _: None
        )
        self.recorder.create_load_balancer(whole, read_back=False)
        self.database.write(self._serving)
        self.work_off()
        self.database.write(lambda c: c.execute(job_table.update().values(committed=job_table.c.generation)))
        self.reporter.run_once()

    def _serving(self, connection):
        amphorae.insert_amphora(connection, "a", "lb", "STANDALONE", b"key")
        amphorae.update_amphora(
            connection, "a", state=AmphoraState.READY, plugged=(PLUGGED,), compute_id="a",
            management_address="203.0.113.9", booted_at=time.time(), ready_at=time.time(),
        )  # fmt: skip

    def put_bundle(self, _amphora_id, _address, body, **_more):
        self.given.append(json.loads(body))
        return Applied(generation=self.given[-1]["generation"], how="runtime")

    def work_off(self):
        while (lease := self.jobs.claim()) is not None:
            self.reconciler.reconcile(lease)

    def states(self):
        rows = self.database.read(
            lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.provisioning)).all()
        )
        return {row.object_id: row.provisioning for row in rows}

    def work(self):
        return self.database.read(lambda c: c.execute(sa.select(job_table)).one())

    @contextmanager
    def counted(self):
        """Record the statements of the block, without BEGIN."""
        seen, mine = [], threading.get_ident()

        def note(_connection, _cursor, text, *_more):
            if threading.get_ident() == mine and not text.startswith("BEGIN"):
                seen.append(text)

        sa.event.listen(self.database.engine, "before_cursor_execute", note)
        yield seen
        sa.event.remove(self.database.engine, "before_cursor_execute", note)


@pytest.fixture
def recorded(tmp_path):
    made = []

    def build(whole):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(RecordedLoadBalancer(folder, whole))
        return made[-1]

    yield build
    for one in made:
        one.database.dispose()


def create(here, number):
    """Create a member and report its status; return the numbers of statements of call, job and report."""
    with here.counted() as call:
        here.recorder.create_object(Kind.MEMBER, member(number))
    with here.counted() as job:
        here.work_off()
    assert here.states()[f"pool0-{number}"] == "ACTIVE"
    assert f"server pool0-{number} " in here.given[-1]["haproxy"]
    with here.counted() as report:
        here.reporter.run_once()
    said = {one["id"]: one.get("provisioning_status") for one in here.told[-1]["members"]}
    assert said == {f"pool0-{number}": "ACTIVE"}
    assert not here.work().dirty
    return len(call), len(job), len(report)


def test_a_member_needs_the_same_number_of_statements_in_any_load_balancer(recorded):
    small, large = recorded(tree(1, 2)), recorded(tree(8, 30))
    costs = []
    for here in (small, large):
        create(here, 901)
        costs.append(create(here, 902))
    assert costs[0] == costs[1]
    assert max(costs[0]) < MOST, costs[0]


def test_many_members_need_few_more_statements_than_one(recorded):
    here = recorded(tree(1, 2))

    def set_to(count):
        wish = [(f"pool0-{number}", lambda number=number: member(number), {}) for number in range(count)]
        with here.counted() as seen:
            here.recorder.set_members("pool0", wish)
            here.work_off()
            here.reporter.run_once()
        return len(seen)

    def known():
        return len([one for one in here.states() if one.startswith("pool0-")])

    set_to(10)
    few = set_to(20)
    many = set_to(200)
    assert known() == 200
    assert many <= few + 6
    assert set_to(140) < 60, "Octavia accepts deleted members in small batches, with a few statements each"
    assert known() == 140
