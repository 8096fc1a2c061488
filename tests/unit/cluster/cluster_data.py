# SPDX-License-Identifier: Apache-2.0
"""Short forms of the data of amphora_cluster for tests."""

import msgspec

from amphora_cluster.model import (
    Address,
    Group,
    Member,
    MemberTemplate,
    Node,
    NodeState,
    Pool,
    Selector,
    SelectorKind,
    Server,
)
from amphora_cluster.plan import Moment, plan

NOW = 10_000.0
STATISTICS_AGE = 10.0
SUBNET = "subnet-1"


def group(group_id="g", *, ports=(80,), template=None, **changes):
    made = Group(
        id=group_id,
        name=f"group {group_id}",
        project_id="project",
        selector=Selector(kind=SelectorKind.SERVER_GROUP, value="server-group"),
        load_balancer_id="lb",
        pool_id="pool",
        member=MemberTemplate(ports=ports, subnet_id=SUBNET, **(template or {})),
    )
    return msgspec.structs.replace(made, **changes)


def address(number, subnet_id=SUBNET):
    return Address(ip=f"192.0.2.{number}", family=4, subnet_id=subnet_id)


def server(name="s1", number=1, *, status="ACTIVE", created_at=0.0, **changes):
    made = Server(id=name, name=f"name of {name}", status=status, addresses=(address(number),), created_at=created_at)
    return msgspec.structs.replace(made, **changes)


def member(name="s1", number=1, *, port=80, status="ONLINE", tags=("amphora-cluster:g",), **changes):
    """An own member of group g, with the properties that `group` and `server` demand."""
    made = Member(
        id=f"m-{name}-{port}",
        name=name,
        address=f"192.0.2.{number}",
        port=port,
        weight=1,
        subnet_id=SUBNET,
        monitor_port=None,
        backup=False,
        operating_status=status,
        provisioning_status="ACTIVE",
        tags=tags,
    )
    return msgspec.structs.replace(made, **changes)


def pool(*members, **changes):
    made = Pool(id="pool", load_balancer_id="lb", has_monitor=True, changeable=True, members=members)
    return msgspec.structs.replace(made, **changes)


def node(name="s1", state=NodeState.SERVING, *, since=NOW - 10, **changes):
    return msgspec.structs.replace(Node(server_id=name, state=state, since=since), **changes)


def steps_of(result):
    """The steps in a short form: kind, server, and (port, weight) of each member."""
    return [
        (step.kind.value, step.server_id, [(change.port, change.weight) for change in step.members])
        for step in result.steps
    ]


EMPTY = pool()


def moment(now=NOW):
    """A time of a clock that is never set."""
    return Moment(now=now, elapsed=lambda _, recorded: now - recorded, statistics_age=STATISTICS_AGE)


def planned(group, servers=(), pool=EMPTY, nodes=(), now=NOW):
    return plan(group, tuple(servers), pool, tuple(nodes), moment(now))
