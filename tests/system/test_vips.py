# SPDX-License-Identifier: Apache-2.0
"""VIPs through Octavia's API: addresses, security groups and QoS, and a disabled load balancer."""

import contextlib
import socket
import threading
import time
import uuid

import pytest
import sqlalchemy as sa
from cloud import Cloud

from amphora_driver import config
from amphora_driver.database import tables
from amphora_driver.host import namespaces
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.network.port_security_rules import QosPolicy, Rule, SecurityGroup
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = pytest.mark.root

NOT_SERVED, TAKEN, INVALID = 501, 409, 400
STREAM_PORT = 9000
TINY = topology.derive_id("zz-tiny")
SHUT_OUT = "TimeoutError"
# Bytes: more than a limited client can get in three seconds.
_PLENTY = 30_000_000


@pytest.fixture(scope="module")
def network(settings, database):
    return LocalNetwork(config.load([str(settings.driver_configuration)]), database)


@pytest.fixture
def tiny(network, database):
    """An additional subnet with two free addresses: for a VIP, and its amphora."""
    network.define_subnet(
        AddressRange(
            id=TINY,
            network_id=topology.VIP_NETWORK,
            # The last one by name, so that a VIP without a subnet is on another subnet.
            name="zz-tiny",
            cidr="198.51.101.0/29",
            gateway=None,
            first="198.51.101.2",
            last="198.51.101.3",
        )
    )
    yield TINY
    database.write(lambda c: c.execute(tables.local_subnet.delete().where(tables.local_subnet.c.id == TINY)))


def group(network, *ports):
    made = SecurityGroup(
        id=str(uuid.uuid4()),
        name="of-a-test",
        rules=tuple(Rule(protocol="tcp", first_port=port, last_port=port) for port in ports),
    )
    network.port_security.define_group(made)
    return made.id


def ports(cloud):
    """Return every port with its owner."""
    row = tables.local_port.c
    return cloud.database.read(lambda c: dict(c.execute(sa.select(row.id, row.owner)).tuples().all()))


def refused(cloud, asked, status, sentence):
    before = ports(cloud)
    body = {"loadbalancer": {"name": "refused", "vip_subnet_id": topology.VIP_SUBNET, **asked}}
    answer = cloud.balancers.post(cloud.url("loadbalancers"), json=body)
    assert (answer.status_code, sentence in answer.json()["faultstring"]) == (status, True), answer.text
    assert ports(cloud) == before


SIX = topology.VIP_SUBNET_6


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        ({"vip_address": "198.51.100.2"}, TAKEN, "198.51.100.2 of subnet vip-subnet (198.51.100.0/24) is in use"),
        ({"vip_address": "198.51.100.1"}, TAKEN, "198.51.100.1 is the gateway of"),
        ({"vip_address": "198.51.100.255"}, NOT_SERVED, "is the network's own address"),
        ({"vip_address": "192.0.2.200"}, NOT_SERVED, "192.0.2.200 lies outside of subnet vip-subnet"),
        ({"vip_address": "2001:db8:1::77"}, NOT_SERVED, "2001:db8:1::77 lies outside of subnet vip-subnet"),
        ({"vip_subnet_id": SIX, "vip_address": "2001:DB8:1:0::2"}, TAKEN, "2001:db8:1::2 of subnet vip-subnet-v6"),
        (
            {"additional_vips": [{"subnet_id": SIX, "ip_address": "2001:db8:1::2"}]},
            TAKEN,
            "2001:db8:1::2 of subnet vip-subnet-v6 (2001:db8:1::/64) is in use",
        ),
        ({"additional_vips": [{"subnet_id": topology.MEMBER_SUBNET}]}, INVALID, "must belong to the same network"),
        ({"additional_vips": [{"subnet_id": topology.VIP_SUBNET}]}, INVALID, "Duplicate VIP subnet"),
        ({"vip_subnet_id": topology.derive_id("management-subnet")}, NOT_SERVED, "management network is for"),
        ({"vip_qos_policy_id": topology.VIP_SUBNET}, INVALID, "qos_policy"),
        ({"vip_sg_ids": [topology.VIP_SUBNET]}, INVALID, "Security Group"),
    ],
)
def test_an_unavailable_vip_is_refused_and_leaves_nothing(cloud, asked, status, sentence):
    refused(cloud, asked, status, sentence)


def test_ports_of_others_and_subnets_without_addresses(cloud, network, tiny):
    """A port in use is not a VIP; an exhausted subnet is a conflict, until its address comes back."""
    theirs = network.ports(topology.CLIENT)[0]
    asked = {"vip_subnet_id": topology.VIP_SUBNET, "vip_port_id": theirs.id}
    refused(cloud, asked, INVALID, f"Port {theirs.id} is already used by device client")

    fixed = [{"subnet_id": tiny}]
    taken = [cloud.connection.network.create_port(network_id=topology.VIP_NETWORK, fixed_ips=fixed) for _ in range(2)]
    refused(cloud, {"vip_subnet_id": tiny}, TAKEN, "every address of subnet zz-tiny (198.51.101.0/29)")
    for port in taken:
        cloud.connection.network.delete_port(port.id)
    with contextlib.ExitStack() as restored:
        restored.callback(cloud.clean)
        made = cloud.balancers.create_load_balancer(name="last-one", vip_subnet_id=tiny)
        assert made.vip_address == "198.51.101.2"
        cloud.active(made.id)
        refused(cloud, {"vip_subnet_id": tiny}, TAKEN, "every address of subnet zz-tiny")
    assert f"lb-{made.id}" not in ports(cloud).values()


class Stream:
    """A server in a member's namespace that sends as much as its client takes."""

    def __init__(self, settings, member):
        place = namespaces.path(settings.host(member))
        self._listener = namespaces.run_inside(place, lambda: socket.create_server(("192.0.2.11", STREAM_PORT)))
        self._listener.settimeout(0.2)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._send, args=(connection,)))
                self._threads[-1].start()

    def _send(self, connection):
        connection.settimeout(0.5)
        with connection, contextlib.suppress(OSError):
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    connection.send(bytes(65536))

    def close(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def place(settings, connection, database, network):
    """A load balancer with an IPv6 address too, a web server behind port 80 and a stream behind port 81."""
    stream = Stream(settings, "member1")
    cloud = Cloud(settings, connection, database)
    streaming = {"address": "192.0.2.11", "protocol_port": STREAM_PORT, "subnet_id": topology.MEMBER_SUBNET}
    listeners = [
        {
            "name": name,
            "protocol": protocol,
            "protocol_port": port,
            "default_pool": {
                "name": name,
                "protocol": protocol,
                "lb_algorithm": "ROUND_ROBIN",
                "members": [member],
            },
        }
        for name, protocol, port, member in (
            ("web", "HTTP", 80, cloud.member("member1")),
            ("stream", "TCP", 81, streaming),
        )
    ]
    made = cloud.load_balancer("vips", listeners=listeners, additional_vips=[{"subnet_id": SIX}])
    six = made.additional_vips[0]["ip_address"]
    yield cloud, made, (made.vip_address, six)
    cloud.clean()
    stream.close()


def change(cloud, balancer, **asked):
    cloud.put(f"loadbalancers/{balancer.id}", {"loadbalancer": asked})
    return cloud.active(balancer.id)


def reachable(cloud, address, port):
    """Return the result of a connection attempt."""

    def ask():
        try:
            with socket.create_connection((address, port), timeout=1.5):
                return "open"
        except OSError as error:
            return type(error).__name__

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), ask)


def connections(cloud, addresses):
    """Return the results for ports 80 and 81 of every address."""
    return [[reachable(cloud, address, port) for port in (80, 81)] for address in addresses]


def fail_over(cloud, balancer):
    before = cloud.amphorae(balancer)
    cloud.balancers.failover_load_balancer(balancer.id)
    cloud.active(balancer.id)
    cloud.until(
        lambda: len(cloud.amphorae(balancer)) == 1 and not cloud.amphorae(balancer) & before, "the amphora is replaced"
    )


@pytest.mark.extended
@pytest.mark.feature("lb.vip_sg_id")
def test_security_groups(place, network):
    """The driver does not receive their changes: the provider reads them from Octavia after its commit."""
    cloud, balancer, addresses = place
    web, stream, closed = group(network, 80), group(network, 81), group(network)
    assert connections(cloud, addresses) == 2 * [["open", "open"]]

    found = change(cloud, balancer, vip_sg_ids=[web])
    assert connections(cloud, addresses) == 2 * [["open", SHUT_OUT]]
    assert cloud.answers(addresses[0], 2) == {"member1": 2}, "the group permits answers of members"
    shown = cloud.balancers.get(cloud.url(f"loadbalancers/{found.id}")).json()["loadbalancer"]
    assert shown["vip_sg_ids"] == [web]

    change(cloud, balancer, name="other", vip_sg_ids=[stream, closed])
    assert connections(cloud, addresses) == 2 * [[SHUT_OUT, "open"]]
    # An operator's change of a group applies at once.
    network.port_security.define_group(SecurityGroup(id=closed, name="open", rules=(Rule(remote="198.51.100.0/25"),)))
    assert connections(cloud, addresses) == [["open", "open"], [SHUT_OUT, "open"]]
    fail_over(cloud, balancer)
    assert connections(cloud, addresses) == [["open", "open"], [SHUT_OUT, "open"]]

    # A change without security groups keeps them.
    change(cloud, balancer, description="changed")
    assert connections(cloud, addresses) == [["open", "open"], [SHUT_OUT, "open"]]
    change(cloud, balancer, vip_sg_ids=None)
    assert connections(cloud, addresses) == 2 * [["open", "open"]]


def rate(cloud, address):
    """Return bytes per second of a client after the permitted burst.

    Without a limit it ends after some megabytes, because more would take processor time from other tests.
    """

    def ask():
        with socket.create_connection((address, 81), timeout=20) as connection:
            until, taken = time.monotonic() + 1.0, 0
            while time.monotonic() < until and taken < _PLENTY:
                taken += len(connection.recv(65536))
            start, taken = time.monotonic(), 0
            while time.monotonic() < start + 2.0 and taken < _PLENTY:
                taken += len(connection.recv(65536))
            return taken / (time.monotonic() - start)

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), ask)


@pytest.mark.extended
@pytest.mark.feature("lb.vip_qos_policy_id")
def test_qos_policy(place, network):
    cloud, balancer, addresses = place
    slow = QosPolicy(id=str(uuid.uuid4()), name="of-a-test", egress_kbps=8_000)
    network.port_security.define_policy(slow)
    # TCP does not reach a policer's limit; on a busy machine, a fifth of it is enough. After a retransmission the
    # client also reads later segments that have arrived before: up to a megabyte of an earlier second.
    limited = pytest.approx(1_000_000, abs=800_000)
    free = min(rate(cloud, address) for address in addresses)
    assert free > 3_000_000

    change(cloud, balancer, vip_qos_policy_id=slow.id)
    assert [rate(cloud, address) for address in addresses] == [limited, limited]
    fail_over(cloud, balancer)
    assert rate(cloud, addresses[0]) == limited
    change(cloud, balancer, description="still")
    assert rate(cloud, addresses[0]) == limited
    change(cloud, balancer, vip_qos_policy_id=None)
    assert rate(cloud, addresses[0]) > 3_000_000


@pytest.mark.feature("lb.admin_state_up")
def test_a_disabled_load_balancer_refuses_connections(place):
    """The amphora keeps the addresses, so that a connection is refused and does not time out."""
    cloud, balancer, addresses = place
    change(cloud, balancer, admin_state_up=False)
    assert connections(cloud, addresses) == 2 * [2 * ["ConnectionRefusedError"]]
    refused(cloud, {"vip_address": addresses[0]}, TAKEN, "in use")
    cloud.operating(lambda: cloud.balancers.get_load_balancer(balancer.id), "OFFLINE")
    change(cloud, balancer, admin_state_up=True)
    assert connections(cloud, addresses) == 2 * [["open", "open"]]
    cloud.online(balancer.id)


def test_vip_options_apply_from_creation_to_deletion(cloud, network):
    """Options apply before the first client; the next owner of the address does not inherit them."""
    web = group(network, 80)
    slow = QosPolicy(id=str(uuid.uuid4()), name="of-a-test", ingress_kbps=1_000)
    network.port_security.define_policy(slow)
    listener = {"protocol_port": 81}
    balancer = cloud.served("guarded", listener=listener, vip_sg_ids=[web], vip_qos_policy_id=slow.id)
    tree = cloud.database.read(lambda c: desired_objects.load_tree(c, balancer.id))
    assert (tree.vip_sg_ids, tree.vip_qos_policy_id) == ((web,), slow.id)
    assert reachable(cloud, balancer.vip_address, 81) == SHUT_OUT
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    again = cloud.served("open", listener=listener, vip_address=balancer.vip_address)
    assert reachable(cloud, again.vip_address, 81) == "open"
