# SPDX-License-Identifier: Apache-2.0
"""Adoptions of load balancers that Octavia's own worker has created, in a complete OpenStack.

The former amphorae run the agent of the package `octavia`, with HAProxy and keepalived of this machine. Octavia's
health manager and housekeeping run during the adoptions. A client sends a request every 10 ms.
"""

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from adoption_kinds import NAMES, Kinds
from incumbent_stack import HEARTBEAT_TIMEOUT, IncumbentStack, Requests

# In the second part of a run, one process starts one cloud for all tests (tests/README.md).
ALL = pytest.mark.skipif(os.environ.get("AMPHORA_CLOUD") != "all", reason="AMPHORA_CLOUD=all runs this")
pytestmark = [pytest.mark.extended, pytest.mark.quiet, pytest.mark.lasts(2400)]
LIMIT = 3.0
"""Seconds without an answer that an adoption may cause."""
# A revert includes two requests to Octavia and an update by its worker: 8.6 s were measured. Without the announcement,
# clients have the old MAC address for up to 60 s.
BACK_LIMIT = 30.0
STEPS = ["lock", "prepare", "cut", "take", "commit", "report", "keep", "remove"]
SECONDS = 480.0
SEED = int(os.environ.get("AMPHORA_SEED", "24"))
# Load balancers of the test with kills.
NUMBER = int(os.environ.get("AMPHORA_ADOPTIONS", "20"))


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


def create_kinds(user, incumbent, topology, wanted, interval=0.01):
    """Let Octavia's worker create load balancers of these kinds; return them with requests that can run."""
    made = [
        user.request(kind.name, provider="amphora", flavor_id=topology(kind.topology, "amphora"), **kind.more)
        for kind in wanted
    ]
    found = []
    for kind, one in zip(wanted, made, strict=True):
        former = Former(user, incumbent, user.settled(one.id, seconds=SECONDS))
        requests = Requests(user.cloud, former.vip, kind.port, kind.host, tls=kind.tls, interval=interval)
        found.append((kind, former, requests))
    return found


def report(found):
    """Return lines of the table of outages; append them to the file that AMPHORA_OUTAGES names."""
    lines = [f"| {kind.name} | {requests.outage:.2f} | {requests.failed} |" for kind, _, requests in found]
    path = os.environ.get("AMPHORA_OUTAGES")
    if path:
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    return lines


@ALL
@pytest.mark.parametrize("name", NAMES[:6])
def test_each_kind_is_adopted(cloud_user, incumbent, topology, kinds, record_property, name):
    found = create_kinds(cloud_user, incumbent, topology, [getattr(kinds, name)()])
    [(kind, former, requests)] = found
    with requests.running():
        incumbent.adopt(former.id, "--remove-after", "5")
        former.await_step("done")
        cloud_user.settled(former.id)
    record_property("outage", report(found)[0])
    assert former.provider() == "haproxy"
    assert former.is_removed()
    assert_no_failover(incumbent, former)
    assert requests.found[-1][2] == "200"
    cloud_user.delete(cloud_user.balancers.get_load_balancer(former.id))
    assert 0 < requests.outage <= LIMIT, kind.name
    assert requests.failed * 0.01 <= LIMIT, kind.name


@ALL
def test_adoptions_and_reverts_survive_killed_controllers(
    cloud_user, incumbent, topology, kinds, provider_stack, record_property
):
    """At the end, each load balancer is with one provider, and serves."""
    dice = random.Random(SEED)
    # The clients share the processors with all amphorae.
    found = create_kinds(cloud_user, incumbent, topology, kinds.many(NUMBER), interval=0.2)
    back = [former for _, former, _ in found[::4]]
    with ExitStack() as running:
        for _, _, requests in found:
            running.enter_context(requests.running())
        incumbent.adopt(*(former.id for _, former, _ in found), "--remove-after", "60", "--max-in-progress", "2")
        asked, ends = set(), time.monotonic() + SECONDS * 4
        while not all(incumbent.step(former.id)[0] in ("done", "reverted") for _, former, _ in found):
            assert time.monotonic() < ends, [incumbent.step(former.id) for _, former, _ in found]
            time.sleep(dice.uniform(1, 8))
            for former in back:
                step, _ = incumbent.step(former.id)
                if former.id not in asked and step in ("prepare", "cut", "take", "keep"):
                    incumbent.adopt("revert", former.id)
                    asked.add(former.id)
            provider_stack.restart("amphora-controller")
            # A failure pauses the load balancers that wait.
            incumbent.adopt("resume")
        for _, former, _ in found:
            cloud_user.settled(former.id)
    for line in report(found):
        record_property("outage", line)
    assert any(incumbent.step(former.id)[0] == "done" for _, former, _ in found)
    for kind, former, requests in found:
        expected = "amphora" if incumbent.step(former.id)[0] == "reverted" else "haproxy"
        assert former.provider() == expected
        assert requests.found[-1][2] == "200", kind.name
        assert_no_failover(incumbent, former)
        if expected == "haproxy":
            assert former.is_removed(), kind.name
        else:
            assert incumbent.rows(former.id) == former.rows
        cloud_user.delete(cloud_user.balancers.get_load_balancer(former.id))
