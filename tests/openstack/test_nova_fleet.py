# SPDX-License-Identifier: Apache-2.0
"""A hundred boots within the rate limit, with a failure of each kind of step: no object is left."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from boot_lab import BootLab
from faulty_service import Fault

pytestmark = [pytest.mark.extended, pytest.mark.quiet, pytest.mark.lasts(900)]

PAIRS = int(os.environ.get("AMPHORA_BOOTS", "100")) // 2
# Load balancers that exist at the same time, and the seconds until the end of the test.
TOGETHER, SECONDS = 10, 300.0
RATE, BURST = 3.0, 6
NOVA = {
    ("GET servers", 15): Fault.REFUSED,
    ("POST servers", 5): Fault.REFUSED,
    ("POST servers", 10): Fault.LOST,
    ("POST servers", 20): Fault.KILLED_BEFORE,
    ("POST servers", 30): Fault.KILLED_AFTER,
    ("POST servers", 35): Fault.REFUSED,
    ("POST servers", 45): Fault.LOST,
    ("DELETE servers", 5): Fault.REFUSED,
    ("DELETE servers", 10): Fault.LOST,
    ("DELETE servers", 20): Fault.KILLED_BEFORE,
    ("DELETE servers", 30): Fault.KILLED_AFTER,
}
NEUTRON = {
    ("GET ports", 30): Fault.REFUSED,
    ("POST ports", 8): Fault.REFUSED,
    ("POST ports", 16): Fault.LOST,
    ("POST ports", 24): Fault.REFUSED,
    ("POST ports", 32): Fault.LOST,
    ("POST ports", 60): Fault.KILLED_AFTER,
    ("PUT ports/tags", 5): Fault.REFUSED,
    ("PUT ports/tags", 12): Fault.LOST,
    ("DELETE ports", 5): Fault.REFUSED,
    ("DELETE ports", 10): Fault.LOST,
    ("DELETE ports", 40): Fault.KILLED_AFTER,
}
# The quota and the hypervisor fail when Nova has received this number of requests for servers.
QUOTA_AT, HYPERVISOR_AT = 50, 65
REFUSED_BY_QUOTA, REFUSED_BY_HYPERVISOR = 4, 6
OPTIONS = {
    "amp_compute": {"boot_rate": RATE, "boot_burst": BURST},
    "amp_controller": {"threads": TOGETHER, "loadbalancer_topology": "ACTIVE_STANDBY", "lease": 3, "retry_most": 2},
}


def until(lab, question, what):
    """Poll until the result is true; return it."""
    deadline = time.monotonic() + SECONDS
    while not (answer := question()):
        assert not lab.ended.is_set(), f"the test has ended before: {what}"
        assert time.monotonic() < deadline, f"not in {SECONDS:.0f} s: {what}\n{lab.log()}"
        time.sleep(0.2)
    return answer


def live(lab, user, number):
    """Create and delete a load balancer. Every other one is deleted while Nova still builds its servers."""
    made = until(lab, lambda: lab.create(user), "a load balancer is created")

    def booted():
        servers = lab.booted(made)
        return len(servers) == 2 and (number % 2 == 0 or servers <= lab.active)

    until(lab, booted, f"load balancer {made} has booted")
    lab.delete(made)
    until(lab, lambda: not lab.exists(made), f"load balancer {made} is deleted")


class Quota:
    """Nova's quota of servers: used up for a while, and without a limit otherwise."""

    def __init__(self, cloud):
        self._compute = cloud.connect("admin", "admin").compute
        self._project_id = cloud.projects["service"]
        self._former = {name: getattr(self._quota(), name) for name in ("instances", "cores", "ram")}

    def __enter__(self):
        self.set(instances=-1, cores=-1, ram=-1)
        return self

    def __exit__(self, *_):
        self.set(**self._former)

    def set(self, **values):
        self._compute.update_quota_set(self._project_id, **values)

    def _quota(self):
        return self._compute.get_quota_set(self._project_id)


def fail_outside(lab, quota, cloud):
    """Yield in each round of the test; use up the quota once, and let boots fail on the hypervisors once."""
    requests = "POST servers"
    while lab.nova.received[requests] < QUOTA_AT:
        yield
    quota.set(instances=0)
    while lab.nova.answered[requests, 403] < REFUSED_BY_QUOTA:
        yield
    quota.set(instances=-1)
    while lab.nova.received[requests] < HYPERVISOR_AT:
        yield
    cloud.ask("refuse", reasons=["the disk is full"] * REFUSED_BY_HYPERVISOR)
    while True:
        yield


def test_a_hundred_boots_leave_nothing_after_any_failure(provider_stack, cloud_user, record_property):
    cloud = provider_stack.cloud
    begun = time.monotonic()
    with (
        cloud_user.unchanged(),
        Quota(cloud) as quota,
        BootLab(provider_stack, {"nova": NOVA, "neutron": NEUTRON}, OPTIONS) as lab,
        ThreadPoolExecutor(TOGETHER) as users,
    ):
        running = [users.submit(live, lab, cloud_user, number) for number in range(PAIRS)]
        running += [users.submit(lab.claim, cloud_user) for _ in range(2)]
        failures = fail_outside(lab, quota, cloud)
        with lab.until_the_end():
            while not all(one.done() for one in running):
                next(failures)
                lab.step()
                time.sleep(0.5)
            for one in running:
                one.result()
        record_property("seconds", time.monotonic() - begun)

        # Each failure has happened.
        assert {**lab.nova.injected, **lab.neutron.injected} == {**NOVA, **NEUTRON}
        kills = [one for one in (*NOVA.values(), *NEUTRON.values()) if one in (Fault.KILLED_BEFORE, Fault.KILLED_AFTER)]
        assert len(lab.starts) == 1 + len(kills)
        assert lab.nova.answered["POST servers", 403] >= REFUSED_BY_QUOTA
        log = (cloud.folder / "hypervisor.log").read_text()
        assert log.count("ValueError: the disk is full") >= REFUSED_BY_HYPERVISOR
        assert lab.nova.answered["POST servers", 202] >= 2 * PAIRS
        within_the_rate(lab)

        # Without a load balancer are only the claims of those that Octavia did not create: housekeeping releases them.
        assert (lab.rows(), lab.servers()) == ([], [])
        assert len(lab.claims()) >= 2
        lab.release_unused_vips()
        assert lab.claims() == []


def within_the_rate(lab):
    """No controller process sends more requests for servers than the rate limit permits."""
    times = [at for kind, at in lab.nova.times if kind == "POST servers"]
    assert len(times) >= 2 * PAIRS
    for start, end in zip(lab.starts, [*lab.starts[1:], time.monotonic()], strict=True):
        sent = [at for at in times if start <= at < end]
        early = [number for number, at in enumerate(sent, 1) if at < start + (number - BURST) / RATE]
        assert early == [], (start, sent)
