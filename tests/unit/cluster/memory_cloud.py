# SPDX-License-Identifier: Apache-2.0
"""Nova and one pool of Octavia in memory, as a pass uses them."""

import threading

import msgspec

from amphora_cluster.cloud.errors import Busy, CloudError, Missing
from amphora_cluster.cloud.octavia import Applied
from amphora_cluster.model import Address, Member, Pool, Server, StepKind


class MemoryCloud:
    """Servers by id, members by id, and the faults that a test sets.

    Attributes:
        faults: exceptions by the name of a call; raised until the test removes them.
        refusals: reasons by server id; `apply` refuses the steps of these servers.
        after: called with the name of each call after its effect.
    """

    def __init__(self):
        self.shown, self.members = {}, {}
        self.has_monitor, self.changeable, self.connections = True, True, None
        self.faults, self.refusals, self.calls = {}, {}, []
        self.load_balancer, self.failed = "ACTIVE", False
        self.after = lambda _: None
        self.lock = threading.Lock()

    def boot(self, *names, status="ACTIVE"):
        for name in names:
            address = Address(ip=f"192.0.2.{len(self.shown) + 1}", family=4)
            self.shown[name] = Server(id=name, name=name, status=status, addresses=(address,), created_at=1.0)

    def check(self, up=True):
        """The health monitor has checked all members."""
        for one in list(self.members.values()):
            status = ("ONLINE" if one.weight else "DRAINING") if up else "ERROR"
            self.members[one.id] = msgspec.structs.replace(one, operating_status=status)

    def served(self):
        """The names of the members that get requests."""
        return sorted(one.name for one in self.members.values() if one.weight)

    def get(self, _group, _credential):
        return self

    def servers(self, _group, known, *, fresh):
        self.known = set(known)
        self._call("servers", fresh)
        return tuple(self.shown.values())

    def read_pool(self, _group, *, connections):
        self._call("read_pool", connections)
        if self.load_balancer == "DELETED":
            raise Missing("read pool", "no such pool", final=True)
        return Pool(
            id="pool",
            load_balancer_id="lb",
            has_monitor=self.has_monitor,
            changeable=self.changeable,
            failed=self.failed,
            members=tuple(self.members.values()),
            active_connections=self.connections if connections else None,
        )

    def apply(self, group, steps):
        self._call("apply", tuple((step.kind.value, step.server_id) for step in steps))
        refused = {}
        with self.lock:
            for step in steps:
                if step.server_id in self.refusals:
                    refused[step.server_id] = self.refusals[step.server_id]
                elif step.kind is StepKind.LEAVE:
                    for one in step.members:
                        self.members.pop(one.member_id, None)
                else:
                    for one in step.members:
                        self._put(one, group.tag)
        self.after("apply")
        return Applied(changes=1, refused=refused)

    def delete_load_balancer(self, _group):
        self._call("delete_load_balancer", None)
        if self.load_balancer == "ACTIVE":
            self.load_balancer = "PENDING_DELETE"
        return self.load_balancer == "DELETED"

    def _put(self, change, tag):
        name = f"{change.address}:{change.port}"
        values = {one: getattr(change, one) for one in ("name", "address", "port", "weight", "subnet_id")}
        values |= {"monitor_port": change.monitor_port, "backup": change.backup}
        status = self.members[name].operating_status if name in self.members else "OFFLINE"
        status = "DRAINING" if not change.weight and self.has_monitor else status
        status = status if self.has_monitor else "NO_MONITOR"
        states = {"operating_status": status, "provisioning_status": "ACTIVE"}
        self.members[name] = Member(id=name, tags=(tag,), **values, **states)

    def _call(self, name, about):
        self.calls.append((name, about))
        if name in self.faults:
            raise self.faults[name]


BUSY = Busy("change the members", "the load balancer is immutable")
OUTAGE = CloudError("read the pool", "status 503: no service")
