# SPDX-License-Identifier: Apache-2.0
"""Machines, agents and VIP options in a file, which outlives the controllers.

Invariant: every effect is in the file before the call returns, and the file counts every machine that a controller has
made. So a test sees a second machine and a machine without a row.
"""

import json
import pickle
import time
from http import HTTPStatus

from killed_forks import StoredValue

from amphora_driver.agent.responses import Applied, Info, Vrrp
from amphora_driver.compute.interface import Machine, MachineState
from amphora_driver.errors import AgentRefused, AgentUnreachable
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import ListenerReport, PoolReport, Report
from amphora_driver.network.interface import NotYet
from amphora_driver.network.local import LocalNetwork

# The number of requests that an agent does not answer while its machine boots.
_BOOTS = 1
# Seconds for which connections of an amphora continue after the loss of its VIPs.
DRAINS = 5.0


class FakeCloud:
    """A compute backend and the agents of its machines.

    There is one pair at a time: the VIP holder is one of the amphorae with a partner.
    """

    supports = frozenset()
    wiring = "bridge"
    plugs_while_booting = True
    default_zones = ()
    listing_interval = 0.0

    def __init__(self, path):
        self.kept = StoredValue(path, pickle.loads, pickle.dumps)

    def begin(self):
        empty = {"machines": {}, "made": 0, "holder": None, "options": {}, "late": 0, "beats": 0, "off": set()}
        self.kept.begin(empty)

    @property
    def machines_made(self):
        return self.kept.read()["made"]

    def generation_served(self):
        """The newest generation that an amphora serves; 0 for none."""
        bundles = [machine["bundle"] for machine in self.kept.read()["machines"].values()]
        return max((one["generation"] for one in bundles if one is not None), default=0)

    # --- machines -----------------------------------------------------------------------------------------------------

    def can_separate(self, _partners, _zones):
        return True

    def boot(self, order):
        with self.kept.open() as state:
            if order.amphora_id not in state["machines"]:
                state["made"] += 1
                state["machines"][order.amphora_id] = {
                    "knocks": 0,
                    "ports": {},
                    "bundle": None,
                    "drains": None,
                    "certificate": None,
                    "number": state["made"],
                }
        return self.get(order.amphora_id)

    def get(self, amphora_id):
        found = self.kept.read()["machines"].get(amphora_id)
        if found is None:
            return None
        address = f"203.0.113.{found['number']}"
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, management_address=address, image="one")

    def validate_profile(self, _metadata):
        """Every object of a profile exists."""

    def image(self, _tag):
        return "one"

    def machines(self):
        return frozenset(self.kept.read()["machines"])

    def attach(self, amphora_id, port):
        with self.kept.open() as state:
            state["machines"][amphora_id]["ports"][port.network_id] = port.id

    def detach(self, amphora_id, port):
        with self.kept.open() as state:
            state["machines"].get(amphora_id, {"ports": {}})["ports"].pop(port.network_id, None)

    def destroy(self, amphora_id):
        with self.kept.open() as state:
            state["machines"].pop(amphora_id, None)
            state["off"].discard(amphora_id)
            _elect(state)

    def release_load_balancer(self, _load_balancer_id):
        """This backend has no objects that machines share."""

    def power_off(self, amphora_id):
        """The machine stops answering; the compute backend still has it."""
        with self.kept.open() as state:
            state["off"].add(amphora_id)
            _elect(state)

    # --- agents -------------------------------------------------------------------------------------------------------

    def wait_until_ready(self, amphora_id, _address, _deadline):
        with self.kept.open() as state:
            machine = _reached(state, amphora_id)
            machine["knocks"] += 1
            if machine["knocks"] <= _BOOTS:
                raise AgentUnreachable("call an agent", "its machine boots")

    def info(self, amphora_id, _address, *, prepared=None, deadline=None):
        state = self.kept.read()
        _reached(state, amphora_id)
        return Info(amphora_id=amphora_id, agent_version="1", holds_vip=_holds(state, amphora_id))

    def put_bundle(self, amphora_id, _address, body, *, deadline=None):
        document = json.loads(body)
        with self.kept.open() as state:
            machine = _reached(state, amphora_id)
            before = machine["bundle"]
            if before is not None and before["generation"] == document["generation"] and before != document:
                raise AgentRefused(
                    *("serve a bundle", "the agent serves this generation with another content"),
                    status=HTTPStatus.CONFLICT,
                    generation=document["generation"],
                )
            how = "unchanged" if before == document else "reload"
            machine["bundle"] = document
            _elect(state)
        return Applied(generation=document["generation"], how=how)

    def announce_vips(self, amphora_id, _address, *, deadline=None):
        _reached(self.kept.read(), amphora_id)

    def expect_vips(self, amphora_id, _address, _seconds, *, deadline=None):
        _reached(self.kept.read(), amphora_id)

    def release_vips(self, amphora_id, _address, drain, *, direct_answers=True, deadline=None):
        with self.kept.open() as state:
            machine = _reached(state, amphora_id)
            if state["holder"] != amphora_id:
                raise AgentRefused("hand the VIPs over", "the amphora has no VIPs", status=HTTPStatus.CONFLICT)
            (state["holder"],) = [one["name"] for one in machine["bundle"]["vrrp"]["peers"]]
            machine["drains"] = time.time() + min(drain, DRAINS)

    def vrrp(self, amphora_id, _address, *, deadline=None):
        state = self.kept.read()
        left = (_reached(state, amphora_id)["drains"] or 0.0) - time.time()
        return Vrrp(holds_vip=_holds(state, amphora_id), draining=left if left > 0 else None)

    def renew(self, amphora_id, _address, certificate, *, client_ca, server_ca, deadline):
        with self.kept.open() as state:
            _reached(state, amphora_id)["certificate"] = certificate.reveal()

    def verify_certificate(self, amphora_id, _address, _fingerprint, *, deadline):
        assert _reached(self.kept.read(), amphora_id)["certificate"] is not None, (
            "a controller verifies a certificate and does not grant it"
        )

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def heartbeats(self, trees):
        """One heartbeat of each machine that has booted.

        Args:
            trees: the load balancers as Octavia has them: all of their listeners and members are well.
        """
        with self.kept.open() as state:
            state["beats"] += 1
            number = state["beats"]
        listeners = [one for tree in trees for one in tree["listeners"]]
        found = [pool for tree in trees for pool in tree["pools"]]
        members = {pool["pool_id"]: [one["member_id"] for one in pool["members"]] for pool in found}
        for amphora_id, machine in state["machines"].items():
            if amphora_id in state["off"] or machine["knocks"] <= _BOOTS:
                continue
            served = {one["listener_id"]: ListenerReport("OPEN", bytes_in=1000) for one in listeners}
            pools = {
                f"{one['default_pool_id']}:{one['listener_id']}": PoolReport(
                    "UP", dict.fromkeys(members[one["default_pool_id"]], "UP")
                )
                for one in listeners
                if one.get("default_pool_id")
            }
            bundle = machine["bundle"]
            report = Report(
                generation=None if bundle is None else bundle["generation"],
                listeners=served if bundle else {},
                pools=pools if bundle else {},
                amphora_id=amphora_id,
                holds_vip=_holds(state, amphora_id),
            )
            yield Heartbeat(amphora_id, 1, number, report)


def _reached(state, amphora_id):
    if amphora_id in state["off"] or amphora_id not in state["machines"]:
        raise AgentUnreachable("ask an agent", "the agent does not answer")
    return state["machines"][amphora_id]


def _holds(state, amphora_id):
    machine = state["machines"][amphora_id]
    paired = machine["bundle"] is not None and machine["bundle"].get("vrrp") is not None
    return state["holder"] == amphora_id if paired else None


def _elect(state):
    """A partner takes the VIPs of an amphora that has ended."""
    paired = [
        one
        for one, machine in state["machines"].items()
        if one not in state["off"] and machine["bundle"] and machine["bundle"].get("vrrp")
    ]
    if state["holder"] not in paired:
        staying = [one for one in paired if not state["machines"][one]["drains"]]
        state["holder"] = next(iter(staying or paired), None)


class FakeNetwork(LocalNetwork):
    """The embedded backend with late addresses; the fake cloud keeps VIP options in place of the kernel."""

    def __init__(self, conf, database, cloud):
        super().__init__(conf, database)
        self._world = cloud

    def allocate_vip(self, load_balancer_id, project_id, wanted, machines=()):
        with self._world.kept.open() as state:
            state["late"] -= 1
            if state["late"] >= 0:
                return NotYet(reason="the allocator has not answered", again_in=1.0)
        return super().allocate_vip(load_balancer_id, project_id, wanted, machines)

    def apply_vip_options(self, load_balancer_id, project_id, options, port_ids):
        with self._world.kept.open() as state:
            state["options"][load_balancer_id] = (options, tuple(port_ids))

    def release_load_balancer(self, load_balancer_id):
        super().release_load_balancer(load_balancer_id)
        with self._world.kept.open() as state:
            state["options"].pop(load_balancer_id, None)
