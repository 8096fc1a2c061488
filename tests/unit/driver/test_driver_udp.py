# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP in the driver: recorded objects and refusals."""

import pytest
import sqlalchemy as sa
from octavia_lib.api.drivers import data_models, exceptions
from octavia_objects import LB, LISTENER, MONITOR, NETWORK, POOL, SUBNET6, listener, load_balancer, member, pool

from amphora_driver import driver
from amphora_driver.store import desired_objects

OTHER = "40000000-0000-4000-8000-000000000001"
LEAST, KEPT = "LEAST_CONNECTIONS", {"type": "SOURCE_IP"}
POLICY = {"l7policy_id": MONITOR, "listener_id": LISTENER, "action": "REJECT", "position": 1, "project_id": "demo"}


def monitor(kind, **more):
    values = {"type": kind, "delay": 5, "timeout": 3, "max_retries": 3, "max_retries_down": 3, "admin_state_up": True}
    return data_models.HealthMonitor(healthmonitor_id=MONITOR, pool_id=POOL, project_id="demo", **{**values, **more})


def tree(database):
    return database.read(lambda connection: desired_objects.load_tree(connection, LB))


@pytest.fixture(params=["UDP", "SCTP"])
def virtual(provider, request):
    """A load balancer with a listener and a pool of that protocol."""
    provider.loadbalancer_create(load_balancer())
    provider.listener_create(listener(protocol=request.param, protocol_port=53))
    kept = {"type": "SOURCE_IP", "persistence_timeout": 60, "persistence_granularity": "255.255.255.0"}
    provider.pool_create(pool(protocol=request.param, session_persistence=kept))
    return provider


def refused(call, *words):
    with pytest.raises(exceptions.UnsupportedOptionError) as refusal:
        call()
    missing = [word for word in words if word not in refusal.value.user_fault_string]
    assert not missing, refusal.value.user_fault_string


def test_a_udp_load_balancer_is_recorded(virtual, database):
    virtual.member_create(member(1, backup=True, weight=7, monitor_address="192.0.2.9", monitor_port=80))
    virtual.health_monitor_create(monitor("HTTP", url_path="/x"))
    (found,), (front,) = tree(database).pools, tree(database).listeners
    assert found.uses_l4
    assert front.uses_l4
    assert front.default_pool_id == found.id
    assert found.session_persistence.persistence_granularity == "255.255.255.0"
    assert (found.members[0].backup, found.healthmonitor.url_path) == (True, "/x")


def test_udp_and_tcp_can_share_a_port(virtual, database):
    virtual.listener_create(listener(listener_id=MONITOR, protocol="TCP", protocol_port=53))
    assert {one.protocol_port for one in tree(database).listeners} == {53}


def test_members_of_an_unreachable_address_family_are_refused(virtual, database):
    before = tree(database)
    refused(lambda: virtual.member_create(member(1, address="2001:db8::1")), "2001:db8::1", "every VIP is IPv4")
    refused(
        lambda: virtual.member_batch_update(POOL, [member(2), member(3, address="2001:db8::3")]), "2001:db8::3", "IPv6"
    )
    assert tree(database) == before


def test_a_pool_without_a_listener_takes_members_of_any_family(virtual, database):
    protocol = str(tree(database).pools[0].protocol)
    virtual.pool_create(pool(pool_id=MONITOR, listener_id=None, protocol=protocol))
    spare = {"pool_id": MONITOR, "address": "2001:db8::1"}
    virtual.member_create(member(1, **spare))
    virtual.member_batch_update(MONITOR, [member(1, **spare), member(2, pool_id=MONITOR)])
    before = tree(database)
    changed = data_models.Listener(listener_id=LISTENER, default_pool_id=MONITOR)
    refused(lambda: virtual.listener_update(listener(), changed), "2001:db8::1", "every VIP is IPv4")
    other = listener(listener_id=OTHER, protocol=protocol, protocol_port=54, default_pool_id=MONITOR)
    refused(lambda: virtual.listener_create(other), "2001:db8::1", "every VIP is IPv4")
    assert tree(database) == before
    virtual.member_delete(member(1, **spare))
    virtual.listener_update(listener(), changed)
    refused(lambda: virtual.member_create(member(1, **spare)), "2001:db8::1", "every VIP is IPv4")
    # The other pool has no listener any more.
    virtual.member_create(member(3, address="2001:db8::3"))


def test_an_update_reads_no_members_of_a_pool_that_stays(virtual):
    virtual.member_create(member(1))
    said = []
    engine = driver._shared().database.engine
    sa.event.listen(engine, "before_cursor_execute", lambda *args: said.append((args[2], args[3])))
    virtual.listener_update(listener(), data_models.Listener(listener_id=LISTENER, name="other", default_pool_id=POOL))
    assert said
    assert not [one for one, values in said if POOL in str(values) and "parent_id = " in one]


def test_a_new_pool_with_members_of_a_family_without_vips_is_refused(virtual, database):
    protocol = str(tree(database).pools[0].protocol)
    spare = member(1, pool_id=MONITOR, address="2001:db8::1")
    virtual.listener_create(listener(listener_id=OTHER, protocol=protocol, protocol_port=54))
    whole = pool(pool_id=MONITOR, listener_id=OTHER, protocol=protocol, members=[spare])
    refused(lambda: virtual.pool_create(whole), "2001:db8::1", "every VIP is IPv4")
    whole.listener_id = None
    virtual.pool_create(whole)


def test_members_of_both_families_are_accepted_behind_vips_of_both(provider):
    more = {"ip_address": "2001:db8:1::10", "network_id": NETWORK, "port_id": "p", "subnet_id": SUBNET6}
    provider.loadbalancer_create(load_balancer(additional_vips=[more]))
    provider.listener_create(listener(protocol="UDP"))
    provider.pool_create(pool(protocol="UDP"))
    provider.member_batch_update(POOL, [member(2), member(3, address="2001:db8::3")])


def test_an_algorithm_without_effect_under_persistence_is_refused(virtual, database):
    protocol = tree(database).pools[0].protocol
    words = (
        "lb_algorithm 'LEAST_CONNECTIONS'",
        f"for {protocol} with session_persistence the client's address selects",
        "no effect",
    )
    changed = data_models.Pool(pool_id=POOL, lb_algorithm=LEAST, session_persistence=KEPT)
    refused(lambda: virtual.pool_update(pool(), changed), *words)
    other = pool(
        pool_id=MONITOR, listener_id=None, protocol=str(protocol), lb_algorithm=LEAST, session_persistence=KEPT
    )
    refused(lambda: virtual.pool_create(other), *words)
    kept = pool(protocol=str(protocol), lb_algorithm=LEAST, session_persistence=KEPT)
    refused(lambda: virtual.loadbalancer_create(load_balancer(loadbalancer_id=MONITOR, pools=[kept])), *words)
    virtual.pool_update(pool(), data_models.Pool(pool_id=POOL, lb_algorithm=LEAST, session_persistence=None))
    refused(lambda: virtual.pool_update(pool(), data_models.Pool(pool_id=POOL, session_persistence=KEPT)), *words)


def test_haproxy_pools_accept_every_algorithm(served):
    served.pool_update(pool(), data_models.Pool(pool_id=POOL, lb_algorithm=LEAST))


@pytest.mark.parametrize("kind", ["UDP-CONNECT", "SCTP", "TCP", "HTTP", "PING"])
def test_supported_monitors_are_accepted(virtual, database, kind):
    virtual.health_monitor_create(monitor(kind))
    assert tree(database).pools[0].healthmonitor.type == kind


@pytest.mark.parametrize("kind", ["HTTPS", "TLS-HELLO"])
def test_unsupported_monitors_are_refused(virtual, kind):
    refused(
        lambda: virtual.health_monitor_create(monitor(kind)), f"type '{kind}'", "UDP-CONNECT, SCTP, TCP, HTTP, PING"
    )


def test_udp_monitors_require_udp_pools(served, database):
    before = tree(database)
    for kind in ("UDP-CONNECT", "SCTP"):
        refused(
            lambda kind=kind: served.health_monitor_create(monitor(kind)), f"type '{kind}'", "only UDP and SCTP pools"
        )
    assert tree(database) == before


def test_l4_listeners_refuse_l7_policies(virtual, database):
    refused(lambda: virtual.l7policy_create(data_models.L7Policy(**POLICY)), "L7 policy", "does not process HTTP")
    assert tree(database).listeners[0].l7policies == ()


@pytest.mark.parametrize(
    ("kind", "more", "word"),
    [
        (listener, {"default_tls_container_ref": "x"}, "default_tls_container_ref"),
        (listener, {"insert_headers": {"X-Forwarded-For": "true"}}, "insert_headers"),
        (pool, {"tls_enabled": True}, "tls_enabled"),
        (pool, {"session_persistence": {"type": "HTTP_COOKIE"}}, "session_persistence"),
        (pool, {"session_persistence": {"type": "SOURCE_IP", "persistence_granularity": "255.0.255.0"}}, "granularity"),
    ],
)
def test_options_without_effect_are_refused(virtual, database, kind, more, word):
    made = {listener: virtual.listener_create, pool: virtual.pool_create}[kind]
    protocol = str(tree(database).listeners[0].protocol)
    ids = {listener: {"listener_id": MONITOR}, pool: {"pool_id": MONITOR, "listener_id": None}}[kind]
    refused(lambda: made(kind(protocol=protocol, **ids, **more)), word)
