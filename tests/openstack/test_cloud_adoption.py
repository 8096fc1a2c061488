# SPDX-License-Identifier: Apache-2.0
"""Adoptions of load balancers that Octavia's own worker has created, in a complete OpenStack.

The former amphorae run the agent of the package `octavia`, with HAProxy and keepalived of this machine. Octavia's
health manager and housekeeping run during the adoptions. A client sends a request every 10 ms. For UDP, the former
amphorae have a stand-in for IPVS (`incumbent_udp.py`).
"""

import os
import random
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from adoption_kinds import Kind, Kinds
from adoption_waves import Wave
from incumbent_stack import HEARTBEAT_TIMEOUT, IncumbentStack, Requests

ALL = pytest.mark.skipif(os.environ.get("AMPHORA_CLOUD") != "all", reason="AMPHORA_CLOUD=all runs this")
pytestmark = [pytest.mark.extended, pytest.mark.lasts(2400)]
LIMIT = 3.0
"""Seconds without an answer that an adoption may cause.

A single load balancer needs 0.1 s, also on a busy machine. So tests with one are not quiet, and use the cloud of the
other tests.
"""
# keepalived of a former pair repeats its announcement after five seconds.
BACK_LIMIT = 6.0
STEPS = ["lock", "prepare", "take", "cut", "commit", "report", "keep", "remove"]
SECONDS = 480.0
SEED = int(os.environ.get("AMPHORA_SEED", "24"))
# Load balancers of the test with kills, in all and at a time: clients and amphorae share the processors.
NUMBER, TOGETHER = int(os.environ.get("AMPHORA_ADOPTIONS", "20")), 4
# Each of this number of load balancers gets a request for a revert.
REVERTED = 3
# Seconds without an answer in the test with kills: amphorae serve also while no controller runs. keepalived of a former
# pair repeats its announcement after five seconds.
KILLED_LIMIT = 6.0


@pytest.fixture(scope="module")
def incumbent(provider_stack):
    made = IncumbentStack(provider_stack)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def user(cloud_user):
    """The user, with no object of the test left afterwards."""
    with cloud_user.unchanged():
        yield cloud_user


class Former:
    """A load balancer that Octavia's worker has created, with what it has in the cloud."""

    def __init__(self, user, incumbent, balancer):
        self.user, self.incumbent, self.id, self.vip = user, incumbent, balancer.id, balancer.vip_address
        self.rows = incumbent.rows(self.id)
        assert self.rows
        assert {one["status"] for one in self.rows} == {"ALLOCATED"}
        self.seen = self.objects()

    def objects(self):
        """The rows of the amphorae, and their servers and ports with the revisions of Neutron."""
        network, compute = self.user.admin.network, self.user.admin.compute
        ports = {one.id: one.revision_number for row in self.rows for one in network.ports(device_id=row["compute_id"])}
        servers = {row["compute_id"]: compute.get_server(row["compute_id"]).status for row in self.rows}
        return {"rows": self.incumbent.rows(self.id), "ports": ports, "servers": servers}

    def is_removed(self):
        """Whether nothing of the former amphorae is left."""
        network = self.user.admin.network
        servers = set(self.user.servers())
        names = {f"amphora-{row['id']}" for row in self.rows}
        groups = [one for one in network.security_groups() if one.name == f"lb-{self.id}"]
        return not (names & servers or groups or any(network.find_port(one) for one in self.seen["ports"]))

    def await_step(self, *steps):
        """Wait for one of these steps; return it."""

        def ask():
            step, reason = self.incumbent.step(self.id)
            assert step not in {"refused", "reverted"} - set(steps), reason
            return step if step in steps else None

        return self.user.until(ask, f"adoption of {self.id} in step {steps}", SECONDS)

    def rename_listener(self):
        """Change a listener, which the present provider serves."""
        [listener] = self.user.balancers.get_load_balancer(self.id).listeners
        self.user.balancers.update_listener(listener["id"], name="renamed")
        self.user.settled(self.id)

    def change(self):
        """Add a listener, which the present provider serves; return the load balancer."""
        client = self.user.balancers
        [pool] = client.pools(loadbalancer_id=self.id)
        client.create_listener(
            loadbalancer_id=self.id, name="more", protocol="HTTP", protocol_port=81, default_pool_id=pool.id
        )
        balancer = self.user.settled(self.id)
        assert self.user.served(self.vip, port=81)
        return balancer

    def provider(self):
        return self.user.balancers.get_load_balancer(self.id).provider


def create(user, incumbent, topology, *names):
    """Let Octavia's worker create load balancers side by side."""
    flavor = topology("SINGLE", "amphora")
    made = [user.request(name, provider="amphora", flavor_id=flavor) for name in names]
    return [Former(user, incumbent, user.settled(one.id, seconds=SECONDS)) for one in made]


def assert_no_failover(incumbent, former):
    """Octavia's health manager has replaced no amphora of these load balancers."""
    log = (incumbent.cloud.folder / "octavia-health-manager.log").read_text(errors="replace")
    assert not [row["id"] for row in former.rows if f"Stale amphora's id is: {row['id']}" in log]


def test_a_load_balancer_is_adopted_and_another_one_is_not_changed(user, incumbent, topology, record_property):
    adopted, other = create(user, incumbent, topology, "adopted", "other")
    assert user.answers(adopted.vip) == {"member1": 4, "member2": 4}
    assert [step for step, _ in incumbent.plan(adopted.id)] == STEPS
    requests = Requests(user.cloud, adopted.vip)
    with requests.running():
        incumbent.adopt(adopted.id, "--remove-after", str(HEARTBEAT_TIMEOUT + 10))
        adopted.await_step("keep")
        user.settled(adopted.id)
        kept = time.monotonic()
        adopted.await_step("done")
    record_property("outage", round(requests.outage, 3))
    record_property("failed requests", requests.failed)
    # The former heartbeats would be late for the health manager in this time.
    assert time.monotonic() - kept > HEARTBEAT_TIMEOUT
    assert adopted.provider() == "haproxy"
    assert incumbent.rows(adopted.id) == []
    assert [incumbent.health(row["id"]) for row in adopted.rows] == [None]
    assert adopted.is_removed()
    assert other.objects() == other.seen
    for one in (adopted, other):
        assert_no_failover(incumbent, one)
        assert user.answers(one.vip) == {"member1": 4, "member2": 4}
    assert 0 < requests.outage <= LIMIT
    assert requests.failed * 0.01 <= LIMIT
    # Both providers make changes.
    for one in (adopted, other):
        user.delete(one.change())


def test_an_adoption_is_reverted(user, incumbent, topology, record_property):
    [former] = create(user, incumbent, topology, "reverted")
    adoption, revert = (Requests(user.cloud, former.vip) for _ in range(2))
    with adoption.running():
        incumbent.adopt(former.id)
        former.await_step("keep")
        user.settled(former.id)
    with revert.running():
        incumbent.adopt("revert", former.id)
        former.await_step("reverted")
        user.settled(former.id)
        # Clients have ARP entries for up to a minute.
        user.served(former.vip)
    record_property("outage", round(adoption.outage, 3))
    record_property("outage of the revert", round(revert.outage, 3))
    assert former.provider() == "amphora"
    assert incumbent.rows(former.id) == former.rows
    assert user.answers(former.vip) == {"member1": 4, "member2": 4}
    # An amphora whose heartbeats do not count would be stale after this time.
    time.sleep(HEARTBEAT_TIMEOUT + 5)
    assert_no_failover(incumbent, former)
    # Octavia's worker changes it again.
    user.delete(former.change())
    assert 0 < adoption.outage <= LIMIT
    assert 0 < revert.outage <= BACK_LIMIT


@pytest.fixture(scope="module")
def kinds(cloud_user):
    made = Kinds(cloud_user)
    yield made
    made.remove()


class Watched(NamedTuple):
    """A load balancer of a kind, with its clients."""

    kind: Kind
    former: Former
    clients: tuple[Requests, ...]

    def outages(self, end):
        """Return lines of the table of outages; append them to the file that AMPHORA_OUTAGES names."""
        lines = [
            f"| {self.kind.name} {one.mode} | {end} | {one.outage:.2f} | {one.failed} of {len(one.found)} |"
            for one in self.clients
        ]
        path = os.environ.get("AMPHORA_OUTAGES")
        if path:
            with Path(path).open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        return lines


def create_kinds(user, incumbent, topology, wanted):
    """Let Octavia's worker create load balancers of these kinds."""
    made = [
        user.request(kind.name, provider="amphora", flavor_id=topology(kind.topology, "amphora"), **kind.more)
        for kind in wanted
    ]
    found = []
    for kind, one in zip(wanted, made, strict=True):
        former = Former(user, incumbent, user.settled(one.id, seconds=SECONDS))
        clients = (Requests(user.cloud, former.vip, kind.port, kind.host, mode=mode) for mode in kind.modes)
        found.append(Watched(kind, former, tuple(clients)))
    return found


@contextmanager
def polled(watched):
    """Send the requests of all clients; at the end, each of them has an answer."""
    with ExitStack() as running:
        for one in watched:
            for client in one.clients:
                running.enter_context(client.running())
        yield
        for one in watched:
            for client in one.clients:
                client.await_answer()
    assert [one.kind.name for one in watched if not all(client.is_served for client in one.clients)] == []


def delete_all(user, watched):
    """Delete load balancers side by side."""
    ids = {one.former.id for one in watched}
    for one in ids:
        user.balancers.delete_load_balancer(one, cascade=True)
    user.until(lambda: not ids & {one.id for one in user.balancers.load_balancers()}, f"{ids} are deleted", SECONDS)


@pytest.mark.quiet
@ALL
@pytest.mark.parametrize("name", ["pair", "tls", "own_port", "vips", "tcp", "monitored", "udp"])
def test_each_kind_is_adopted(cloud_user, incumbent, topology, kinds, record_property, name):
    found = create_kinds(cloud_user, incumbent, topology, [getattr(kinds, name)()])
    [one] = found
    with polled(found):
        incumbent.adopt(one.former.id, "--remove-after", "5")
        one.former.await_step("done")
        cloud_user.settled(one.former.id)
    record_property("outages", one.outages("adopted"))
    assert one.former.provider() == "haproxy"
    assert one.former.is_removed()
    assert_no_failover(incumbent, one.former)
    delete_all(cloud_user, found)
    for client in one.clients:
        assert 0 < client.outage <= LIMIT
        assert client.failed * 0.01 <= LIMIT


@pytest.mark.quiet
@ALL
@pytest.mark.parametrize("name", ["pair", "udp", "udp_pair"])
def test_each_kind_is_reverted(cloud_user, incumbent, topology, kinds, record_property, name):
    found = create_kinds(cloud_user, incumbent, topology, [getattr(kinds, name)()])
    [one] = found
    former = one.former
    with polled(found):
        incumbent.adopt(former.id)
        former.await_step("keep")
        cloud_user.settled(former.id)
    record_property("outages of the adoption", one.outages("adopted"))
    assert former.provider() == "haproxy"
    outages = [client.outage for client in one.clients]
    with polled(found):
        incumbent.adopt("revert", former.id)
        former.await_step("reverted")
        cloud_user.settled(former.id)
    record_property("outages of the revert", one.outages("reverted"))
    assert former.provider() == "amphora"
    assert incumbent.rows(former.id) == former.rows
    # An amphora whose heartbeats do not count would be stale after this time.
    time.sleep(HEARTBEAT_TIMEOUT + 5)
    assert_no_failover(incumbent, former)
    # Octavia's worker changes it again.
    former.rename_listener()
    for client in one.clients:
        client.await_answer()
    delete_all(cloud_user, found)
    assert all(0 < outage <= LIMIT for outage in outages)
    assert all(0 < client.outage <= BACK_LIMIT for client in one.clients)


@pytest.mark.quiet
@ALL
def test_adoptions_and_reverts_survive_killed_controllers(
    cloud_user, incumbent, topology, kinds, provider_stack, record_property
):
    """At the end, each load balancer is with one provider, and serves."""
    dice = random.Random(SEED)
    wanted, ends, kills, outages = kinds.many(NUMBER), [], [], {}
    for first in range(0, NUMBER, TOGETHER):
        found = create_kinds(cloud_user, incumbent, topology, wanted[first : first + TOGETHER])
        ids = [one.former.id for one in found]
        wave = Wave(incumbent, dice, ids, [one for place, one in enumerate(ids, first) if place % REVERTED == 0])
        with polled(found):
            wave.run(SECONDS * 2)
            for one in found:
                cloud_user.settled(one.former.id)
        for one in found:
            end = assert_ended(incumbent, one.former)
            ends.append(end)
            for line in one.outages(f"{end}, killed in {', '.join(wave.killed_in(one.former.id)) or 'no step'}"):
                record_property("outage", line)
                outages[line] = max(client.outage for client in one.clients)
        kills += wave.kills
        delete_all(cloud_user, found)
    record_property("kills", len(kills))
    assert kills
    assert [line for line, outage in outages.items() if outage > KILLED_LIMIT] == []
    assert ends.count("adopted") >= NUMBER // 2


def assert_ended(incumbent, former):
    """The load balancer is with the provider of its last step, and all objects of the other one are removed."""
    step, reason = incumbent.step(former.id)
    assert_no_failover(incumbent, former)
    if step == "done":
        assert former.provider() == "haproxy"
        assert former.is_removed()
        return "adopted"
    assert (step, former.provider()) == ("reverted", "amphora"), reason
    assert incumbent.rows(former.id) == former.rows
    return "reverted"
