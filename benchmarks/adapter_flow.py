# SPDX-License-Identifier: Apache-2.0
"""The case `flow` of the harness: jobs of the controller, from the claim of the lease to its release.

Leases, plan, steps, rendering, bundles and database rows are production code. Agents, machines and networks are fakes
that always succeed, like the no-op drivers of the incumbent in this case. The rows and the last bundle that the fake
agent received prove the result.
"""

import itertools
import threading
import uuid

import msgspec
import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.agent.client import Applied, Info, Loaded, Vrrp
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.compute.interface import Machine, MachineState
from amphora_driver.database.tables import job, object_status
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import Kind, Topology
from amphora_driver.model.loadbalancer import LoadBalancer, Member, Profile, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.plugins import Catalogue
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import amphorae, status_outbox
from amphora_driver.store.requests import RequestRecorder

# Upper limit of the rounds of a job.
_MOST_ROUNDS = 50
_CREATED = {
    "lb_create_single": Topology.SINGLE,
    "lb_create_active_standby": Topology.ACTIVE_STANDBY,
}


class Flow:
    """One controller without worker threads: the measurement runs the job in its own thread."""

    def flow_setup(self):
        certificate, key = create_authority("bench")
        for name in ("ca_certificate", "client_ca"):
            (self.folder / f"{name}.pem").write_bytes(certificate)
        conf_file = self.folder / "flow.conf"
        conf_file.write_text(
            f"[amp_certificates]\nca_certificate = {self.folder}/ca_certificate.pem\n"
            f"client_ca = {self.folder}/client_ca.pem\n[amp_health]\ntargets = 192.0.2.1:5555\n"
        )
        conf = config.load([str(conf_file)])
        self._agents = _Agents()
        self._network = _Network()
        self._jobs = Jobs(self.database, "bench", 60.0)
        self._intents = RequestRecorder(self.database, lambda _node: None)
        self._reconciler = Reconciler(
            ReconcileContext(
                conf=conf,
                database=self.database,
                catalogue=_Catalogue(Catalogue(conf, self.database), self._network, _Compute()),
                agents=self._agents,
                authority=Authority(certificate, key),
                vault=self._vault,
            ),
            self._jobs,
            lambda: None,
        )
        # By operation and number: the load balancer, and the object that must exist (or not) afterwards.
        self._operations = {}
        self._of_topology = {topology: [] for topology in _CREATED.values()}
        self._members = {}

    def flow_prepare(self, op, spec, i):
        """Create the state after Octavia's call and commit; earlier operations are complete and reported."""
        if op == "member_create":
            before = self._members.get(spec["id"])
            if before:
                self._intents.delete_object(Kind.MEMBER, before)
                self._commit(spec["id"])
                self._work_off(spec["id"])
                self._report()
            member = Member(
                id=str(uuid.uuid4()), pool_id=spec["pools"][0]["id"], name="new",
                address=f"10.250.0.{i % 250 + 1}", protocol_port=9000 + i, weight=1,
            )  # fmt: skip
            self._intents.create_object(Kind.MEMBER, member)
            self._members[spec["id"]] = member.id
            self._operations[op, i] = spec["id"], member.id
        elif op in _CREATED:
            tree = _load_balancer(_CREATED[op])
            self._intents.create_load_balancer(tree, read_back=False)
            self._of_topology[_CREATED[op]].append(tree.id)
            self._operations[op, i] = tree.id, None
        else:
            self._prepare_failover(op, i)
        self._commit(self._operations[op, i][0])

    def _prepare_failover(self, op, i):
        made = self._of_topology[Topology.SINGLE if op.endswith("single") else Topology.ACTIVE_STANDBY]
        load_balancer_id = made[i % len(made)]
        gone = [one.id for one in self._amphorae(load_balancer_id)]
        if op.startswith("lb_failover"):
            self._intents.fail_over(load_balancer_id)
        else:
            gone = gone[:1]

            def lose(connection):
                amphorae.update_amphora(connection, gone[0], state=AmphoraState.RETIRING, reason="it is replaced")
                connection.execute(job.update().where(job.c.load_balancer_id == load_balancer_id).values(dirty=True))

            self.database.write(lose)
        self._operations[op, i] = load_balancer_id, gone

    def flow_run(self, op, i):
        self._work_off(self._operations[op, i][0], boots=op != "member_create")

    def flow_check(self, op, i):
        load_balancer_id, what = self._operations[op, i]
        row = self._row(load_balancer_id)
        serving = self._amphorae(load_balancer_id)
        told = self._statuses(load_balancer_id)
        wrong = []
        if row.dirty or row.applied != row.generation:
            wrong.append(f"applied {row.applied} of {row.generation}, {row.error}")
        if [one for one in serving if one.state is not AmphoraState.READY or one.confirmed != row.generation]:
            wrong.append(f"amphorae {[(one.state, one.confirmed) for one in serving]}")
        if len(serving) != (2 if row.topology == Topology.ACTIVE_STANDBY else 1):
            wrong.append(f"{len(serving)} amphorae")
        if set(told.values()) != {"ACTIVE"}:
            wrong.append(f"statuses {set(told.values())}")
        if op == "member_create":
            if told.get(what) != "ACTIVE":
                wrong.append(f"member {told.get(what)}")
            if not all(f"server {what} ".encode() in self._agents.given.get(one.id, b"") for one in serving):
                wrong.append("the member was not given to the agent")
        elif what and set(what) & {one.id for one in serving}:
            wrong.append("one that was to go is there")
        return True if not wrong else "; ".join(wrong)

    # --- steps before and after a job ---------------------------------------------------------------------------------

    def _work_off(self, load_balancer_id, *, boots=False):
        """Claim and reconcile until no job is due; a job that waits for a boot becomes due at once."""
        for _ in range(_MOST_ROUNDS):
            lease = self._jobs.claim()
            if lease is not None:
                self._reconciler.reconcile(lease)
                continue
            if not (boots and self.database.write(lambda connection: _wake(connection, load_balancer_id))):
                return

    def _commit(self, load_balancer_id):
        """Mark the current generation as committed in Octavia."""
        self.database.write(
            lambda connection: connection.execute(
                job.update().where(job.c.load_balancer_id == load_balancer_id).values(committed=job.c.generation)
            )
        )

    def _report(self):
        self.database.write(
            lambda connection: status_outbox.mark_reported(
                connection, status_outbox.list_due_reports(connection, 10_000)
            )
        )

    def _row(self, load_balancer_id):
        return self.database.read(
            lambda connection: connection.execute(
                sa.select(job).where(job.c.load_balancer_id == load_balancer_id)
            ).one()
        )

    def _amphorae(self, load_balancer_id):
        return self.database.read(lambda connection: amphorae.load_amphorae(connection, load_balancer_id))

    def _statuses(self, load_balancer_id):
        select = sa.select(object_status.c.object_id, object_status.c.provisioning).where(
            object_status.c.load_balancer_id == load_balancer_id
        )
        return dict(self.database.read(lambda connection: [tuple(row) for row in connection.execute(select)]))


_WAKE = (
    job.update()
    .where(job.c.load_balancer_id == sa.bindparam("of"), job.c.dirty, job.c.owner.is_(None), job.c.due_at > 0.0)
    .values(due_at=0.0)
)


def _wake(connection, load_balancer_id):
    """Make a waiting job due, as the controller does after an agent listens."""
    return connection.execute(_WAKE, {"of": load_balancer_id}).rowcount


def _load_balancer(topology):
    number = next(_numbers)
    vip = Vip(
        address=f"198.51.{number // 250 % 250}.{number % 250 + 1}",
        **{name: str(uuid.uuid4()) for name in ("subnet_id", "network_id", "port_id")},
    )
    return LoadBalancer(
        id=str(uuid.uuid4()), project_id="p" * 32, name="f", vip=vip, profile=Profile(topology=topology)
    )


_numbers = itertools.count()


# --- fakes ----------------------------------------------------------------------------------------------------------


class _Generation(msgspec.Struct):
    generation: int


class _Agents:
    """Agents that accept every bundle."""

    def __init__(self):
        self.given = {}
        self._decoder = msgspec.json.Decoder(_Generation)

    def put_bundle(self, amphora_id, _address, body, **_deadline):
        self.given[amphora_id] = body
        generation = self._decoder.decode(body).generation
        return Applied(generation=generation, how="runtime", loaded=Loaded())

    def info(self, amphora_id, _address, **_deadline):
        return Info(amphora_id=amphora_id, agent_version="2.0", holds_vip=True)

    def wait_until_ready(self, amphora_id, address, *_deadline, **_more):
        return self.info(amphora_id, address)

    def vrrp(self, _amphora_id, _address, **_deadline):
        return Vrrp(holds_vip=False, draining=None)

    def expect_vips(self, *_arguments, **_deadline):
        pass

    def release_vips(self, *_arguments, **_deadline):
        pass

    def forget(self, amphora_id):
        self.given.pop(amphora_id, None)


class _Compute:
    """Machines that are RUNNING at once."""

    plugs_while_booting = True
    default_zones = ()

    def __init__(self):
        self._machines = {}

    def can_separate(self, _partners, _zones):
        return True

    def boot(self, order):
        made = Machine(compute_id=order.amphora_id, state=MachineState.RUNNING, management_address="192.0.2.10")
        return self._machines.setdefault(order.amphora_id, made)

    def get(self, amphora_id):
        return self._machines.get(amphora_id)

    def attach(self, amphora_id, port):
        pass

    def detach(self, amphora_id, port):
        pass

    def destroy(self, amphora_id):
        self._machines.pop(amphora_id, None)


class _Network:
    """Networks with unlimited addresses."""

    def __init__(self):
        self._lock = threading.Lock()
        self._ports = {}
        self._count = itertools.count(1)

    listener_rules = False

    def direct_answers_allowed(self, _port_ids):
        return True

    def ensure_port(self, request):
        owner, network_id, subnet_ids = request.amphora_id, request.network_id, request.subnet_ids
        with self._lock:
            if (owner, network_id) not in self._ports:
                number = next(self._count)
                self._ports[owner, network_id] = Port(
                    id=str(uuid.uuid4()),
                    network_id=network_id,
                    mac=f"fa:16:3e:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:{number & 255:02x}",
                    mtu=1500,
                    addresses=tuple(
                        FixedAddress(subnet_id=one, address=f"10.{number >> 8 & 255}.{number & 255}.{place}")
                        for place, one in enumerate(subnet_ids, start=20)
                    ),
                )
            return self._ports[owner, network_id]

    def ports(self, owner):
        return tuple(port for (whose, _), port in self._ports.items() if whose == owner)

    def delete_port(self, port_id):
        with self._lock:
            self._ports = {key: port for key, port in self._ports.items() if port.id != port_id}

    def subnet(self, subnet_id, _project_id=None):
        return Subnet(id=subnet_id, network_id="", cidr="10.0.0.0/8", gateway="10.0.0.1")

    def release_load_balancer(self, load_balancer_id):
        pass


class _Catalogue:
    """The real topologies, and fakes of the other backends."""

    def __init__(self, real, network, compute):
        self.topology = real.topology
        self._network, self._compute = network, compute

    def network(self, _name):
        return self._network

    def compute(self, _name, _network):
        return self._compute
