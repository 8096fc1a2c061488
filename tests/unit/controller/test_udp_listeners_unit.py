# SPDX-License-Identifier: Apache-2.0
"""Virtual servers of UDP and SCTP listeners: served and omitted objects, and their part of a bundle."""

from __future__ import annotations

import json
import random
import uuid

import pytest
from msgspec.structs import replace

from amphora_agent.bundle import parse
from amphora_driver import config
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.model.enums import Algorithm, L7Action, ListenerProtocol, MonitorType, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    Profile,
    SessionPersistence,
    Vip,
)
from amphora_driver.queue.jobs import Lease
from amphora_driver.reconcile import desired_bundle
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.defaults import with_process_limits
from amphora_driver.reconcile.desired_bundle import BundleInputs
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.push import BundlePush
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers


def ident(kind: int, number: int) -> str:
    return f"{kind:08x}-0000-4000-8000-{number:012d}"


LB, L1, P1, M1, H1, Y1 = (ident(kind, 1) for kind in range(6))
L2, P2, M2 = (ident(kind, 2) for kind in (1, 2, 3))
OFF = {"admin_state_up": False}

MEMBERS = tuple(
    Member(id=one, pool_id=P1, address=f"192.0.2.{n}", protocol_port=53) for n, one in enumerate((M1, M2), 1)
)
MONITOR = HealthMonitor(id=H1, pool_id=P1, type=MonitorType.UDP_CONNECT, delay=5, timeout=3, max_retries=2)
POOL = Pool(id=P1, loadbalancer_id=LB, protocol=PoolProtocol.UDP, members=MEMBERS, healthmonitor=MONITOR)
FRONT = Listener(id=L1, loadbalancer_id=LB, protocol=ListenerProtocol.UDP, protocol_port=53, default_pool_id=P1)
WEB = replace(FRONT, id=L2, protocol=ListenerProtocol.TCP, default_pool_id=None)
VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
TREE = LoadBalancer(id=LB, project_id="x", vip=VIP, listeners=(FRONT, WEB), pools=(POOL,))
KEPT = SessionPersistence(type=PersistenceType.SOURCE_IP)
POLICY = L7Policy(id=Y1, listener_id=L1, action=L7Action.REJECT, position=1)


def front(**more) -> LoadBalancer:
    return replace(TREE, listeners=(replace(FRONT, **more), WEB))


def back(**more) -> LoadBalancer:
    return replace(TREE, pools=(replace(POOL, **more),))


def member(**more) -> LoadBalancer:
    return back(members=(replace(MEMBERS[0], **more), MEMBERS[1]))


def monitor(**more) -> LoadBalancer:
    return back(healthmonitor=replace(MONITOR, **more))


def made(tree: LoadBalancer, **more):
    """Return the virtual servers by listener and the reasons of omissions; check that the agent can read them."""
    found = virtual_servers(tree, **more)
    body = bundle(tree, 1, str(uuid.UUID(int=1)), (), Served(text=None, virtual=found.servers))
    assert [str(one.id) for one in parse(body).virtual_servers] == [one.id for one in found.servers]
    return {one.id: one for one in found.servers}, {one.object_id: str(one) for one in found.refused}


def test_a_listener_with_its_pool():
    found, refused = made(TREE)
    assert refused == {}
    (one,) = found.values()
    assert (one.protocol, one.port, one.addresses, one.pool_id) == ("UDP", 53, ("198.51.100.5",), P1)
    assert (one.algorithm, one.connection_limit, one.persistence) == ("ROUND_ROBIN", None, None)
    assert (one.client_address, one.monitor.type, one.monitor.codes) == ("hidden", "UDP-CONNECT", ())
    assert [(each.id, each.weight, each.enabled, each.backup) for each in one.members] == [
        (M1, 1, True, False),
        (M2, 1, True, False),
    ]


@pytest.mark.parametrize(
    "tree",
    [front(**OFF), replace(TREE, **OFF), replace(TREE, listeners=(WEB,)), replace(TREE, vip=replace(VIP, address="x"))],
)
def test_missing_objects_are_reported(tree):
    assert made(tree) == ({}, {})


@pytest.mark.parametrize("tree", [front(default_pool_id=None), back(**OFF)])
def test_clients_of_a_listener_without_members_are_refused(tree):
    found, refused = made(tree)
    assert refused == {}
    assert (found[L1].pool_id, found[L1].members, found[L1].monitor) == (None, (), None)
    assert (found[L1].algorithm, found[L1].persistence) == ("ROUND_ROBIN", None)


@pytest.mark.parametrize(
    ("tree", "object_id", "word"),
    [
        (front(connection_limit=0), L1, "connection_limit"),
        (front(allowed_cidrs=("x",)), L1, "allowed_cidrs"),
        (front(protocol_port=0), L1, "protocol_port"),
        (front(default_pool_id=P2), L1, "is not recorded"),
        (back(protocol=PoolProtocol.SCTP), L1, "SCTP"),
        (replace(TREE, pools=(replace(POOL, protocol=PoolProtocol.HTTP, healthmonitor=None),)), L1, "HTTP"),
        (front(l7policies=(POLICY,)), L1, "which need HTTP"),
        (front(client_ca_tls_container_ref="x"), L1, "client_ca_tls_container_ref"),
    ],
)
def test_an_unsupported_listener_is_omitted(tree, object_id, word):
    found, refused = made(tree)
    assert found == {}
    assert word in refused[object_id]
    assert set(refused) == {object_id}
    assert made(tree, failed=[object_id]) == ({}, {})


def test_flow_logging_follows_connection_logging():
    logging = Defaults(connection_logging=True)
    assert made(TREE)[0][L1].log_format is None
    (one,) = made(TREE, defaults=logging)[0].values()
    more = "%[protocol] %[packets_out] %[packets_in]"
    assert one.log_format == f"x {LB} %f %ci %cp %t - - %B %U - - %b %s %Tt %ts {more}"
    profile = replace(TREE.profile, connection_logging=True, log_format="{{lb_id}} %ci")
    assert made(replace(TREE, profile=profile))[0][L1].log_format == f"%f {LB} %ci"
    off = replace(TREE.profile, connection_logging=False)
    assert made(replace(TREE, profile=off), defaults=logging)[0][L1].log_format is None
    for text in ("two\nlines", "%ci" * 1000):
        found, refused = made(TREE, defaults=Defaults(connection_logging=True, log_format=text))
        assert found == {}
        assert "log format" in refused[L1]


def test_disabled_policy_rejects_no_request():
    assert L1 in made(front(l7policies=(replace(POLICY, **OFF),)))[0]


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        (back(lb_algorithm=Algorithm.LEAST_CONNECTIONS, session_persistence=KEPT), "lb_algorithm 'LEAST_CONNECTIONS'"),
        (back(tls_enabled=True), "tls_enabled"),
        (back(session_persistence=SessionPersistence(type=PersistenceType.HTTP_COOKIE)), "no cookies"),
    ],
)
def test_an_omitted_pool_leaves_its_listener_without_members(tree, word):
    found, refused = made(tree)
    assert (found[L1].pool_id, found[L1].members) == (None, ())
    assert word in refused[P1]
    assert set(refused) == {P1}
    unused = replace(tree, listeners=(WEB,))
    assert made(unused) == ({}, refused)


def test_least_connections_without_persistence_is_served():
    assert made(back(lb_algorithm=Algorithm.LEAST_CONNECTIONS))[0][L1].algorithm == "LEAST_CONNECTIONS"


@pytest.mark.parametrize(
    ("tree", "object_id", "word", "left", "checked"),
    [
        (member(weight=300), M1, "weight", [M2], True),
        (member(address="2001:db8::1"), M1, "every VIP is IPv4", [M2], True),
        (member(address="127.0.0.1"), M1, "loopback", [M2], True),
        (member(monitor_address="x"), M1, "monitor_address", [M2], True),
        (monitor(delay=0), H1, "delay", [M1, M2], False),
        (monitor(type=MonitorType.TLS_HELLO), H1, "TLS-HELLO", [M1, M2], False),
        (monitor(type=MonitorType.HTTP, url_path="x"), H1, "url_path", [M1, M2], False),
    ],
)
def test_a_broken_listener_affects_no_other(tree, object_id, word, left, checked):
    found, refused = made(tree)
    assert word in refused[object_id]
    assert set(refused) == {object_id}
    assert [one.id for one in found[L1].members] == left
    assert (found[L1].monitor is not None) is checked


@pytest.mark.parametrize(
    ("failed", "left", "checked"),
    [({M1}, [M2], True), ({H1}, [M1, M2], False), ({P1}, [], False), ({"nobody"}, [M1, M2], True)],
)
def test_refused_listeners_are_omitted(failed, left, checked):
    found, refused = made(TREE, failed=failed)
    assert refused == {}
    assert [one.id for one in found[L1].members] == left
    assert (found[L1].monitor is not None) is checked


def test_two_listeners_at_one_port():
    other = replace(FRONT, id=L2)
    found, refused = made(replace(TREE, listeners=(other, FRONT)))
    assert list(found) == [L1]
    assert refused[L2].endswith("another listener has port 53.")
    sctp = replace(FRONT, id=L2, protocol=ListenerProtocol.SCTP, default_pool_id=None)
    assert set(made(replace(TREE, listeners=(sctp, FRONT)))[0]) == {L1, L2}


def test_two_listeners_share_a_pool():
    found, _ = made(replace(TREE, listeners=(FRONT, replace(FRONT, id=L2, protocol_port=54))))
    assert found[L1].members == found[L2].members
    assert found[L1].pool_id == found[L2].pool_id == P1


@pytest.mark.parametrize(
    ("own", "profile", "configured", "wanted"),
    [(-1, None, None, None), (-1, None, 7, 7), (-1, 8, 7, 8), (9, 8, 7, 9)],
)
def test_the_connection_limit_of_a_listener(own, profile, configured, wanted):
    tree = replace(front(connection_limit=own), profile=Profile(connection_limit=profile))
    found, _ = made(tree, defaults=Defaults(connection_limit=configured))
    assert found[L1].connection_limit == wanted


def test_only_an_http_monitor_has_http_fields():
    asked = {"http_method": "HEAD", "url_path": "/x", "expected_codes": "200, 202-204", "domain_name": "a.b."}
    found, _ = made(monitor(type=MonitorType.HTTP, http_version=1.1, **asked))
    said = found[L1].monitor
    assert (said.method, said.path, said.codes, said.host, said.version) == (
        "HEAD", "/x", ("200", "202-204"), "a.b", "1.1",
    )  # fmt: skip
    assert (said.interval, said.timeout, said.rise, said.fall) == (5, 3, 2, 3)
    usual = made(monitor(type=MonitorType.HTTP))[0][L1].monitor
    assert (usual.method, usual.path, usual.codes, usual.host, usual.version) == ("GET", "/", ("200",), None, "1.0")
    for kind in (MonitorType.PING, MonitorType.TCP, MonitorType.SCTP):
        other = made(monitor(type=kind, **asked))[0][L1].monitor
        assert (other.method, other.path, other.codes, other.host, other.version) == (None, None, (), None, None)
    assert made(monitor(**OFF))[0][L1].monitor is None


def test_the_order_of_children_does_not_matter():
    tree = replace(
        TREE,
        listeners=tuple(replace(FRONT, id=ident(1, n), protocol_port=n) for n in range(1, 9)),
        pools=(POOL, replace(POOL, id=P2, members=(), healthmonitor=None)),
    )
    shuffled = random.Random(5)
    for _ in range(5):
        one = replace(
            tree,
            listeners=tuple(shuffled.sample(tree.listeners, 8)),
            pools=(replace(POOL, members=MEMBERS[::-1]), tree.pools[1])[:: shuffled.choice((1, -1))],
        )
        assert virtual_servers(one) == virtual_servers(tree)


def document(tree: LoadBalancer, **more) -> dict:
    found = virtual_servers(tree)
    served = Served(text=render(tree).text, virtual=found.servers)
    return json.loads(bundle(tree, 1, str(uuid.UUID(int=1)), (), served, **more))


def test_older_agents_get_no_virtual_servers():
    web = replace(WEB, allowed_cidrs=("192.0.2.0/24",))
    said = document(replace(TREE, listeners=(web,)))
    assert "virtual_servers" not in said
    assert said["allowed"] == [{"port": 53, "networks": ["192.0.2.0/24"]}]


def test_permitted_sources_of_two_protocols_with_one_port():
    web = replace(WEB, allowed_cidrs=("192.0.2.0/24",))
    udp = replace(FRONT, allowed_cidrs=("198.51.100.0/24", "2001:db8::/32"))
    said = document(replace(TREE, listeners=(web, udp)))
    assert said["allowed"] == [
        {"port": 53, "networks": ["192.0.2.0/24"]},
        {"port": 53, "networks": ["198.51.100.0/24", "2001:db8::/32"], "protocol": "udp"},
    ]
    # An omitted listener opens no port, and restricts no port of another listener.
    assert document(replace(TREE, listeners=(web, replace(udp, connection_limit=0))))["allowed"] == said["allowed"][:1]
    assert document(replace(TREE, listeners=(replace(udp, **OFF),)))["allowed"] == []


def test_a_push_and_an_audit_render_the_same_bundle(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text("[amp_haproxy]\nconnection_limit = 700\n")
    conf = config.load([str(path)])
    least = replace(
        POOL,
        id=P2,
        lb_algorithm=Algorithm.LEAST_CONNECTIONS,
        session_persistence=KEPT,
        members=(),
        healthmonitor=None,
    )
    tree = with_process_limits(replace(member(weight=300), pools=(*member(weight=300).pools, least)), conf)
    nothing = dict.fromkeys(("database", "agents", "authority", "vault"))
    backends = ReconcileContext(conf=conf, catalogue=None, **nothing)
    running_job = Job(Lease(load_balancer_id=LB, owner="me", epoch=1, attempts=0), None, 60.0)
    pushing = BundlePush(backends, running_job, lambda change, applied=None: None)
    told = {"generation": 1, "applied": 0, "gone": False, "readable": True, "networks": {}, "secrets": {}}
    served = pushing._render(step_types.LoadBalancerView(load_balancer_id=LB, tree=tree, **told), tree)
    assert {one: one in pushing._omitted for one in (M1, M2, P1, P2)} == {M1: True, M2: False, P1: False, P2: True}
    assert served.virtual[0].connection_limit == 700
    amphora = Amphora(
        id=str(uuid.UUID(int=1)), load_balancer_id=LB, role="MASTER", state=next(iter(AmphoraState)), compute_id=None,
        management_address=None, confirmed=0, plugged=(),
    )  # fmt: skip
    recorded = BundleInputs(
        tree=tree, generation=1, amphorae=(amphora,), networks=frozenset(), failed={}, secrets={}, tickets=None,
        priorities={},
    )  # fmt: skip
    pushed = desired_bundle.build_bundle(recorded, amphora, served, conf)
    assert desired_bundle.build_bundles(recorded, conf, None) == {amphora.id: pushed}
    assert json.loads(pushed)["virtual_servers"][0]["members"][0]["id"] == M2


def test_a_pool_without_a_listener_accepts_any_address_family():
    spare = replace(POOL, id=P2, members=(replace(MEMBERS[0], id=ident(3, 9), pool_id=P2, address="2001:db8::1"),))
    made = virtual_servers(replace(TREE, pools=(POOL, spare)))
    assert made.refused == ()
    both = virtual_servers(replace(TREE, listeners=(replace(FRONT, default_pool_id=P2), WEB), pools=(POOL, spare)))
    assert [one.object_id for one in both.refused] == [ident(3, 9)]
