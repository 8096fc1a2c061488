# SPDX-License-Identifier: Apache-2.0
"""Builders of the model for tests with real traffic.

Invariant: ids are derived from names alone, so equal names make the same object in every push, and a test can compute
an id (`id_of("pool", "web")`). The parent's builder connects its children.

    load_balancer(listener(80, pool="web"), pool("web", member(first), member(second, weight=3)))
"""

from __future__ import annotations

import uuid

from msgspec.structs import replace

from amphora_driver.model.enums import (
    Algorithm,
    ClientAuthentication,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    SessionPersistence,
    Vip,
)

VIP, VIP6 = "198.51.100.5", "2001:db8:1::5"
SUBNET, SUBNET6, NETWORK = "vip-subnet", "vip-subnet-6", "vip-network"
LB = "1b000000-0000-4000-8000-000000000001"
_ROOM = uuid.UUID("7e570000-0000-4000-8000-000000000000")


def id_of(kind: str, name: object) -> str:
    """Return the id of an object by its name; `kind` is the name of the builder."""
    return str(uuid.uuid5(_ROOM, f"{kind} {name}"))


def load_balancer(*parts: Listener | Pool, **more) -> LoadBalancer:
    """Return a load balancer with both VIPs, and listeners and pools in any order."""
    more.setdefault("vip", vip(VIP))
    more.setdefault("additional_vips", (vip(VIP6),))
    return LoadBalancer(
        id=LB,
        project_id="9a0ec700-0000-4000-8000-000000000001",
        listeners=tuple(part for part in parts if isinstance(part, Listener)),
        pools=tuple(part for part in parts if isinstance(part, Pool)),
        **more,
    )


def vip(address: str) -> Vip:
    return Vip(address=address, subnet_id=SUBNET6 if ":" in address else SUBNET, network_id=NETWORK, port_id="vip-port")


def listener(
    port: int = 80, *policies: L7Policy, protocol: str = "HTTP", pool: str | None = "pool", **more
) -> Listener:
    """Return a listener that is named by its port; `pool` is the name of its default pool."""
    made = id_of("listener", port)
    if isinstance(more.get("client_authentication"), str):
        more["client_authentication"] = ClientAuthentication(more["client_authentication"])
    return Listener(
        id=made,
        loadbalancer_id=LB,
        protocol=ListenerProtocol(protocol),
        protocol_port=port,
        default_pool_id=None if pool is None else id_of("pool", pool),
        l7policies=tuple(replace(policy, listener_id=made) for policy in policies),
        **more,
    )


def pool(name: str = "pool", *members: Member, protocol: str = "HTTP", monitor: HealthMonitor | None = None, **more):
    """Return a pool; `algorithm` and `persistence=("HTTP_COOKIE", name or None)` are short forms."""
    made = id_of("pool", name)
    if "algorithm" in more:
        more["lb_algorithm"] = Algorithm(more.pop("algorithm"))
    if "persistence" in more:
        kind, cookie = more.pop("persistence")
        more["session_persistence"] = SessionPersistence(type=PersistenceType(kind), cookie_name=cookie)
    return Pool(
        id=made,
        loadbalancer_id=LB,
        protocol=PoolProtocol(protocol),
        members=tuple(replace(each, pool_id=made) for each in members),
        healthmonitor=None if monitor is None else replace(monitor, pool_id=made),
        **more,
    )


def member(peer, **more) -> Member:
    """Return the member of a peer (an object with `name`, `address` and `port`); `more` has priority."""
    more.setdefault("id", id_of("member", peer.name))
    more.setdefault("address", peer.address)
    more.setdefault("protocol_port", peer.port)
    return Member(pool_id="", **more)


def monitor(kind: str = "HTTP", **more) -> HealthMonitor:
    """Return a health monitor with the shortest delay, and a time-out for busy machines."""
    more = {"delay": 1, "timeout": 3, "max_retries": 1, "max_retries_down": 1, **more}
    more.setdefault("id", id_of("monitor", kind))
    return HealthMonitor(pool_id="", type=MonitorType(kind), **more)


def policy(action: str, position: int, *rules: L7Rule, to_pool: str | None = None, **more) -> L7Policy:
    """Return an L7 policy that is named by its position; `to_pool` is a pool's name."""
    made = more.pop("id", None) or id_of("policy", position)
    return L7Policy(
        id=made,
        listener_id="",
        action=L7Action(action),
        position=position,
        redirect_pool_id=None if to_pool is None else id_of("pool", to_pool),
        rules=tuple(replace(each, l7policy_id=made, id=id_of(made, n)) for n, each in enumerate(rules)),
        **more,
    )


def rule(kind: str, compare: str, value: str, key: str | None = None, **more) -> L7Rule:
    return L7Rule(
        id="", l7policy_id="", type=L7RuleType(kind), compare_type=L7Compare(compare), value=value, key=key, **more
    )
