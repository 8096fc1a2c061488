# SPDX-License-Identifier: Apache-2.0
"""Hostile text in every string field of a UDP listener: one value in its place, or a refusal.

The agent's own parser checks the resulting bundle. HAProxy's part does not depend on the values.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
import trees
from corpus import STRINGS
from hypothesis import example, given
from hypothesis import strategies as st
from outcomes import CHECKS, nodes, shown
from texts import anything, printable

from amphora_agent.bundle import parse
from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import ListenerProtocol, MonitorType, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import LoadBalancer, Pool
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import Made, virtual_servers
from amphora_driver.validation import udp as capabilities

LB, LISTENER, POOL, MEMBER, MONITOR, NEAR, BACK = (f"{kind:08x}-0000-4000-8000-000000000001" for kind in range(7))
LETTERS = {LB: "b", LISTENER: "l", POOL: "p", MEMBER: "m", MONITOR: "h"}


def balancer(part: str = "", field: str = "", value: object = None) -> LoadBalancer:
    """Return two UDP listeners: one with a value in a field of one part, and its neighbour."""
    given_ = {part: {field: value}} if part else {}
    own = partial(dict.get, given_)
    udp = {"protocol": PoolProtocol.UDP}
    kept = trees.SessionPersistence(**{"type": PersistenceType.SOURCE_IP, **(own("persistence") or {})})
    asks = {"id": MONITOR, "pool_id": POOL, "type": MonitorType.HTTP, **(own("monitor") or {})}
    member = trees.member(0, **{"id": MEMBER, "pool_id": POOL, **(own("member") or {})})
    behind = trees.pool(
        0,
        **{
            "id": POOL,
            "members": (member,),
            "healthmonitor": trees.monitor(0, **asks),
            "session_persistence": kept,
            **udp,
        }
        | (own("pool") or {}),
    )
    other = trees.pool(0, id=BACK, members=(), healthmonitor=None, **udp)
    front = {"protocol": ListenerProtocol.UDP}
    listeners = (
        trees.listener(0, **{"id": LISTENER, "default_pool_id": POOL, **front} | (own("listener") or {})),
        trees.listener(0, id=NEAR, protocol_port=9, default_pool_id=BACK, **front),
    )
    return LoadBalancer(id=LB, project_id="project", vip=trees.vip(), listeners=listeners, pools=(behind, other))


@dataclass(frozen=True)
class Field:
    """One string field, the faulty object, and the parts of a virtual server that may contain it."""

    part: str
    name: str
    owner: str
    seen: tuple[str, ...] = ()
    many: bool = False

    def make(self, value: str) -> LoadBalancer:
        return balancer(self.part, self.name, (value,) if self.many else value)

    def __str__(self) -> str:
        return f"{self.part}.{self.name}"


MEMBERS, CHECK = ("members",), ("monitor",)
FIELDS = (
    Field("listener", "id", "", ("id",)),
    Field("listener", "name", LISTENER),
    Field("listener", "loadbalancer_id", LISTENER),
    Field("listener", "default_pool_id", LISTENER, ("pool_id", "members", "monitor", "persistence")),
    Field("listener", "insert_headers", LISTENER, many=True),
    Field("listener", "allowed_cidrs", LISTENER, many=True),
    Field("listener", "default_tls_container_ref", LISTENER),
    Field("listener", "sni_container_refs", LISTENER, many=True),
    Field("listener", "client_ca_tls_container_ref", LISTENER),
    Field("listener", "client_crl_container_ref", LISTENER),
    Field("listener", "tls_versions", LISTENER, many=True),
    Field("listener", "tls_ciphers", LISTENER),
    Field("listener", "alpn_protocols", LISTENER, many=True),
    Field("pool", "name", POOL),
    Field("pool", "loadbalancer_id", POOL),
    Field("pool", "tls_container_ref", POOL),
    Field("pool", "ca_tls_container_ref", POOL),
    Field("pool", "crl_container_ref", POOL),
    Field("pool", "tls_versions", POOL, many=True),
    Field("pool", "tls_ciphers", POOL),
    Field("pool", "alpn_protocols", POOL, many=True),
    Field("persistence", "cookie_name", POOL),
    Field("persistence", "persistence_granularity", POOL, ("persistence",)),
    Field("member", "id", "", MEMBERS),
    Field("member", "pool_id", MEMBER),
    Field("member", "name", MEMBER),
    Field("member", "subnet_id", MEMBER),
    Field("member", "address", MEMBER, MEMBERS),
    Field("member", "monitor_address", MEMBER, MEMBERS),
    Field("member", "vnic_type", MEMBER),
    Field("monitor", "id", "", CHECK),
    Field("monitor", "pool_id", MONITOR),
    Field("monitor", "name", MONITOR),
    Field("monitor", "http_method", MONITOR, CHECK),
    Field("monitor", "url_path", MONITOR, CHECK),
    Field("monitor", "expected_codes", MONITOR, CHECK),
    Field("monitor", "domain_name", MONITOR, CHECK),
)


@lru_cache
def plain() -> tuple[list[dict], str | None]:
    tree = balancer()
    made = virtual_servers(tree)
    assert made.refused == ()
    return document(tree, made)["virtual_servers"], render(tree).text


def document(tree: LoadBalancer, made: Made) -> dict:
    """Return the bundle of an amphora; assert that the agent parses it."""
    body = bundle(tree, 1, str(uuid.UUID(int=1)), (), Served(text=None, virtual=made.servers))
    assert len(parse(body).virtual_servers) == len(made.servers)
    found: dict = json.loads(body)
    return found


def objects(tree: LoadBalancer, owner: str) -> bool:
    """Return whether the driver refuses this object."""
    node = next(one for one in nodes(tree) if one.id == owner)
    try:
        CHECKS[LETTERS[owner]](node)
        if isinstance(node, Pool) and tree.is_default_pool(node):
            capabilities.check_address_families(node, tree.vips)
        for pool in tree.pools:
            if node in pool.members and tree.is_default_pool(pool):
                capabilities.check_address_families(trees.change(pool, members=(node,)), tree.vips)
    except UnsupportedOption:
        return True
    return False


def judge(field: Field, value: str) -> None:
    tree = field.make(value)
    made = virtual_servers(tree)
    owner = field.owner or value
    for error in made.refused:
        shown(error)
        assert error.object_id == owner
    before, text = plain()
    assert render(tree).text == text, "the value is in HAProxy's configuration"
    now = document(tree, made).get("virtual_servers", [])
    near = [one for one in before if one["id"] == NEAR]
    assert [one for one in now if one["id"] == NEAR] == near, "the neighbour has changed"
    if field.owner and field.name != "default_pool_id":
        assert bool(made.refused) == objects(tree, owner), "driver and renderer disagree"
    if made.refused:
        return
    assert len(now) == len(before)
    mine = next(one for one in now if one["id"] != NEAR)
    was = next(one for one in before if one["id"] != NEAR)
    assert {key for key in was if mine[key] != was[key]} <= set(field.seen)
    assert mine.keys() == was.keys()


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_every_string_of_the_corpus(field):
    wrong = []
    for value in STRINGS:
        try:
            judge(field, value)
        except AssertionError as error:
            wrong.append((value, str(error)[:200]))
    assert wrong == []


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_any_text_is_one_value_or_refused(field):
    judged: Callable[[str], None] = partial(judge, field)
    good = st.sampled_from(("192.0.2.7", "2001:db8::7", "255.255.0.0", "/x", "200", "GET", "a.b", POOL, BACK))

    @given(st.one_of(printable, anything, good, st.tuples(good, anything).map("".join)))
    @example("")
    def try_it(value):
        judged(value)

    try_it()
