# SPDX-License-Identifier: Apache-2.0
"""A controller with the real job loop and a real database; fake machines, agents and networks."""

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace

import migrated
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.agent.client import Vrrp
from amphora_driver.certificates.ca import create_authority
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.compute.interface import Machine, MachineState
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, object_status
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AgentUnreachable
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.topology import ActiveStandbyTopology

LB, LISTENER = "lb", "listener"
TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1"),
    listeners=(Listener(id=LISTENER, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=80),),
)


class FakeCloud:
    """Fake compute, network and agents. The first amphora that confirms has the VIPs until a hand-over."""

    roles = ActiveStandbyTopology.roles
    priorities = ActiveStandbyTopology.priorities

    def __init__(self):
        self.machines = {}
        self.served = {}
        self.dead = set()
        self.holder = None
        # The seconds for which a former VIP holder reports open connections; None: no connections.
        self.lasting = False

    # Catalogue of backends and certificate authority.

    def network(self, *_names):
        return self

    compute = network

    def topology(self, _name):
        return self

    def issue_server(self, _amphora_id, _days):
        return SimpleNamespace(expires_at=0.0, bundle=lambda: Secret(b"certificate"))

    # Compute and network backends.

    plugs_while_booting = True
    default_zones = ()

    def can_separate(self, _partners, _zones):
        return True

    def boot(self, order):
        self.machines[order.amphora_id] = len(self.machines) + 20
        return self.get(order.amphora_id)

    def get(self, amphora_id):
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, management_address="203.0.113.9")

    def destroy(self, amphora_id):
        self.machines.pop(amphora_id, None)

    listener_rules = False

    def direct_answers_allowed(self, _port_ids):
        return True

    def ensure_port(self, request):
        owner, network_id, subnet_ids = request.amphora_id, request.network_id, request.subnet_ids
        number = [*self.machines].index(owner) + len(self.served) + 20
        addresses = tuple(FixedAddress(subnet_id=one, address=f"198.51.100.{number}") for one in subnet_ids)
        return Port(id=owner, network_id=network_id, mac="fa:16:3e:00:00:01", mtu=1500, addresses=addresses)

    def subnet(self, subnet_id, project_id=None):
        return Subnet(id=subnet_id, network_id="n1", cidr="198.51.100.0/24", gateway=None)

    def attach(self, amphora_id, port):
        """No network needs to be joined."""

    def ports(self, _owner):
        return ()

    def release_load_balancer(self, _load_balancer_id):
        self.holder = None

    # Agent API.

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

    def release_vips(self, amphora_id, _address, _drain, *, direct_answers, deadline):
        self._reach(amphora_id)
        (self.holder,) = [peer["name"] for peer in self.served[amphora_id]["vrrp"]["peers"]]

    def vrrp(self, amphora_id, _address, *, deadline=None):
        self._reach(amphora_id)
        return Vrrp(holds_vip=amphora_id == self.holder, draining=10.0 if self.lasting else None)


class Control:
    """A controller, with methods for user requests and heartbeats."""

    def __init__(self, conf, database, cloud=None, *, with_trust=False, boot_rate=None):
        self.conf = conf
        self.cloud = cloud or FakeCloud()
        self.database = database
        self.jobs = Jobs(database, "me", 60.0)
        self.recorder = RequestRecorder(database, lambda node: None)
        names = dict.fromkeys(("catalogue", "agents", "authority"), self.cloud)
        vault = Vault([Fernet.generate_key()])
        trust = TrustStore(conf, database, vault) if with_trust else None
        more = {"trust": trust, "boot_rate": boot_rate}
        everything = ReconcileContext(conf=conf, database=database, vault=vault, **names, **more)
        self.reconciler = Reconciler(everything, self.jobs, lambda: None)

    def work(self, times=20):
        """Run all due jobs; return their number."""
        for number in range(times):
            lease = self.jobs.claim()
            if lease is None:
                return number
            self.reconciler.reconcile(lease)
        raise AssertionError("it never ends")

    def make_all_due(self):
        """Make all postponed work due now."""
        self.database.write(lambda c: c.execute(job.update().values(due_at=0.0)))

    def heartbeats(self, *, silent=()):
        """Record a current heartbeat of each amphora; the given amphorae get an old one."""

        def write(connection):
            for name in self.observed():
                at = time.time() - (100 if name in silent else 0)
                said = name == self.cloud.holder or name in silent
                heard = amphorae.LastHeartbeat(
                    amphora_id=name, seen_at=at, generation=1, epoch=1, sequence=1, holds_vip=said
                )
                amphorae.record_heartbeats(connection, [heard])

        self.database.write(write)

    def row(self):
        return self.database.read(lambda c: c.execute(sa.select(job)).one())

    def observed(self):
        found = self.database.read(lambda c: amphorae.load_amphorae(c, LB))
        return {one.id: one for one in found}

    def provisioning(self):
        rows = self.database.read(
            lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.provisioning)).all()
        )
        return dict(rows)

    def pending(self):
        return set(
            self.database.read(
                lambda c: (
                    c.execute(sa.select(object_status.c.object_id).where(object_status.c.pending.is_not(None)))
                    .scalars()
                    .all()
                )
            )
        )


@contextmanager
def controlled(folder, cloud=None, options="", **more):
    """Start a controller with its own database in this folder; `options` are lines of `[amp_controller]`."""
    for name in ("client_ca", "ca"):
        certificate, key = create_authority(name)
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(key.reveal())
    path = folder / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{folder}/driver.sqlite\n[amp_controller]\n{options}\n"
        f"[amp_certificates]\nclient_ca = {folder}/client_ca.pem\nca_certificate = {folder}/ca.pem\n"
        f"ca_private_key = {folder}/ca.key\nclient_certificate = {folder}/none.pem\n"
    )
    conf = config.load([str(path)])
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    try:
        yield Control(conf, database, cloud, **more)
    finally:
        database.dispose()
