# SPDX-License-Identifier: Apache-2.0
"""Whoever dies at moments that nobody chose: in the end everything is ACTIVE, is served, and belongs to somebody.

Elsewhere processes die at points that have names; between two of them the kernel, a file and the database are changed
by several calls, and a process may die between any two of those. Here dice say who dies, and when, for
`AMPHORA_STORM_SECONDS`: 600 is a good hunt.
"""

import os
import random
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import kill_lab
import pytest
from kill_lab import FAILED, Witness

from amphora_driver.compute.process import identify
from amphora_driver.sandbox import topology
from amphora_driver.store.failovers import Cause

SECONDS = float(os.environ.get("AMPHORA_STORM_SECONDS", "30"))
# Seconds between two deaths: a controller takes about one to begin its work.
PAUSES = (0.05, 2.5)
# Seconds for whatever a user waits for while others die.
PATIENCE = 180.0
pytestmark = [pytest.mark.root, pytest.mark.lasts(SECONDS + 600)]


@pytest.fixture(scope="module")
def lab():
    with kill_lab.lab(haste={"failover": {"silent_after": "4", "pause_first": "0"}}) as made:
        yield made


class Storm:
    """Kills workers of controllers, health managers and the provider agent while it rages."""

    def __init__(self, stack):
        self._stack = stack
        self._dice = random.Random()
        self._over = threading.Event()
        self.deaths = 0

    @contextmanager
    def rages(self):
        self._over.clear()
        thread = threading.Thread(target=self._rage)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _rage(self):
        while not self._over.wait(self._dice.uniform(*PAUSES)):
            if victims := sorted(self._victims()):
                with suppress(ProcessLookupError):
                    os.kill(self._dice.choice(victims), 9)
                    self.deaths += 1

    def _victims(self):
        """Those that somebody starts again: never who started them."""
        for name in ("amphora-controller", "amphora-health-manager"):
            yield from children(self._stack.supervision.running(name).pid)
        for child in children(self._stack.supervision.running("octavia-driver-agent").pid):
            with suppress(OSError):
                if b"provider_agent" in Path(f"/proc/{child}/cmdline").read_bytes():
                    yield from children(child)


def children(pid):
    process = identify(pid)
    return [] if process is None else [one.pid for one in process.children()]


def asked(request):
    """Make a request as soon as Octavia takes it: what is being changed cannot be changed."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return request()
        except FAILED as error:
            if getattr(error, "status_code", None) != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def life(lab, storm, **more):
    """Of one load balancer and its amphorae: it comes, changes, loses its machines, and goes."""
    cloud = lab.cloud
    until = lambda question, what: cloud.until(question, what, PATIENCE)  # noqa: E731 - as everywhere here, but longer
    state = lambda: cloud.balancers.get_load_balancer(made.id).provisioning_status  # noqa: E731
    with storm.rages():
        pool = {"name": "pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [cloud.member("member1")]}
        listener = {"name": "http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        made = cloud.balancers.create_load_balancer(
            name="storm", vip_subnet_id=topology.VIP_SUBNET, listeners=[listener], **more
        )
        until(lambda: state() == "ACTIVE", "it is there")
        served = cloud.pool_of(made)
        (first,) = cloud.balancers.members(served)
        second = asked(lambda: cloud.balancers.create_member(served, **cloud.member("member2")))
        asked(lambda: cloud.balancers.delete_member(first, served))
        until(lambda: state() == "ACTIVE", "it was changed")
    lab.settled(PATIENCE)
    until(lambda: cloud.answers(made.vip_address, 2) == {"member2": 2}, "it serves what is wanted")
    with storm.rages():
        former = cloud.amphorae(made)
        for one in former:
            lab.power_off(one)
        until(lambda: len(now := cloud.amphorae(made)) == len(former) and not now & former, "all were replaced")
    lab.settled(PATIENCE)
    until(lambda: cloud.answers(made.vip_address, 2) == {"member2": 2}, "it serves again")
    replaced = lab.replacements(made.id)
    assert sorted(one.amphora_id for one in replaced) == sorted(former), "each of them, once, and nobody else"
    assert {(one.cause, one.outcome) for one in replaced} == {(Cause.SILENT.value, "done")}
    with storm.rages():
        asked(lambda: cloud.balancers.update_member(second, served, weight=7))
        asked(lambda: cloud.balancers.delete_load_balancer(made.id, cascade=True))
        until(lambda: made.id not in {one.id for one in cloud.balancers.load_balancers()}, "it is gone")
    lab.settled(PATIENCE)


def test_a_storm(lab, record_property):
    cloud, storm = lab.cloud, Storm(lab.stack)
    kinds = [{}]
    for name, data in (("pairs", '{"loadbalancer_topology": "ACTIVE_STANDBY"}'), ("spared", '{"warm_spares": 1}')):
        profile = cloud.balancers.create_flavor_profile(name=name, provider_name="haproxy", flavor_data=data)
        made = cloud.balancers.create_flavor(name=name, flavor_profile_id=profile.id, is_enabled=True)
        kinds.append({"flavor_id": made.id})
    balancer = cloud.served("witness", ("member1",))
    until = time.monotonic() + SECONDS
    lives = 0
    with Witness(cloud, balancer.vip_address) as witness:
        while time.monotonic() < until or lives < 1:
            life(lab, storm, **kinds[lives % len(kinds)])
            lives += 1
    assert witness.failed == []
    assert lab.replacements(balancer.id) == [], "nobody else was replaced"
    for name, value in (("lives", lives), ("deaths", storm.deaths), ("answers", witness.answered)):
        record_property(name, value)
    assert storm.deaths > lives
