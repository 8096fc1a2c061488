# SPDX-License-Identifier: Apache-2.0
"""A load balancer from its creation to its deletion, through Octavia's API."""

from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa

from amphora_driver.database import tables
from sandbox import topology

pytestmark = pytest.mark.root

KINDS = ("load_balancer", "listener", "pool", "member", "health_monitor", "l7policy", "l7rule")


def statuses(cloud, balancer):
    """Return (provisioning, operating) status by object name."""
    tree = cloud.balancers.get(cloud.url(f"loadbalancers/{balancer.id}/status")).json()["statuses"]["loadbalancer"]
    found = {}

    def walk(node):
        if isinstance(node, dict):
            if "provisioning_status" in node:
                found[node.get("name") or node["id"]] = (node["provisioning_status"], node.get("operating_status"))
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(tree)
    return found


def test_a_load_balancer_is_created_step_by_step(cloud):
    balancer = cloud.load_balancer("steps")
    listener = cloud.balancers.create_listener(
        name="steps-http", protocol="HTTP", protocol_port=80, load_balancer_id=balancer.id
    )
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"503": 2}, "a listener without a pool answers 503"
    pool = cloud.balancers.create_pool(
        name="steps-pool", protocol="HTTP", lb_algorithm="ROUND_ROBIN", listener_id=listener.id
    )
    cloud.active(balancer.id)
    for name in ("member1", "member2", "member3"):
        cloud.balancers.create_member(pool, **cloud.member(name))
        cloud.active(balancer.id)
    cloud.balancers.create_health_monitor(
        name="steps-check", type="HTTP", delay=1, timeout=1, max_retries=1, max_retries_down=5, pool_id=pool.id
    )
    cloud.active(balancer.id)
    cloud.online(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1, "member3": 1})
    cloud.until(
        lambda: set(statuses(cloud, balancer).values()) == {("ACTIVE", "ONLINE")}, "every object is ACTIVE and ONLINE"
    )
    assert set(statuses(cloud, balancer)) >= {"steps", "steps-http", "steps-pool", "member1", "member2", "member3"}


def test_a_fully_populated_load_balancer_is_created_in_one_call(cloud):
    monitor = {"type": "TCP", "delay": 1, "timeout": 1, "max_retries": 1}
    balancer = cloud.served("whole", ("member1", "member2", "member3"), monitor=monitor)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1, "member3": 1})
    cloud.online(balancer.id)
    cloud.until(lambda: set(statuses(cloud, balancer).values()) == {("ACTIVE", "ONLINE")}, "every object is ONLINE")


@contextmanager
def history(cloud):
    """Yield a function that returns the status updates in Octavia's database, by object name or id."""
    engine = sa.create_engine(cloud.settings.octavia_database_url)

    def write(*texts):
        with engine.begin() as connection:
            for text in texts:
                connection.exec_driver_sql(text)

    def read():
        with engine.begin() as connection:
            found = {}
            for row in connection.exec_driver_sql("SELECT * FROM told ORDER BY rowid"):
                found.setdefault(row[0], []).append(tuple(row[1:]))
            return found

    with closing(engine.raw_connection()) as raw:
        names = {kind: [row[1] for row in raw.execute(f"PRAGMA table_info({kind})")] for kind in KINDS}
    write("CREATE TABLE told (object, provisioning, operating, moment)")
    write(
        *(
            f"CREATE TRIGGER told_{kind} AFTER UPDATE ON {kind} BEGIN INSERT INTO told VALUES"
            f" ({'coalesce(new.name, new.id)' if 'name' in names[kind] else 'new.id'},"
            " new.provisioning_status, new.operating_status, new.updated_at); END"
            for kind in KINDS
        )
    )
    try:
        yield read
    finally:
        write(*(f"DROP TRIGGER told_{kind}" for kind in KINDS), "DROP TABLE told")
        engine.dispose()


def heard_for(cloud, seconds):
    """Wait until heartbeats have arrived for this time."""
    newest, begun = sa.select(sa.func.max(tables.amphora_heartbeat.c.seen_at)), cloud.database.now()
    cloud.until(
        lambda: cloud.database.read(lambda c: c.execute(newest).scalar() or 0) > begun + seconds, "heartbeats arrive"
    )


def test_the_first_active_is_final(cloud):
    """No later report changes an operating status that no amphora measures, or the time of its object."""
    plain = {"name": "plain", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN"}
    members = [cloud.member("member1"), cloud.member("member2", admin_state_up=False)]
    checked = {**plain, "name": "checked", "healthmonitor": {"name": "check", "type": "TCP"}}
    checked["healthmonitor"] |= {"delay": 1, "timeout": 1, "max_retries": 1}
    rule = {"type": "PATH", "compare_type": "EQUAL_TO", "value": "/x"}
    policy = {"name": "policy", "action": "REJECT", "rules": [rule]}
    with history(cloud) as told:
        balancer = cloud.load_balancer(
            "first",
            listeners=[
                {
                    "name": "one",
                    "protocol": "HTTP",
                    "protocol_port": 80,
                    "default_pool": {**plain, "members": members},
                    "l7policies": [policy],
                },
                {
                    "name": "two",
                    "protocol": "HTTP",
                    "protocol_port": 81,
                    "default_pool": {**checked, "members": [cloud.member("member3")]},
                },
                {"name": "off", "protocol": "HTTP", "protocol_port": 82, "admin_state_up": False},
            ],
        )
        heard_for(cloud, 1.0)
        later = cloud.balancers.create_l7_policy(
            name="later", listener_id=cloud.balancers.find_listener("one").id, action="REJECT"
        )
        cloud.active(balancer.id)
        added = cloud.balancers.create_l7_rule(later, **rule)
        cloud.active(balancer.id)
        heard_for(cloud, 1.0)
        found = told()
    online = {"first", "one", "two", "plain", "checked", "check", "policy", "later", added.id}
    expected = {**dict.fromkeys(online, "ONLINE"), "member1": "NO_MONITOR", "member2": "OFFLINE", "off": "OFFLINE"}
    assert expected.keys() - found.keys() == set()
    for name, operating in expected.items():
        served = [one for one in found[name] if one[0] == "ACTIVE"]
        assert {one[1] for one in served} == {operating}, (name, found[name])
    # Objects that later requests do not concern get no further report.
    for name in expected.keys() - {"first", "one", "later"}:
        assert len([one for one in found[name] if one[0] == "ACTIVE"]) == 1, (name, found[name])


@pytest.mark.parametrize(
    "algorithm",
    ["ROUND_ROBIN", *(pytest.param(one, marks=pytest.mark.extended) for one in ("LEAST_CONNECTIONS", "SOURCE_IP"))],
)
def test_algorithms(cloud, algorithm):
    balancer = cloud.served(f"algorithm-{algorithm.lower()}")
    cloud.balancers.update_pool(cloud.pool_of(balancer), lb_algorithm=algorithm)
    cloud.active(balancer.id)
    found = cloud.answers(balancer.vip_address, 10)
    assert sum(found.values()) == 10
    assert set(found) <= {"member1", "member2"}
    assert len(found) == (1 if algorithm == "SOURCE_IP" else 2), found


def test_admin_state(cloud):
    balancer = cloud.served("admin")
    listener = cloud.listener_of(balancer)
    cloud.balancers.update_listener(listener, is_admin_state_up=False)
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"ConnectionRefusedError": 2}
    cloud.operating(lambda: cloud.balancers.get_listener(listener.id), "OFFLINE")
    cloud.balancers.update_listener(listener, is_admin_state_up=True)
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 1, "member2": 1}


def test_a_tcp_listener(cloud):
    balancer = cloud.load_balancer("tcp")
    listener = cloud.balancers.create_listener(protocol="TCP", protocol_port=8000, load_balancer_id=balancer.id)
    cloud.active(balancer.id)
    pool = cloud.balancers.create_pool(protocol="TCP", lb_algorithm="ROUND_ROBIN", listener_id=listener.id)
    cloud.active(balancer.id)
    cloud.balancers.create_member(pool, **cloud.member("member3"))
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 3, port=8000) == {"member3": 3}


@pytest.mark.parametrize(
    ("vip", "more"),
    [
        (topology.VIP_SUBNET_6, []),
        (topology.VIP_SUBNET, [{"subnet_id": topology.VIP_SUBNET_6}]),
    ],
    ids=["v6", "dual"],
)
def test_address_families(cloud, vip, more):
    balancer = cloud.served(f"family-{len(more)}", vip_subnet_id=vip, additional_vips=more)
    addresses = [balancer.vip_address, *(one["ip_address"] for one in balancer.additional_vips or ())]
    assert len(addresses) == 1 + len(more)
    for address in addresses:
        assert cloud.answers(address, 4) == {"member1": 2, "member2": 2}, address


def test_members_by_ipv6_and_through_the_gateway(cloud):
    balancer = cloud.served("v6-members", ())
    pool = cloud.pool_of(balancer)
    cloud.balancers.create_member(
        pool, address="2001:db8:2::11", protocol_port=8080, subnet_id=topology.MEMBER_SUBNET_6
    )
    cloud.active(balancer.id)
    cloud.balancers.create_member(pool, address="192.0.2.12", protocol_port=8080)
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 4) == {"member1": 2, "member2": 2}


def test_two_load_balancers_are_independent(cloud):
    made = [cloud.balancers.create_load_balancer(name=f"twin-{n}", vip_subnet_id=topology.VIP_SUBNET) for n in (1, 2)]
    one, two = (cloud.active(balancer.id) for balancer in made)
    assert one.vip_address != two.vip_address
    for balancer, member in ((one, "member1"), (two, "member2")):
        listener = cloud.balancers.create_listener(protocol="HTTP", protocol_port=80, load_balancer_id=balancer.id)
        cloud.active(balancer.id)
        pool = cloud.balancers.create_pool(protocol="HTTP", lb_algorithm="ROUND_ROBIN", listener_id=listener.id)
        cloud.active(balancer.id)
        cloud.balancers.create_member(pool, **cloud.member(member))
        cloud.active(balancer.id)
    assert cloud.answers(one.vip_address, 3) == {"member1": 3}
    assert cloud.answers(two.vip_address, 3) == {"member2": 3}
    cloud.balancers.delete_load_balancer(one.id, cascade=True)
    cloud.gone(one.id)
    assert cloud.answers(two.vip_address, 3) == {"member2": 3}, "the other load balancer serves"


def test_fail_over_on_request(cloud):
    balancer = cloud.served("failover")
    before = cloud.amphorae(balancer)
    cloud.balancers.failover_load_balancer(balancer.id)
    cloud.until(lambda: len(now := cloud.amphorae(balancer)) == 1 and now.isdisjoint(before), "the amphora is replaced")
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 4) == {"member1": 2, "member2": 2}
