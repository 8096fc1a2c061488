# SPDX-License-Identifier: Apache-2.0
"""The effect of a driver call: recorded desired state, a job, and PENDING objects."""

import inspect
import time

import pytest
import sqlalchemy as sa
from octavia_lib.api.drivers import data_models, exceptions, provider_base
from octavia_objects import LB, LISTENER, MONITOR, NETWORK, POOL, SUBNET, SUBNET6, listener, load_balancer, member, pool

from amphora_driver import driver
from amphora_driver.database import tables
from amphora_driver.driver import AmphoraProviderDriver
from amphora_driver.network.interface import NotYet
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import desired_objects, vip_claims


def tree(database):
    return database.read(lambda connection: desired_objects.load_tree(connection, LB))


def pending(database):
    """Kind and id of all objects that wait for the newest generation."""
    newest = sa.select(tables.job.c.generation).scalar_subquery()
    rows = database.read(
        lambda connection: connection.execute(
            sa.select(tables.object_status.c.kind, tables.object_status.c.object_id).where(
                tables.object_status.c.pending == newest
            )
        ).all()
    )
    return {(row.kind, row.object_id) for row in rows}


def work(database):
    return database.read(lambda connection: connection.execute(sa.select(tables.job)).one())


class Slow(LocalNetwork):
    """A backend that depends on a slow service."""

    def allocate_vip(self, load_balancer_id, project_id, wanted, machines=()):
        return NotYet(reason="the allocator has not answered", again_in=5.0)


def test_the_controller_retries_late_vip_addresses(provider, database, monkeypatch):
    """The call returns before the address is known. The row contains the time of the retry."""
    made = Slow(driver._shared().conf, database)
    monkeypatch.setattr(driver._shared().catalogue, "network", lambda name: made)
    asked = {"vip_subnet_id": SUBNET, "vip_network_id": NETWORK, "vip_address": "198.51.100.88", "vip_qos": "kept"}
    began = time.time()
    for _ in range(2):  # Octavia repeats a request after a lost answer
        first, more = provider.create_vip_port(LB, "demo", asked, [{"subnet_id": SUBNET6}])
        assert first == {**asked, "vip_port_id": None}
        assert more == [{"subnet_id": SUBNET6, "network_id": None, "ip_address": None, "port_id": None}]
    name, wish = database.read(lambda c: (vip_claims.network_of_claim(c, LB), vip_claims.read_pending_request(c, LB)))
    assert name == driver._shared().conf.amp_network.driver
    assert (wish.project_id, wish.reason) == ("demo", "the allocator has not answered")
    assert [(one.subnet_id, one.address) for one in wish.vips] == [(SUBNET, "198.51.100.88"), (SUBNET6, None)]
    assert began + 5.0 <= wish.again_at <= time.time() + 5.0
    assert driver._shared().vip_network(LB)[1] is False, "the allocator has not answered"


def test_the_driver_implements_every_method_with_the_same_arguments():
    for name, method in inspect.getmembers(provider_base.ProviderDriver, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = getattr(AmphoraProviderDriver, name)
        assert ours is not method, name
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(method).parameters), name


def test_step_by_step_equals_one_fully_populated_call(served, database, provider):
    stepwise = tree(database)
    served.loadbalancer_delete(load_balancer())
    database.write(
        lambda connection: [
            connection.execute(t.delete()) for t in (tables.desired_object, tables.job, tables.object_status)
        ]
    )
    provider.loadbalancer_create(
        load_balancer(
            listeners=[listener(default_pool_id=POOL)], pools=[pool(listener_id=data_models.Unset, members=[member(1)])]
        )
    )
    assert tree(database) == stepwise
    assert work(database).read_back


def test_a_pool_for_a_listener_becomes_its_default_pool(served, database):
    assert tree(database).listeners[0].default_pool_id == POOL
    served.pool_delete(pool())
    assert tree(database).listeners[0].default_pool_id is None
    assert tree(database).pools == ()


def test_member_create_waits_with_its_pool_listener_and_load_balancer(served, database):
    served.member_create(member(2))
    assert pending(database) == {
        ("members", member(2).member_id),
        ("pools", POOL),
        ("listeners", LISTENER),
        ("loadbalancers", LB),
    }
    row = work(database)
    assert (row.generation, row.dirty, row.op) == (5, True, "apply")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": 7}, {"weight": 7, "name": "one"}),
        ({"name": None}, {"weight": 1, "name": None}),
        ({"weight": None, "monitor_port": 81}, {"weight": 1, "monitor_port": 81, "name": "one"}),
        ({}, {"weight": 1, "name": "one"}),
    ],
)
def test_update_tells_unset_none_and_value_apart(served, database, change, expected):
    served.member_create(member(2, name="one"))
    served.member_update(member(2), data_models.Member(member_id=member(2).member_id, **change))
    found = next(one for one in tree(database).pools[0].members if one.id == member(2).member_id)
    assert {name: getattr(found, name) for name in expected} == expected


def test_batch_adds_changes_and_removes(served, database):
    served.member_create(member(2))
    served.member_create(member(3))
    kept = data_models.Member(member_id=member(2).member_id, address="192.0.2.2", protocol_port=8080, weight=9)
    served.member_batch_update(POOL, [member(4), kept, member(3)])
    found = {one.address: one.weight for one in tree(database).pools[0].members}
    assert found == {"192.0.2.2": 9, "192.0.2.3": 1, "192.0.2.4": 1}
    assert ("members", member(1).member_id) in pending(database), "a removed member is reported too"


def test_a_thousand_members_in_one_batch(served, database):
    many = [member(number, address=f"10.0.{number // 250}.{number % 250 + 1}") for number in range(1, 1501)]
    served.member_batch_update(POOL, many[:1000])
    assert len(tree(database).pools[0].members) == 1000
    served.member_batch_update(POOL, many[500:])
    assert {one.address for one in tree(database).pools[0].members} == {one.address for one in many[500:]}


def test_a_member_that_octavia_rolled_back_is_replaced_at_its_address(served, database):
    """Octavia rolled the first creation back after the driver's answer. Its own table would refuse a second member."""
    served.member_create(member(1, member_id=MONITOR))
    assert [one.id for one in tree(database).pools[0].members] == [MONITOR]


def test_two_spellings_of_an_address_are_one_member(served, database):
    """Octavia compares text. A server must not get twice its share because of another spelling."""
    first, second = (LISTENER.replace("1", digit, 1) for digit in "45")
    served.member_create(member(2, member_id=first, address="2001:db8::2"))
    with pytest.raises(exceptions.UnsupportedOptionError, match="a pool can contain a server only once"):
        served.member_create(member(3, member_id=second, address="2001:0DB8:0::2"))
    served.member_create(member(3, member_id=second, address="2001:0DB8:0::2", protocol_port=81))
    assert len(tree(database).pools[0].members) == 3


def test_the_same_address_with_another_port_is_another_member(served, database):
    served.member_create(member(1, member_id=MONITOR, protocol_port=80))
    served.member_create(member(1, member_id=LISTENER.replace("1", "2", 1), protocol_port=808))
    assert sorted(one.protocol_port for one in tree(database).pools[0].members) == [80, 808, 8080]
    served.member_delete(member(1, member_id=MONITOR, protocol_port=80))
    served.member_create(member(1, member_id=LISTENER.replace("1", "3", 1), protocol_port=80))


def test_delete_takes_everything_below(served, database):
    monitor = data_models.HealthMonitor(
        healthmonitor_id=MONITOR,
        pool_id=POOL,
        type="HTTP",
        delay=5,
        timeout=3,
        max_retries=2,
        max_retries_down=3,
        admin_state_up=True,
        project_id="demo",
    )
    served.health_monitor_create(monitor)
    assert tree(database).pools[0].healthmonitor.id == MONITOR
    served.pool_delete(pool())
    assert {kind for kind, _ in pending(database)} == {
        "pools",
        "members",
        "healthmonitors",
        "listeners",
        "loadbalancers",
    }


def test_deleting_the_load_balancer_makes_every_child_wait(served, database):
    served.loadbalancer_delete(load_balancer(), cascade=True)
    assert {kind for kind, _ in pending(database)} == {"members", "pools", "listeners", "loadbalancers"}
    assert work(database).op == "delete"
    with pytest.raises(exceptions.NotFound):
        served.member_create(member(2))


V6 = member(2, address="2001:db8::1")
OTHER_V6 = member(3, address="2001:DB8::0:1")


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda one: one.listener_create(listener(protocol="TERMINATED_HTTPS")), "default_tls_container_ref"),
        (lambda one: one.listener_create(listener(connection_limit="many")), "connection_limit"),
        (lambda one: one.listener_create(listener(insert_headers=["X-Forwarded-For"])), "read an object from Octavia"),
        (lambda one: one.listener_update(listener(), listener(allowed_cidrs=["192.0.2.0/99"])), "allowed_cidrs"),
        (
            lambda one: one.member_batch_update(POOL, [member(1), member(1, member_id=MONITOR)]),
            "192.0.2.1 and port 8080",
        ),
        (lambda one: one.pool_create(pool(pool_id=MONITOR, members=[V6, OTHER_V6])), "2001:DB8::0:1 and port 8080"),
        (lambda one: one.validate_flavor({"colour": "blue"}), "colour"),
        (lambda one: one.validate_availability_zone({"colour": "blue"}), "colour"),
    ],
)
def test_an_unsupported_option_is_refused_by_name_and_not_recorded(served, database, call, word):
    before, generation = tree(database), work(database).generation
    with pytest.raises(exceptions.UnsupportedOptionError) as refusal:
        call(served)
    assert word in refusal.value.user_fault_string
    assert tree(database) == before
    assert work(database).generation == generation


def test_the_vip_is_allocated_once_and_released_after_a_refusal(provider, database):
    wish = {"vip_subnet_id": SUBNET, "vip_network_id": NETWORK, "vip_address": "198.51.100.77"}
    vip, others = provider.create_vip_port(LB, "demo", wish, [{"subnet_id": SUBNET6}])
    assert vip["vip_address"] == "198.51.100.77"
    assert others[0]["ip_address"].startswith("2001:db8:1::")
    assert provider.create_vip_port(LB, "demo", wish, [{"subnet_id": SUBNET6}]) == (vip, others)
    with pytest.raises(exceptions.Conflict):
        provider.create_vip_port("10000000-0000-4000-8000-0000000000aa", "demo", wish, [])
    with pytest.raises(exceptions.UnsupportedOptionError):
        provider.loadbalancer_create(load_balancer(flavor={"colour": "blue"}))
    assert provider.create_vip_port("10000000-0000-4000-8000-0000000000aa", "demo", wish, [])[0]["vip_address"]
    with pytest.raises(exceptions.UnsupportedOptionError) as refusal:
        provider.create_vip_port(
            "10000000-0000-4000-8000-0000000000ab", "demo", {**wish, "vip_address": "203.0.113.9"}, []
        )
    assert "203.0.113.9" in refusal.value.user_fault_string


@pytest.mark.quiet
def test_the_cost_of_a_call_does_not_depend_on_the_size(served, database):
    def statements(call):
        seen = []
        engine = driver._shared().database.engine
        listen = lambda *args: seen.append(args[2])  # noqa: E731
        sa.event.listen(engine, "before_cursor_execute", listen)
        try:
            call()
        finally:
            sa.event.remove(engine, "before_cursor_execute", listen)
        return len(seen)

    small = statements(lambda: served.member_create(member(2)))
    served.member_batch_update(POOL, [member(number) for number in range(1, 251)])
    start = time.process_time()
    large = statements(lambda: served.member_create(member(251)))
    spent = time.process_time() - start
    assert small == large <= 15
    assert spent < 0.1, "a generous limit: the benchmark has the figure"
