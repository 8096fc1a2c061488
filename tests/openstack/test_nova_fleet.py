# SPDX-License-Identifier: Apache-2.0
"""Boots of pairs within the rate limit, with a failure of each kind of step: no object is left.

AMPHORA_BOOTS=100 makes a hundred boots. Each pair uses both zones, so no boot waits for the end of another one.
"""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from boot_lab import DEPLOYMENT, BootLab
from faulty_service import Fault

# Requests for servers, also those that fail. The machine needs five seconds of processor time for each.
BOOTS = int(os.environ.get("AMPHORA_BOOTS", "20"))
pytestmark = [
    pytest.mark.extended,
    pytest.mark.lasts(max(900, 24 * BOOTS)),
    # On a busy machine, the test lasts more than the two minutes that ./run-tests --all has for it.
    pytest.mark.skipif(os.environ.get("AMPHORA_CLOUD") != "all", reason="AMPHORA_CLOUD=all runs this"),
]

# Pairs that exist at the same time, and the longest life of one in seconds.
TOGETHER, SECONDS = 5, 300.0
RATE, BURST = 3.0, 6
NOVA = {
    ("GET servers", 15): Fault.REFUSED,
    ("POST servers", 4): Fault.REFUSED,
    ("POST servers", 6): Fault.LOST,
    ("POST servers", 8): Fault.KILLED_BEFORE,
    ("POST servers", 11): Fault.KILLED_AFTER,
    ("DELETE servers", 3): Fault.REFUSED,
    ("DELETE servers", 6): Fault.LOST,
    ("DELETE servers", 9): Fault.KILLED_AFTER,
}
NEUTRON = {
    ("GET ports", 30): Fault.REFUSED,
    ("POST ports", 6): Fault.REFUSED,
    ("POST ports", 10): Fault.LOST,
    ("POST ports", 14): Fault.REFUSED,
    ("POST ports", 18): Fault.LOST,
    ("POST ports", 22): Fault.KILLED_AFTER,
    ("PUT ports/tags", 5): Fault.REFUSED,
    ("PUT ports/tags", 12): Fault.LOST,
    ("DELETE ports", 4): Fault.REFUSED,
    ("DELETE ports", 8): Fault.LOST,
}
KILLS = sum(1 for one in (*NOVA.values(), *NEUTRON.values()) if one in (Fault.KILLED_BEFORE, Fault.KILLED_AFTER))
# The quota and the hypervisors fail when Nova has received this number of requests for servers.
QUOTA_AT, HYPERVISOR_AT = 12, 15
REFUSED_BY_QUOTA, REFUSED_BY_HYPERVISOR = 3, 2
REASON = "the disk of the fleet is full"
OPTIONS = {
    "amp_compute": {"boot_rate": RATE, "boot_burst": BURST},
    # The controller itself releases no unused VIP, however long the test lasts.
    "amp_controller": {
        "loadbalancer_topology": "ACTIVE_STANDBY",
        "lease": 3,
        "retry_most": 2,
        "forget_vip_after": 86400,
    },
}


def until(lab, question, what):
    """Poll until the result is true; return it."""
    deadline = time.monotonic() + SECONDS
    while not (answer := question()):
        assert not lab.ended.is_set(), f"the test has ended before: {what}"
        assert time.monotonic() < deadline, f"not in {SECONDS:.0f} s: {what}\n{lab.log()}"
        time.sleep(0.2)
    return answer


def live(lab, user, *, built):
    """Create and delete a pair: after Nova has built both servers, or as soon as Nova has accepted them."""
    made = until(lab, lambda: lab.create(user), "a load balancer is created")

    def booted():
        servers = lab.booted(made)
        return len(servers) == 2 and (servers <= lab.active or not built)

    until(lab, booted, f"load balancer {made} has booted")
    lab.delete(made)
    until(lab, lambda: not lab.exists(made), f"load balancer {made} is deleted")


def boot_in_turn(lab, user):
    """Create and delete pairs until the number of boots is reached."""
    for number in itertools.count():
        if lab.nova.received["POST servers"] >= BOOTS:
            return
        live(lab, user, built=number % 2 == 1)


class Quota:
    """Nova's quota of servers: used up for a while, and without a limit otherwise."""

    def __init__(self, cloud):
        self._compute = cloud.connect("admin", "admin").compute
        self._project_id = cloud.projects["service"]
        present = self._compute.get_quota_set(self._project_id)
        self._former = {name: getattr(present, name) for name in ("instances", "cores", "ram")}

    def __enter__(self):
        self.set(instances=-1, cores=-1, ram=-1)
        return self

    def __exit__(self, *_):
        self.set(**self._former)

    def set(self, **values):
        # Nova refuses a quota below the present use without `force`.
        self._compute.update_quota_set(self._project_id, force=True, **values)


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
    cloud.ask("refuse", reasons=[REASON] * REFUSED_BY_HYPERVISOR)
    while True:
        yield


def test_boots_leave_nothing_after_any_failure(provider_stack, cloud_user, record_property):
    cloud = provider_stack.cloud
    begun = time.monotonic()
    with (
        cloud_user.unchanged(),
        Quota(cloud) as quota,
        BootLab(provider_stack, {"nova": NOVA, "neutron": NEUTRON}, OPTIONS) as lab,
        ThreadPoolExecutor(TOGETHER) as users,
    ):
        running = [users.submit(lab.claim, cloud_user) for _ in range(2)]
        running += [users.submit(boot_in_turn, lab, cloud_user) for _ in range(TOGETHER)]
        failures = fail_outside(lab, quota, cloud)
        with lab.until_the_end():
            while not all(one.done() for one in running):
                next(failures)
                lab.step()
                time.sleep(0.5)
            for one in running:
                one.result()
        record_property("seconds", time.monotonic() - begun)
        record_property("requests to Nova", dict(lab.nova.received))
        record_property("requests to Neutron", dict(lab.neutron.received))

        each_failure_has_happened(lab, cloud)
        within_the_rate(lab)
        # Without a load balancer are only the claims of those that Octavia did not create: housekeeping releases them.
        assert (lab.rows(), lab.servers()) == ([], [])
        assert len(lab.claims()) >= 2
        lab.release_unused_vips()
        assert lab.claims() == []
        # The security groups of the deployment stay. No amphora had a port on the network of the VIPs.
        groups = cloud.connect().network.security_groups(description=f"octavia-amphora-driver deployment {DEPLOYMENT}")
        assert sorted(one.name for one in groups) == ["octavia-amphora-management", "octavia-amphora-vips"]


def each_failure_has_happened(lab, cloud):
    assert {**lab.nova.injected, **lab.neutron.injected} == {**NOVA, **NEUTRON}
    # Each kill ends one process, and is followed by the start of another one.
    assert len(lab.starts) == 1 + KILLS
    assert lab.nova.answered["POST servers", 403] >= REFUSED_BY_QUOTA
    log = (cloud.folder / "hypervisor.log").read_text()
    assert log.count(f"ValueError: {REASON}") == REFUSED_BY_HYPERVISOR


def within_the_rate(lab):
    """No controller process sends more requests for servers than the rate limit permits."""
    times = [at for kind, at in lab.nova.times if kind == "POST servers"]
    assert len(times) >= BOOTS
    for start, end in zip(lab.starts, [*lab.starts[1:], time.monotonic()], strict=True):
        sent = [at for at in times if start <= at < end]
        early = [number for number, at in enumerate(sent, 1) if at < start + (number - BURST) / RATE]
        assert early == [], (start, sent)
