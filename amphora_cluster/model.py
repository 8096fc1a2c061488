# SPDX-License-Identifier: Apache-2.0
"""The data of a group: its definition, the servers and members in the cloud, and the steps.

Invariant: frozen data without I/O. A group compares two lists at each pass: the servers that Nova reports, and the
members that Octavia reports. The recorded state of a node is needed only where the two lists do not show it, for
example the begin of a drain.
"""

from __future__ import annotations

from enum import Enum

import msgspec

# The tag of a member is this prefix and the id of its group. Members without the tag are never changed.
TAG_PREFIX = "amphora-cluster:"


class SelectorKind(str, Enum):
    """How a group finds its servers."""

    SERVER_GROUP = "server_group"
    METADATA = "metadata"
    TAG = "tag"
    HEAT_STACK = "heat_stack"
    LIST = "list"


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a group.

    Args:
        value: id of the Nova server group; `key=value` of server metadata; a server tag; `stack/resource` with the id
            or name of a Heat stack and the name of its resource group. Empty for an explicit list.
        servers: server ids of an explicit list.
    """

    kind: SelectorKind
    value: str = ""
    servers: tuple[str, ...] = ()


class WeightKind(str, Enum):
    """The source of a member's weight."""

    NUMBER = "number"
    METADATA = "metadata"
    VCPUS = "vcpus"


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of a member: a number, the value of a metadata key, or the number of the server's vCPUs.

    `number` is also the weight of a server without a usable value. Octavia accepts 0 to 256.
    """

    kind: WeightKind = WeightKind.NUMBER
    number: int = 1
    key: str = ""


class MemberTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of each member of a group.

    Args:
        ports: protocol ports; a server has one member for each.
        subnet_id: subnet of the member's address; None for the first fixed address of the family.
        family: 4 or 6.
        monitor_port: port of health checks; None for the member's port.
    """

    ports: tuple[int, ...]
    subnet_id: str | None = None
    family: int = 4
    monitor_port: int | None = None
    backup: bool = False
    weight: Weight = Weight()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a group.

    Args:
        owns_load_balancer: the group created its load balancer from a policy, and deletes it with the group.
        drain_seconds: longest time between weight 0 and the removal of a member.
        drain_on_idle: a drain ends early if the statistics show no connection.
        minimum: smallest number of serving servers; a request for fewer is refused.
        join_timeout: seconds until a joining server counts as failed; a join waits as long for an unhealthy server.
        load_metadata: key of the server metadata with the load, for the criterion `least_loaded`; empty for none.
    """

    id: str
    name: str
    project_id: str
    selector: Selector
    load_balancer_id: str
    pool_id: str
    member: MemberTemplate
    owns_load_balancer: bool = False
    drain_seconds: int = 30
    drain_on_idle: bool = True
    minimum: int = 0
    join_timeout: int = 300
    load_metadata: str = ""

    @property
    def tag(self) -> str:
        """The tag of this group's members."""
        return TAG_PREFIX + self.id


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed address of a server."""

    ip: str
    family: int
    subnet_id: str | None = None


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server as Nova reports it.

    Args:
        status: Nova's status, for example ACTIVE, SHUTOFF or DELETED.
        created_at: seconds since 1970.
        vcpus: of the embedded flavor; None if Nova does not show it.
        selected: False for a server that the group knows, that still exists, and that the selector does not select now.
    """

    id: str
    name: str
    status: str
    addresses: tuple[Address, ...]
    created_at: float
    vcpus: int | None = None
    metadata: dict[str, str] = {}
    selected: bool = True


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member as Octavia reports it."""

    id: str
    name: str
    address: str
    port: int
    weight: int
    subnet_id: str | None
    monitor_port: int | None
    backup: bool
    operating_status: str
    provisioning_status: str
    tags: tuple[str, ...]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as Octavia reports it.

    Args:
        has_monitor: the pool has a health monitor whose admin_state_up is true, so that members become ONLINE.
        changeable: the load balancer is ACTIVE, so that Octavia accepts changes.
        failed: the load balancer is in ERROR. Octavia accepts no change, but the deletion of the load balancer.
        active_connections: of all listeners of the pool; None if unknown, or without statistics of the provider.
    """

    id: str
    load_balancer_id: str
    has_monitor: bool
    changeable: bool
    members: tuple[Member, ...]
    failed: bool = False
    active_connections: int | None = None


class NodeState(str, Enum):
    """The state of a server in its group.

    WAITING: the server is not ACTIVE yet, or has no usable address. JOINING: the members exist, but are not ONLINE yet.
    SERVING: the members are ONLINE, or NO_MONITOR in a pool without monitor. UNHEALTHY: a member that was serving is in
    ERROR. DRAINING: the members have weight 0. LEFT: the members are removed on request; the server stays out of the
    pool. FAILED: a join or leave did not succeed; `reason` has the cause. plan.py states when a state changes.
    """

    WAITING = "waiting"
    JOINING = "joining"
    SERVING = "serving"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    LEFT = "left"
    FAILED = "failed"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded state of a server in a group.

    Args:
        leaving: a request removes it from the pool. A server that vanished is not leaving: it joins when it is back.
        since: time of the last change of `state`, seconds since 1970.
        drain_began_at: time when Octavia confirmed weight 0 of all members.
    """

    server_id: str
    state: NodeState
    since: float
    leaving: bool = False
    reason: str = ""
    drain_began_at: float | None = None


class StepKind(str, Enum):
    """A change of the pool."""

    JOIN = "join"
    DRAIN = "drain"
    REPAIR = "repair"
    LEAVE = "leave"


class MemberChange(msgspec.Struct, frozen=True, kw_only=True):
    """One member after a step. Octavia identifies the members of a batch by address and port.

    Args:
        member_id: None for a new member.
    """

    member_id: str | None
    name: str
    address: str
    port: int
    weight: int
    subnet_id: str | None
    monitor_port: int | None
    backup: bool


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The change of all members of one server. A LEAVE step deletes the members; `members` has their ids."""

    kind: StepKind
    server_id: str
    members: tuple[MemberChange, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass.

    Args:
        steps: changes of the pool. JOIN, DRAIN and REPAIR fit into one batch call; each LEAVE deletes single members.
        nodes: the states to record, before the steps are done. Servers without a node are forgotten.
        again_at: time of the next pass if it is earlier than the poll interval, for example the end of a drain.
        complete: no change is outstanding.
    """

    steps: tuple[Step, ...]
    nodes: tuple[Node, ...]
    again_at: float | None
    complete: bool


class RequestKind(str, Enum):
    """What a caller requests from a group."""

    JOIN = "join"
    LEAVE = "leave"
    SYNC = "sync"


class Criterion(str, Enum):
    """The choice of servers that leave, if the request names none."""

    RANDOM = "random"
    OLDEST = "oldest"
    YOUNGEST = "youngest"
    LEAST_LOADED = "least_loaded"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a caller, for example a webhook.

    Args:
        servers: server ids; empty if `count` and `criterion` choose them.
        outcome: server id to an empty text (success) or the reason of its failure; complete at the end.
        refusal: the reason if the whole request was refused and changed nothing; otherwise empty.
        ended_at: None while the request is open.
    """

    id: str
    group_id: str
    kind: RequestKind
    servers: tuple[str, ...] = ()
    count: int = 0
    criterion: Criterion = Criterion.RANDOM
    created_at: float = 0.0
    ended_at: float | None = None
    outcome: dict[str, str] = {}
    refusal: str = ""
