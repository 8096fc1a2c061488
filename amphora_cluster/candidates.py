# SPDX-License-Identifier: Apache-2.0
"""The choice of servers. Pure functions: the caller passes the source of random numbers.

The second half gives the servers that Senlin's load-balancing policy removes before, and adds after, each of its
actions. A caller with Senlin's terms gets the same candidates from a group. `tests/compat/test_senlin_candidates.py`
compares them with Senlin 16.0.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from random import Random
from typing import Any

import msgspec

from amphora_cluster.model import Criterion, Server


def choose(
    servers: Sequence[Server],
    count: int,
    criterion: Criterion,
    rng: Random,
    load: Mapping[str, float],
    first: Sequence[str] = (),
) -> tuple[str, ...]:
    """The ids of `count` servers, or of all if there are fewer.

    Args:
        load: a number by server id. A server without a number may be the busiest one, so it is chosen last.
        first: ids of servers that are chosen before all others, for example unhealthy ones.
    """
    preferred = [server.id for one in first for server in servers if server.id == one]
    others = [server for server in servers if server.id not in preferred]
    wanted = max(0, count - len(preferred))
    if criterion is Criterion.RANDOM:
        chosen = _random([server.id for server in others], wanted, rng)
    elif criterion is Criterion.LEAST_LOADED:
        chosen = [
            one.id for one in sorted(others, key=lambda one: (load.get(one.id, math.inf), one.created_at, one.id))
        ]
    else:
        youngest = criterion is Criterion.YOUNGEST
        ordered = sorted(others, key=lambda one: (one.created_at, one.id), reverse=youngest)
        chosen = [one.id for one in ordered]
    return tuple((preferred + chosen[:wanted])[: max(0, count)])


def _random(ids: Sequence[str], count: int, rng: Random) -> list[str]:
    """Draw ids one after another, as Senlin does, so that equal random numbers give equal results."""
    rest = list(ids)
    drawn: list[str] = []
    while rest and len(drawn) < count:
        drawn.append(rest.pop(rng.randrange(len(rest))))
    return drawn


class ActionName(str, Enum):
    """The actions of Senlin that change the members of a load balancer."""

    ADD_NODES = "CLUSTER_ADD_NODES"
    DEL_NODES = "CLUSTER_DEL_NODES"
    SCALE_IN = "CLUSTER_SCALE_IN"
    SCALE_OUT = "CLUSTER_SCALE_OUT"
    RESIZE = "CLUSTER_RESIZE"
    REPLACE_NODES = "CLUSTER_REPLACE_NODES"
    NODE_CREATE = "NODE_CREATE"
    NODE_DELETE = "NODE_DELETE"
    NODE_RECOVER = "NODE_RECOVER"


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a cluster.

    Args:
        faulty: Senlin's status ERROR or WARNING, or tainted. Such nodes are removed first, and then unborn ones.
        born: the node has a time of creation.
    """

    id: str
    faulty: bool = False
    born: bool = True


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes and limits of a cluster. A negative `max_size` is no limit."""

    nodes: tuple[ClusterNode, ...] = ()
    desired_capacity: int = 0
    min_size: int = 0
    max_size: int = -1
    most_nodes: int = 1000


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """An action with its inputs, and the data that other policies have added.

    Args:
        node_id: the node of a NODE action.
        inputs: for example `candidates`, `count`, `adjustment_type`, `number`, `min_step`, `min_size`, `max_size` and
            `strict`.
        data: `deletion` with `count` and `candidates`, or `creation` with `count` and `nodes`.
    """

    name: ActionName
    node_id: str = ""
    inputs: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}


class Adjustment(str, Enum):
    """How the number of a resize changes the capacity."""

    EXACT_CAPACITY = "EXACT_CAPACITY"
    CHANGE_IN_CAPACITY = "CHANGE_IN_CAPACITY"
    CHANGE_IN_PERCENTAGE = "CHANGE_IN_PERCENTAGE"


def removed_before(action: Action, cluster: Cluster, rng: Random, *, like_release: bool = False) -> tuple[str, ...]:
    """The nodes that leave the pool before an action (scenarios S1, S2, S3 and NODE_DELETE of S7).

    The candidates of the data or inputs come first. If there are none, nodes are chosen at random.

    Args:
        like_release: Senlin 16.0.0 deviates from the policy's specification in two cases. It ignores the input `count`
            of a scale-in and removes one node. It removes one random node before a replacement, unless another policy
            has added the data `deletion`. True repeats both.
    """
    deletion = action.data.get("deletion")
    if action.name is ActionName.REPLACE_NODES and not (like_release and deletion is None):
        return tuple(action.inputs["candidates"])
    if deletion is not None:
        if deletion.get("candidates") is not None:
            return tuple(deletion["candidates"])
        return _at_random(cluster.nodes, deletion.get("count", 0), rng)
    match action.name:
        case ActionName.NODE_DELETE:
            return (action.node_id,)
        case ActionName.DEL_NODES:
            return tuple(action.inputs.get("candidates", ()))
        case ActionName.RESIZE:
            return _at_random(cluster.nodes, -resize_change(action.inputs, cluster), rng)
        case ActionName.SCALE_IN:
            return _at_random(cluster.nodes, 1 if like_release else action.inputs.get("count", 1), rng)
        case ActionName.REPLACE_NODES:
            return _at_random(cluster.nodes, 1, rng)
    return ()


def added_after(action: Action) -> tuple[str, ...]:
    """The nodes that join the pool after an action (scenarios S4, S5, S6 and NODE_CREATE of S7)."""
    if action.name in {ActionName.NODE_CREATE, ActionName.NODE_RECOVER}:
        return (action.node_id,)
    if action.name is ActionName.REPLACE_NODES:
        return tuple(action.inputs["candidates"].values())
    return tuple((action.data.get("creation") or {}).get("nodes", ()))


def resize_change(inputs: Mapping[str, Any], cluster: Cluster) -> int:
    """The number of nodes that a resize adds, negative for a removal. 0 if a limit forbids the resize."""
    current = len(cluster.nodes) or cluster.desired_capacity
    smallest, largest = inputs.get("min_size"), inputs.get("max_size")
    kind, strict = inputs.get("adjustment_type"), inputs.get("strict", False)
    desired = current
    if kind is not None:
        desired = _adjusted(current, Adjustment(kind), inputs["number"], inputs.get("min_step"))
    if strict is False:
        desired = _within(desired, cluster, smallest, largest)
    return desired - current if _allowed(desired, cluster, smallest, largest, strict=strict) else 0


def _at_random(nodes: tuple[ClusterNode, ...], count: int, rng: Random) -> tuple[str, ...]:
    faulty = [node.id for node in nodes if node.faulty]
    unborn = [node.id for node in nodes if not node.faulty and not node.born]
    others = [node.id for node in nodes if not node.faulty and node.born]
    chosen = faulty + unborn
    return tuple((chosen + _random(others, count - len(chosen), rng))[: max(0, count)])


def _adjusted(current: int, kind: Adjustment, number: int, min_step: int | None) -> int:
    if kind is Adjustment.EXACT_CAPACITY:
        return number
    if kind is Adjustment.CHANGE_IN_CAPACITY:
        return current + number
    share = number * current / 100.0
    # A share between 0 and 1 node counts as one node. A larger share is rounded towards zero.
    size = math.ceil(abs(share)) if abs(share) < 1.0 else math.floor(abs(share))
    if min_step is not None:
        size = max(size, min_step)
    # As in Senlin, a change by 0 per cent with `min_step` removes nodes.
    return current + size if share > 0 else current - size


def _within(desired: int, cluster: Cluster, smallest: int | None, largest: int | None) -> int:
    """The capacity within the limits of the request, or of the cluster where the request has none."""
    desired = max(desired, cluster.min_size if smallest is None else smallest)
    most = cluster.max_size if largest is None else largest
    return min(desired, most) if most > 0 else desired


def _allowed(desired: int, cluster: Cluster, smallest: int | None, largest: int | None, *, strict: bool) -> bool:
    """Whether the capacity and the new limits fit the cluster and each other."""
    if desired > cluster.most_nodes or (largest is not None and largest > cluster.most_nodes):
        return False
    low = smallest if smallest is not None else (cluster.min_size if strict else None)
    high = largest if largest is not None else (cluster.max_size if strict else None)
    if low is not None and desired < low:
        return False
    if high is not None and 0 <= high < desired:
        return False
    if smallest is None and largest is None:
        return True
    low, high = cluster.min_size if smallest is None else smallest, cluster.max_size if largest is None else largest
    return high < 0 or low <= high
