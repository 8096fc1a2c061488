# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP through Octavia's API: datagrams of clients, failed members, statistics, fail-over."""

import contextlib
import json
import uuid

import datagram_members as datagrams
import openstack
import pytest
from cloud import Cloud
from datagram_members import answering, answers
from test_canaries import diagnosed

from amphora_driver import config
from amphora_driver.host import namespaces
from amphora_driver.network.local import LocalNetwork
from amphora_driver.network.port_security_rules import Rule, SecurityGroup
from amphora_driver.store import amphorae
from sandbox import topology

pytestmark = pytest.mark.root

# Octavia's API requires an interval of at least three seconds for UDP checks.
CONNECT = {"type": "UDP-CONNECT", "delay": 3, "timeout": 1, "max_retries": 1, "max_retries_down": 1}


@pytest.fixture
def members(settings):
    """UDP members; yields a function that stops a member's answers for the length of a with block."""
    with contextlib.ExitStack() as closing:
        running = {}

        def start(name):
            running[name] = closing.enter_context(contextlib.ExitStack())
            running[name].enter_context(answering(settings, name))

        @contextlib.contextmanager
        def dead(name):
            running[name].close()
            try:
                yield
            finally:
                start(name)

        for name in topology.MEMBERS:
            start(name)
        yield dead


def udp_member(cloud, name, **more):
    return cloud.member(name, protocol_port=datagrams.PORT, **more)


def served(cloud, name, members=("member1", "member2"), *, pool=None, listener=None, **more):
    """Create a load balancer with a UDP listener and pool in one request; wait for ACTIVE."""
    back = {
        "name": f"{name}-pool",
        "protocol": "UDP",
        "lb_algorithm": "ROUND_ROBIN",
        "members": [udp_member(cloud, one) for one in members],
        **(pool or {}),
    }
    front = {"name": f"{name}-udp", "protocol": "UDP", "protocol_port": 53, "default_pool": back, **(listener or {})}
    return cloud.load_balancer(name, listeners=[front], **more)


def shared(cloud, settings, balancer, *names):
    """Wait until exactly these members answer, each more than once, and no answer is lost."""

    def ask():
        found = answers(settings, balancer.vip_address, 8 * len(names))
        return set(found) == set(names) and min(found.values()) > 1

    cloud.until(ask, f"{names} answer", 30)


def status(cloud, pool, name):
    return next(one for one in cloud.balancers.members(pool) if one.name == name)


@pytest.mark.feature(
    "listener.protocol.UDP",
    "listener.protocol_port",
    "listener.stats",
    "pool.protocol.UDP",
    "pool.lb_algorithm.ROUND_ROBIN",
    "member.weight",
    "member.admin_state_up",
)
def test_members_are_added_changed_and_removed(cloud, settings, members):
    balancer = served(cloud, "udp", ("member1",))
    cloud.online(balancer.id)
    pool = cloud.pool_of(balancer)
    shared(cloud, settings, balancer, "member1")
    member = cloud.balancers.create_member(pool, **udp_member(cloud, "member2"))
    cloud.active(balancer.id)
    shared(cloud, settings, balancer, "member1", "member2")
    cloud.operating(lambda: cloud.balancers.get_member(member.id, pool), "NO_MONITOR")
    cloud.balancers.update_member(member, pool, weight=3)
    cloud.active(balancer.id)
    found = answers(settings, balancer.vip_address, 80)
    assert set(found) == {"member1", "member2"}
    assert found["member2"] > 1.5 * found["member1"]
    cloud.balancers.update_member(member, pool, weight=0)
    cloud.active(balancer.id)
    assert answers(settings, balancer.vip_address, 10) == {"member1": 10}
    cloud.operating(lambda: cloud.balancers.get_member(member.id, pool), "DRAINING")
    cloud.balancers.update_member(member, pool, weight=1, is_admin_state_up=False)
    cloud.active(balancer.id)
    assert answers(settings, balancer.vip_address, 10) == {"member1": 10}
    cloud.operating(lambda: cloud.balancers.get_member(member.id, pool), "OFFLINE")
    cloud.balancers.delete_member(member, pool)
    cloud.active(balancer.id)
    assert answers(settings, balancer.vip_address, 10) == {"member1": 10}

    def counted():
        return cloud.balancers.get_listener_statistics(cloud.listener_of(balancer).id)

    found = cloud.until(lambda: (one := counted()).total_connections >= 110 and one, "110 flows are counted")
    assert found.bytes_in > 0
    assert found.bytes_out > found.bytes_in, "answers are longer than requests"
    cloud.balancers.update_listener(cloud.listener_of(balancer), is_admin_state_up=False)
    cloud.active(balancer.id)
    assert set(answers(settings, balancer.vip_address, 3)) <= {"refused", "nothing"}


@pytest.mark.feature("healthmonitor.type.UDP-CONNECT")
def test_a_failed_udp_member_recovers(cloud, settings, members):
    balancer = served(cloud, "udp-death", pool={"healthmonitor": CONNECT})
    pool = cloud.pool_of(balancer)

    def fetch():
        return status(cloud, pool, "member2")

    cloud.operating(fetch, "ONLINE")
    shared(cloud, settings, balancer, "member1", "member2")
    with members("member2"):
        cloud.operating(fetch, "ERROR")
        assert answers(settings, balancer.vip_address, 12) == {"member1": 12}
        cloud.operating(lambda: cloud.balancers.get_pool(pool.id), "DEGRADED")
        with members("member1"):
            cloud.operating(lambda: cloud.balancers.get_pool(pool.id), "ERROR")
            assert answers(settings, balancer.vip_address, 2) == {"refused": 2}
    cloud.operating(fetch, "ONLINE")
    cloud.online(balancer.id)
    shared(cloud, settings, balancer, "member1", "member2")


@pytest.mark.feature("member.backup")
def test_a_backup_and_a_check_elsewhere(cloud, settings, members, member_process):
    """HTTP checks on the members' web servers; the backup member serves only when the first one is down."""
    near = {"monitor_address": "192.0.2.11", "monitor_port": 8080}
    far = {"monitor_address": "192.0.2.12", "monitor_port": 8080}
    both = [udp_member(cloud, "member1", **near), udp_member(cloud, "member2", backup=True, **far)]
    web = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1, "http_method": "HEAD"}
    balancer = served(cloud, "udp-backup", pool={"members": both, "healthmonitor": web})
    cloud.operating(lambda: status(cloud, cloud.pool_of(balancer), "member1"), "ONLINE")
    shared(cloud, settings, balancer, "member1")
    with member_process("member1"):
        cloud.operating(lambda: status(cloud, cloud.pool_of(balancer), "member1"), "ERROR")
        assert answers(settings, balancer.vip_address, 6) == {"member2": 6}
    shared(cloud, settings, balancer, "member1")


# With nftables no persistence entry is stored, so none expires.
@pytest.mark.feature_partly("pool.session_persistence.persistence_timeout")
@pytest.mark.feature("pool.session_persistence.SOURCE_IP", "pool.session_persistence.persistence_granularity")
@pytest.mark.parametrize("kind", [pytest.param("SINGLE", marks=pytest.mark.extended), "ACTIVE_STANDBY"])
def test_a_fail_over_keeps_clients_with_their_members(cloud, settings, members, flavor, kind):
    kept = {"type": "SOURCE_IP", "persistence_timeout": 600, "persistence_granularity": "255.255.255.0"}
    three = [udp_member(cloud, one) for one in topology.MEMBERS]
    chosen = flavor(f"udp-{kind}", {"loadbalancer_topology": kind})
    balancer = served(cloud, f"udp-{kind}", pool={"members": three, "session_persistence": kept}, flavor_id=chosen.id)
    before = answers(settings, balancer.vip_address, 10)
    assert len(before) == 1
    assert set(before) <= set(topology.MEMBERS)
    old = cloud.amphorae(balancer)
    assert len(old) == {"SINGLE": 1, "ACTIVE_STANDBY": 2}[kind]
    cloud.balancers.failover_load_balancer(balancer.id)
    cloud.active(balancer.id)
    cloud.until(lambda: not old & cloud.amphorae(balancer), "the amphorae are replaced")
    cloud.until(lambda: answers(settings, balancer.vip_address, 2).keys() == before.keys(), "the same member answers")
    assert answers(settings, balancer.vip_address, 10) == before
    cloud.online(balancer.id)


def test_udp_and_tcp_share_a_port_in_both_families(cloud, settings, members):
    """An answer to each of four request types at port 80, and no access for other clients."""
    six = {"address": f"2001:db8:2::{topology.MEMBERS['member2']}", "subnet_id": topology.MEMBER_SUBNET_6}
    both = [udp_member(cloud, "member1"), {**udp_member(cloud, "member2"), **six}]
    balancer = served(
        cloud,
        "udp-both",
        pool={"members": both},
        listener={"protocol_port": 80, "allowed_cidrs": ["198.51.100.2/32", "2001:db8:1::2/128"]},
        additional_vips=[{"subnet_id": topology.VIP_SUBNET_6}],
    )
    web = cloud.balancers.create_pool(
        name="web", protocol="HTTP", lb_algorithm="ROUND_ROBIN", loadbalancer_id=balancer.id
    )
    cloud.active(balancer.id)
    cloud.balancers.create_member(web, **cloud.member("member3"))
    cloud.active(balancer.id)
    cloud.balancers.create_listener(
        name="web", protocol="HTTP", protocol_port=80, load_balancer_id=balancer.id, default_pool_id=web.id
    )
    cloud.active(balancer.id)
    vip6 = balancer.additional_vips[0]["ip_address"]
    assert cloud.answers(balancer.vip_address, 3) == {"member3": 3}
    assert answers(settings, balancer.vip_address, 5, 80) == {"member1": 5}
    assert answers(settings, vip6, 5, 80) == {"member2": 5}
    udp = next(one for one in cloud.balancers.listeners(load_balancer_id=balancer.id) if one.protocol == "UDP")
    cloud.balancers.update_listener(udp, allowed_cidrs=["198.51.100.77/32"])
    cloud.active(balancer.id)
    assert set(answers(settings, balancer.vip_address, 2, 80)) <= {"refused", "nothing"}
    assert cloud.answers(balancer.vip_address, 3) == {"member3": 3}


def test_an_unsupported_algorithm_is_refused_in_one_request(cloud):
    kept = {"lb_algorithm": "LEAST_CONNECTIONS", "session_persistence": {"type": "SOURCE_IP"}}
    with pytest.raises(
        openstack.exceptions.HttpException,
        match="session_persistence the client's address selects",
    ):
        served(cloud, "udp-least", pool=kept)
    assert not list(cloud.balancers.load_balancers())


@pytest.mark.extended
def test_least_loaded_member_gets_the_next_flow(cloud, settings, members):
    balancer = served(cloud, "udp-fewest", ("member1", "member2"), pool={"lb_algorithm": "LEAST_CONNECTIONS"})
    assert answers(settings, balancer.vip_address, 10) == {"member1": 5, "member2": 5}


@pytest.mark.extended
def test_source_address_for_members(cloud, settings, members):
    balancer = served(cloud, "udp-hidden", ("member1",))
    (answer,) = datagrams.said(settings, balancer.vip_address)
    assert answer.startswith("member1 192.0.2."), "the source address is the amphora's"


@pytest.mark.extended
def test_members_see_client_addresses_on_request(cloud, settings, members, flavor):
    chosen = flavor("seen", {"client_address": "preserved"})
    balancer = served(cloud, "udp-seen", ("member1",), flavor_id=chosen.id)
    (one,) = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
    port = next(each.port for each in one.plugged if each.port.network_id == topology.MEMBER_NETWORK)
    with way_back(settings, "member1", port.addresses[0].address):
        cloud.until(
            lambda: datagrams.said(settings, balancer.vip_address) == ["member1 198.51.100.2"],
            "the member sees the client",
        )


@pytest.mark.extended
def test_flows_are_logged_beside_connections(cloud, settings, members, flavor):
    chosen = flavor("logged", {"connection_logging": True})
    balancer = served(cloud, "udp-logged", ("member1", "member2"), flavor_id=chosen.id)
    assert answers(settings, balancer.vip_address, 4) == {"member1": 2, "member2": 2}
    pool = cloud.balancers.find_pool("udp-logged-pool")
    gone = next(one for one in cloud.balancers.members(pool) if one.name == "member2")
    cloud.balancers.delete_member(gone.id, pool)
    cloud.active(balancer.id)
    (amphora,) = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
    listener = cloud.listener_of(balancer)

    def lines():
        said = json.loads(diagnosed(cloud, amphora.id))["checker log"]
        return [one.split() for one in said if one.startswith(f"{balancer.project_id} {balancer.id} {listener.id} ")]

    cloud.until(lambda: len(lines()) == 2, "the deleted member's flows are logged")
    for found in lines():
        assert found[3] == "198.51.100.2"
        assert found[6:8] + found[10:12] == ["-"] * 4
        assert found[12:14] == [f"{pool.id}:{listener.id}", gone.id]
        assert found[15:] == ["D-", "UDP", "1", "1"]
        assert min(int(found[8]), int(found[9])) > 20, "both byte counts include the packet headers"


@contextlib.contextmanager
def way_back(settings, member, gateway):
    """Route a member's answers through the amphora."""
    place, route = namespaces.path(settings.host(member)), {"dst": "198.51.100.2/32", "gateway": gateway}
    namespaces.run_with_netlink(place, lambda kernel: kernel.route("add", **route))
    try:
        yield
    finally:
        namespaces.run_with_netlink(place, lambda kernel: kernel.route("del", **route))


def test_security_groups_permit_udp(cloud, settings, members, database):
    network = LocalNetwork(config.load([str(settings.driver_configuration)]), database)
    balancer = served(cloud, "udp-group", ("member1",))
    assert answers(settings, balancer.vip_address, 2) == {"member1": 2}
    group_id = str(uuid.uuid4())

    def let_in(port):
        rule = Rule(protocol="udp", first_port=port, last_port=port)
        network.port_security.define_group(SecurityGroup(id=group_id, name="of-a-udp-test", rules=(rule,)))

    let_in(54)
    cloud.put(f"loadbalancers/{balancer.id}", {"loadbalancer": {"vip_sg_ids": [group_id]}})
    cloud.active(balancer.id)
    cloud.until(lambda: answers(settings, balancer.vip_address, 1) == {"nothing": 1}, "no client has access")
    let_in(53)
    assert answers(settings, balancer.vip_address, 2) == {"member1": 2}


# tests/dataplane/test_udp_sctp.py begins associations over a VIP; this kernel has no SCTP sockets for complete ones.
@pytest.mark.feature_partly("listener.protocol.SCTP", "pool.protocol.SCTP")
@pytest.mark.feature("healthmonitor.type.SCTP")
def test_sctp_is_accepted(cloud):
    pool = {
        "name": "sctp-pool",
        "protocol": "SCTP",
        "lb_algorithm": "SOURCE_IP",
        "members": [cloud.member("member1", protocol_port=3868)],
        "healthmonitor": {"type": "SCTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1},
    }
    front = {"name": "sctp", "protocol": "SCTP", "protocol_port": 3868, "default_pool": pool}
    balancer = cloud.load_balancer("sctp", listeners=[front])
    found = cloud.pool_of(balancer)
    cloud.operating(lambda: status(cloud, found, "member1"), "ERROR")
    assert cloud.listener_of(balancer).provisioning_status == "ACTIVE"


@pytest.mark.parametrize(
    ("path", "word", "body", "status_code", "sentence"),
    [
        ("pools/{pool}/members", "member", {"address": "2001:db8:2::11", "protocol_port": 1}, 501, "every VIP is IPv4"),
        ("healthmonitors", "healthmonitor", {"type": "TLS-HELLO"}, 400, "UDP-CONNECT/SCTP/TCP/HTTP health monitor"),
        ("healthmonitors", "healthmonitor", {"type": "UDP-CONNECT"}, 400, "delay value 1 should be larger than 3"),
        ("l7policies", "l7policy", {"action": "REJECT"}, 501, "does not process HTTP"),
        ("listeners", "listener", {"protocol": "UDP", "protocol_port": 53}, 409, "protocol_port 53"),
    ],
)
def test_options_that_depend_on_the_protocol(refusing, path, word, body, status_code, sentence):
    cloud, listener, pool = refusing
    times = {"delay": 1, "timeout": 1, "max_retries": 1, "pool_id": pool.id} if word == "healthmonitor" else {}
    place = {
        "l7policy": {"listener_id": listener.id},
        "listener": {"loadbalancer_id": listener.load_balancers[0]["id"]},
    }
    values = {**times, **place.get(word, {}), **body}
    answer = cloud.balancers.post(cloud.url(path.format(pool=pool.id)), json={word: values})
    assert (answer.status_code, sentence in json.dumps(answer.json())) == (status_code, True), answer.text


@pytest.fixture(scope="module")
def refusing(settings, connection, database):
    """An unchanged load balancer with a UDP listener and pool."""
    cloud = Cloud(settings, connection, database)
    balancer = served(cloud, "udp-refusing", ("member1",))
    yield cloud, cloud.listener_of(balancer), cloud.pool_of(balancer)
    cloud.clean()
