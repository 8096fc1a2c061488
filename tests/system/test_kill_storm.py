# SPDX-License-Identifier: Apache-2.0
"""Processes are killed at random moments: every load balancer becomes ACTIVE and serves requests.

The other kill tests use named failpoints. Between two failpoints, several calls change the kernel, a file and the
database, and a process can crash between any two of them. `AMPHORA_STORM_SECONDS` is the duration; 600 is thorough.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import kill_lab
import msgspec
import pytest
from kill_lab import FAILED, ContinuousClient
from sandbox_of_a_test import provider_agents, title

from amphora_driver.host.detached_process import Process
from amphora_driver.store.failovers import Cause
from sandbox import topology

SECONDS = float(os.environ.get("AMPHORA_STORM_SECONDS", "30"))
CONTROLLER, HEALTH_MANAGER, DRIVER_AGENT = "amphora-controller", "amphora-health-manager", "octavia-driver-agent"
# Processes of an amphora that do not serve clients.
AGENT = "amphora_agent.server"
MORTAL = (CONTROLLER, HEALTH_MANAGER, DRIVER_AGENT, AGENT)
# Seconds between two kills: a controller takes about one to begin its work.
PAUSES = (0.05, 1.5)
# Time-out of a user's operation during the kills, in seconds.
TIME_LIMIT = 180.0
pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.quiet, pytest.mark.lasts(SECONDS + 600)]


@pytest.fixture(scope="module")
def lab():
    with kill_lab.lab(haste={"amp_failover": {"backoff_first": "0"}}) as made:
        yield made


class RandomKills:
    """Kills workers of controllers, health managers and the provider agent, and agents."""

    def __init__(self, stack, settings):
        self._stack = stack
        self._settings = settings
        self._dice = random.Random()
        self._turns = itertools.cycle(MORTAL)
        self._over = threading.Event()
        self.deaths = Counter()

    @contextmanager
    def running(self):
        self._over.clear()
        with ThreadPoolExecutor(1, "kills") as threads:
            killing = threads.submit(self._kill)
            try:
                yield
            finally:
                self._over.set()
            killing.result()

    def _kill(self):
        while not self._over.wait(self._dice.uniform(*PAUSES)):
            name = next(self._turns)
            # The process may be restarting.
            if (victims := self._victims(name)) and self._dice.choice(victims).signal(signal.SIGKILL):
                self.deaths[name] += 1

    def _victims(self, name):
        """Return the processes that a supervisor restarts."""
        if name == AGENT:
            supervisors = [child for one in self._machines() for child in one.children()]
            return [child for one in supervisors for child in one.children() if AGENT.encode() in title(child)]
        if name == DRIVER_AGENT:
            return [child for one in provider_agents(self._stack) for child in one.children()]
        return self._stack.supervision.running(name).children()

    def _machines(self):
        """Return the outermost processes of the amphorae; one may end meanwhile."""
        found = []
        for record in self._settings.amphorae.glob("*/process.json"):
            with suppress(FileNotFoundError):
                found.append(msgspec.json.decode(record.read_bytes(), type=Process))
        return found


def asked(request):
    """Send a request until Octavia accepts it: an object in PENDING is immutable."""
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        try:
            return request()
        except FAILED as error:
            if getattr(error, "status_code", None) != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def life(lab, kills, **more):
    """Create, change and delete one load balancer, with kills of its machines."""
    cloud = lab.cloud
    until = lambda question, what: cloud.until(question, what, TIME_LIMIT)  # noqa: E731 - a longer time-out
    state = lambda: cloud.balancers.get_load_balancer(made.id).provisioning_status  # noqa: E731
    with kills.running():
        pool = {"name": "pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [cloud.member("member1")]}
        listener = {"name": "http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        made = cloud.balancers.create_load_balancer(
            name="killed", vip_subnet_id=topology.VIP_SUBNET, listeners=[listener], **more
        )
        until(lambda: state() == "ACTIVE", "the load balancer is ACTIVE")
        served = cloud.pool_of(made)
        (first,) = cloud.balancers.members(served)
        second = asked(lambda: cloud.balancers.create_member(served, **cloud.member("member2")))
        asked(lambda: cloud.balancers.delete_member(first, served))
        until(lambda: state() == "ACTIVE", "the load balancer is ACTIVE")
    lab.settled(TIME_LIMIT)
    until(lambda: cloud.answers(made.vip_address, 2) == {"member2": 2}, "member2 serves")
    former = cloud.amphorae(made)
    for one in former:
        lab.power_off(one)
    # The detector restarts its timers after each of its own restarts.
    until(lambda: len(lab.replacements(made.id)) == len(former), "the detector finds the silent amphorae")
    with kills.running():
        until(lambda: len(now := cloud.amphorae(made)) == len(former) and not now & former, "all amphorae are replaced")
    lab.settled(TIME_LIMIT)
    until(lambda: cloud.answers(made.vip_address, 2) == {"member2": 2}, "member2 serves")
    replaced = lab.replacements(made.id)
    assert sorted(one.amphora_id for one in replaced) == sorted(former), "each amphora is replaced once"
    assert {(one.cause, one.outcome) for one in replaced} == {(Cause.SILENT.value, "done")}
    with kills.running():
        asked(lambda: cloud.balancers.update_member(second, served, weight=7))
        asked(lambda: cloud.balancers.delete_load_balancer(made.id, cascade=True))
        until(
            lambda: made.id not in {one.id for one in cloud.balancers.load_balancers()}, "the load balancer is deleted"
        )
    lab.settled(TIME_LIMIT)


def test_processes_killed_at_random_moments(lab, record_property):
    cloud, kills = lab.cloud, RandomKills(lab.stack, lab.settings)
    kinds = [{}]
    for name, data in (("pairs", '{"loadbalancer_topology": "ACTIVE_STANDBY"}'), ("spared", '{"warm_spares": 1}')):
        profile = cloud.balancers.create_flavor_profile(name=name, provider_name="haproxy", flavor_data=data)
        made = cloud.balancers.create_flavor(name=name, flavor_profile_id=profile.id, is_enabled=True)
        kinds.append({"flavor_id": made.id})
    balancer = cloud.served("steady", ("member1",))
    until = time.monotonic() + SECONDS
    lives = 0
    with ContinuousClient(cloud, balancer.vip_address) as client:
        while time.monotonic() < until or set(kills.deaths) != set(MORTAL):
            life(lab, kills, **kinds[lives % len(kinds)])
            lives += 1
    assert client.failed == []
    assert lab.replacements(balancer.id) == [], "the amphora of the other load balancer is not replaced"
    for name, value in (("lives", lives), ("deaths", dict(kills.deaths)), ("answers", client.answered)):
        record_property(name, value)
