# SPDX-License-Identifier: Apache-2.0
"""An in-memory pair for tests of the plan: `Simulation` performs the planned steps without a database."""

import msgspec

from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort, Partner
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile import vrrp_peers

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)
ROLES = ("MASTER", "BACKUP")
NOW, DRAIN = 1000.0, 30.0


def wanted(**more):
    values = {
        "load_balancer_id": "lb",
        "generation": 4,
        "applied": 4,
        "gone": False,
        "readable": True,
        "tree": TREE,
        "networks": {"n1": ("s1",)},
        "roles": ROLES,
        "priorities": {"MASTER": 254, "BACKUP": 253},
        "now": NOW,
        "taking_vips": (3.0, 7.0),
        # The amphorae's answers agree with the recorded VIP state.
        "holder_asked": True,
    }
    return step_types.LoadBalancerView(**{**values, **more})


def port(address):
    return AttachedPort(
        port=Port(
            id=f"p-{address}",
            network_id="n1",
            mac="fa:16:3e:00:00:01",
            mtu=1500,
            addresses=(FixedAddress(subnet_id="s1", address=address),),
        ),
        subnets=(Subnet(id="s1", network_id="n1", cidr="198.51.100.0/24", gateway=None),),
    )


def amphora(name, role, number, **more):
    """Return a READY amphora that has confirmed generation 4."""
    values = {
        "id": name,
        "load_balancer_id": "lb",
        "role": role,
        "state": AmphoraState.READY,
        "compute_id": name,
        "management_address": "203.0.113.11",
        "confirmed": 4,
        "plugged": (port(f"198.51.100.{number}"),),
    }
    return Amphora(**{**values, **more})


def knows(name, number):
    return Partner(id=name, address=f"198.51.100.{number}")


M = amphora("m", "MASTER", 21, partners=(knows("b", 22),))
B = amphora("b", "BACKUP", 22, partners=(knows("m", 21),))


def but(one, **changes):
    return msgspec.structs.replace(one, **changes)


class Simulation:
    """The rows after each step; `log` has the steps in order."""

    def __init__(self, want, *observed):
        self.want = want
        self.observed = {one.id: one for one in observed}
        self.log = []
        self.unreachable = set()
        # `stubborn`: amphorae that cannot release their VIPs. `lasting`: CheckDrain steps until connections end.
        self.stubborn = set()
        self.lasting = {}
        # Number of QueryVips steps until an amphora of a new pair has the VIPs.
        self.looks = 0
        # Answers about the VIPs that differ from the heartbeats.
        self.truth = {}
        self.never_fewer = len([one for one in observed if one.confirmed])

    def run(self):
        """Perform steps until the plan is empty."""
        for _ in range(50):
            todo = self.plan()
            if not todo:
                return self.log
            for step in todo:
                if isinstance(step, step_types.Await):
                    # Another job, that knows nothing of what this one has learned.
                    self.want = but(self.want, now=step.until, absent=frozenset(), vips_taken=None, holder_asked=False)
                    break
                self.take(step)
                serving = [one for one in self.observed.values() if one.confirmed]
                assert len(serving) >= min(1, self.never_fewer), f"no amphora serves after {step}"
        raise AssertionError("it never ends")

    def plan(self):
        return planning.plan(self.want, tuple(self.observed.values()))

    def change(self, name, **changes):
        self.observed[name] = but(self.observed[name], **changes)

    def take(self, step):
        getattr(self, f"take_{type(step).__name__.lower()}")(step)

    def take_record(self, step):
        name = f"{step.role[0].lower()}{len(self.log)}"
        fresh = amphora(
            name, step.role, 0, state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0
        )
        self.observed[name] = fresh
        self.log.append(f"Record {step.role}")

    def take_boot(self, step):
        self.change(step.amphora_id, management_address="203.0.113.12")

    def take_plug(self, step):
        self.change(step.amphora_id, plugged=(port(f"198.51.100.{len(self.log) + 50}"),))

    def take_awaitagent(self, step):
        self.change(step.amphora_id, state=AmphoraState.READY)

    def take_queryvips(self, _step):
        self.looks -= 1
        self.want = but(self.want, vips_taken=self.looks < 0)
        self.log.append("QueryVips")

    def take_queryvipholder(self, step):
        self.want = but(self.want, holder_asked=True)
        for name in step.amphora_ids:
            if name in self.truth:
                self.change(name, holds_vip=self.truth[name])

    def take_bumpgeneration(self, _step):
        self.want = but(self.want, generation=self.want.generation + 1)
        self.log.append("BumpGeneration")

    def take_confirm(self, _step):
        self.want = but(self.want, applied=self.want.generation)
        self.log.append("Confirm")

    def take_handover(self, step):
        self.log.append(f"HandOver {step.amphora_id} to {step.to}")
        known = {one.id for one in self.observed[step.to].partners}
        between_two = known == {step.amphora_id}
        assert between_two or self.truth, "a hand-over needs exactly two amphorae without further peers"
        until = None if step.amphora_id in self.stubborn else self.want.now + DRAIN * between_two
        self.change(step.amphora_id, handed_over=True, drains_until=until)

    def take_checkdrain(self, step):
        self.log.append(f"CheckDrain {step.amphora_id}")
        self.lasting[step.amphora_id] = self.lasting.get(step.amphora_id, 0) - 1
        if self.lasting[step.amphora_id] < 0:
            self.change(step.amphora_id, drains_until=0.0)

    def take_release(self, step):
        self.log.append(f"Release {self.observed[step.amphora_id].role} {step.amphora_id}")
        del self.observed[step.amphora_id]

    def take_push(self, step):
        everyone, priorities = tuple(self.observed.values()), self.want.priorities
        for name in (name for wave in step.waves for name in wave):
            one = self.observed[name]
            known = vrrp_peers.partners(one, vrrp_peers.participants(everyone, priorities), VIP)
            known = known if one.role in priorities else ()
            self.change(name, confirmed=self.want.generation, confirmed_at=self.want.now, partners=known)
        self.log.append("Push " + " ".join("+".join(wave) for wave in step.waves))
        if step.whole:
            self.want = but(self.want, applied=self.want.generation)
            self.log.append("ACTIVE")


def retiring(*ones):
    return tuple(but(one, state=AmphoraState.RETIRING) for one in ones)
