# SPDX-License-Identifier: Apache-2.0
"""A clock is set by an hour and later back: no amphora is replaced, and all work continues at once.

The tests move the clock of one machine with all programs, of the controllers' hosts only, or of the database, which
measures leases and pauses.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import long_connections
import mariadb
import moved_clock
import msgspec
import pytest
import sqlalchemy as sa
from cloud import Cloud
from kill_lab import ContinuousClient
from sandbox_of_a_test import AGENT_PYTHON, running

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty, job, vip_claim
from amphora_driver.database.tables_fleet import failover
from amphora_driver.model.network import VipRequest
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import ca_records, circuit_breaker, orphans, silent_amphorae, vip_claims
from amphora_driver.store.ca_records import CaState
from sandbox import demo, topology

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(900)]

HOUR = 3600.0
SILENT_AFTER = 4.0
# Minimum age before cleanup; every test here is shorter.
GRACE = 25.0
OPTIONS = {
    "amp_health": {"interval": "0.5", "flush_interval": "0.2"},
    "amp_failover": {"silent_after": str(SILENT_AFTER), "backoff_first": "0"},
    "amp_controller": {
        "housekeeping_interval": "0.5",
        "forget_vip_after": str(GRACE),
        "orphan_grace": str(GRACE),
        "give_up_after": "1000",
        "retry_first": "5",
        "retry_most": "15",
    },
    "amp_certificates": {"settle": "2"},
}
# The programs with the moved clock, and the database.
EVERYTHING = ("octavia-api", "octavia-driver-agent", "network-api", "amphora-controller", "amphora-health-manager")
CONTROL = ("amphora-controller", "amphora-health-manager")


class Lab:
    """A sandbox, its moved clock, and the agents' Python."""

    def __init__(self, stack, settings, clock, python, connection):
        self.stack, self.clock, self.python = stack, clock, python
        self.database = Database(settings.database_url)
        self.cloud = Cloud(settings, connection, self.database)
        self.network = LocalNetwork(config.load([str(settings.driver_configuration)]), self.database)
        self.settings = settings

    @contextmanager
    def broken_agents(self):
        """Make machines end immediately after their start."""
        kept = self.python.with_suffix(".kept")
        self.python.rename(kept)
        self.python.write_text("#!/bin/sh\nexit 3\n", encoding="ascii")
        self.python.chmod(0o755)
        try:
            yield
        finally:
            kept.rename(self.python)

    def replaced(self):
        """Return the automatic fail-overs."""
        causes = [cause.value for cause in silent_amphorae.AUTOMATIC_CAUSES]
        return self.database.read(lambda c: c.execute(sa.select(failover).where(failover.c.cause.in_(causes))).all())

    def sees_for(self, seconds):
        """Wait until the detector has worked for this time, without silent amphorae."""
        begun = time.monotonic()

        def ask():
            rows = self.database.read(circuit_breaker.read_breaker_rows)
            sight = rows.get(circuit_breaker.SIGHT)
            quiet = not self.database.read(silent_amphorae.list_silent_amphorae)
            return (
                quiet
                and sight is not None
                and sight.state == circuit_breaker.SEEING
                and time.monotonic() - begun > seconds
            )

        self.cloud.until(ask, f"the detector receives heartbeats for {seconds:.0f} s", seconds + 60)

    def await_housekeeping(self, times):
        """Wait for this number of housekeeping runs."""
        ends = sa.select(duty.c.leased_until).where(duty.c.name == "housekeeping")
        for _ in range(times):
            before = self.database.read(lambda c: c.scalar(ends))
            self.cloud.until(lambda b=before: self.database.read(lambda c: c.scalar(ends)) != b, "housekeeping runs")

    def changed(self, balancer, weight):
        """Apply a user's change; return its duration in seconds."""
        pool = self.cloud.pool_of(balancer)
        member = next(iter(self.cloud.balancers.members(pool)))
        begun = time.monotonic()
        self.cloud.balancers.update_member(member, pool, weight=weight)
        self.cloud.active(balancer.id)
        return time.monotonic() - begun

    def amphoractl(self, *words):
        done = subprocess.run(
            [Path(sys.executable).with_name("amphoractl"), *words, "-f", "json"],
            env={**os.environ, config.FILE_VARIABLE: str(self.settings.driver_configuration)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout)


@pytest.fixture(scope="module", params=["everything", "controllers", "database"])
def lab(request, tmp_path_factory):
    assert moved_clock.is_there(), "install the package faketime"
    whose = request.param
    folder = tmp_path_factory.mktemp("clock")
    # The first process of an amphora reads this folder.
    folder.chmod(0o755)
    (folder / "moved").mkdir()
    clock, python = moved_clock.Clock(folder / "moved"), folder / "python"
    with ExitStack() as closing:
        store = {}
        if whose != "everything":
            environment = clock.environment() if whose == "database" else None
            server = closing.enter_context(mariadb.killable("provider", environment=environment))
            store = {"store_url": server.urls[0]}
        if whose == "everything":
            clock.interpreter(python, AGENT_PYTHON)
        else:
            python.write_text(f'#!/bin/sh\nexec {AGENT_PYTHON} "$@"\n', encoding="ascii")
            python.chmod(0o755)
        options = {**OPTIONS, "amp_compute_netns": {"agent_python": str(python)}}
        stack, settings = closing.enter_context(running(options=options, **store))
        if whose != "database":
            clock.restart(stack, *(EVERYTHING if whose == "everything" else CONTROL))
        connection = demo.connect(settings)
        closing.callback(connection.close)
        made = Lab(stack, settings, clock, python, connection)
        closing.callback(made.database.dispose)
        yield made
        made.clock.set(0.0)
        made.cloud.clean()


@pytest.fixture(scope="module")
def balancer(lab):
    """A load balancer with a continuous client, whose amphora must not be replaced."""
    monitor = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}
    balancer = lab.cloud.served("steady", ("member1", "member2"), monitor=monitor)
    lab.cloud.online(balancer.id)
    before = lab.cloud.amphorae(balancer)
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        yield balancer
    assert client.failed == []
    assert client.answered > 100
    assert lab.cloud.amphorae(balancer) == before


@pytest.fixture(autouse=True)
def no_replacement(lab, balancer):
    """Assert that no amphora was replaced by the end of the test."""
    yield
    lab.sees_for(2.5 * SILENT_AFTER)
    assert lab.replaced() == []
    assert lab.cloud.online(balancer.id).provisioning_status == "ACTIVE"


def test_a_clock_set_ahead_and_back_replaces_no_amphora(lab, balancer, record_property):
    """Creations and failures during the wrong time are completed after the correction."""
    cloud = lab.cloud
    lab.clock.set(HOUR)
    took = [lab.changed(balancer, 3)]
    made = cloud.served("ahead", ("member1",))
    cloud.online(made.id)
    with lab.broken_agents():
        waits = cloud.balancers.create_load_balancer(name="waits", vip_subnet_id=topology.VIP_SUBNET)
        tried = sa.select(job.c.attempts).where(job.c.load_balancer_id == waits.id)
        cloud.until(lambda: lab.database.read(lambda c: c.scalar(tried)) >= 2, "the controller has retried")
    lab.sees_for(2.5 * SILENT_AFTER)
    lab.clock.set(0.0)
    took.append(lab.changed(balancer, 4))
    took.append(lab.changed(made, 5))
    begun = time.monotonic()
    cloud.active(waits.id)
    record_property("seconds until ACTIVE: ahead, back, created meanwhile", [round(one, 2) for one in took])
    record_property("seconds until the retried load balancer is ACTIVE", round(time.monotonic() - begun, 1))
    for one in (made, waits):
        cloud.balancers.delete_load_balancer(one.id, cascade=True)
    for one in (made, waits):
        cloud.gone(one.id)


def test_a_clock_set_behind_and_corrected_replaces_no_amphora(lab, balancer, record_property):
    lab.clock.set(-HOUR)
    took = [lab.changed(balancer, 6)]
    made = lab.cloud.served("behind", ("member1",))
    lab.sees_for(2.5 * SILENT_AFTER)
    lab.clock.set(0.0)
    took += [lab.changed(balancer, 7), lab.changed(made, 8)]
    lab.cloud.balancers.delete_load_balancer(made.id, cascade=True)
    lab.cloud.gone(made.id)
    record_property("seconds until ACTIVE: behind, right, created meanwhile", [round(one, 2) for one in took])


def test_cleanup_keeps_young_objects(lab):
    """Cleanup keeps addresses of load balancers under creation, and recent orphans."""
    wish = [VipRequest(subnet_id=topology.VIP_SUBNET)]
    claimed, lost = "c1000000-0000-4000-8000-000000000001", "c1000000-0000-4000-8000-000000000002"
    lab.database.write(lambda c: vip_claims.record_claim(c, claimed, "local"))
    lab.network.allocate_vip(claimed, "demo", wish)
    lab.network.allocate_vip(lost, "demo", wish)

    def there():
        claim = sa.select(vip_claim.c.load_balancer_id).where(vip_claim.c.load_balancer_id == claimed)
        owners = set(lab.network.owners().load_balancers)
        noted = lab.database.read(lambda c: orphans.read_orphans(c, orphans.OrphanKind.VIP, "local"))
        kept = lab.database.read(lambda c: c.scalar(claim))
        return kept == claimed, {claimed, lost} <= owners, lost in noted

    lab.cloud.until(lambda: there() == (True, True, True), "orphans are recorded")
    begun = time.monotonic()
    lab.clock.set(HOUR)
    lab.await_housekeeping(6)
    assert there() == (True, True, True) or time.monotonic() - begun > GRACE
    lab.cloud.until(
        lambda: not {claimed, lost} & set(lab.network.owners().load_balancers), "the orphans are deleted", 90
    )
    assert time.monotonic() - begun >= GRACE - 5
    lab.clock.set(0.0)


@pytest.fixture
def pair(lab):
    """A pair with a listener for long connections."""
    cloud, data = lab.cloud, '{"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.5}'
    profile = cloud.balancers.create_flavor_profile(name="pair", provider_name="haproxy", flavor_data=data)
    flavor = cloud.balancers.create_flavor(name="pair", flavor_profile_id=profile.id, is_enabled=True)
    member = cloud.member("member3", protocol_port=9000)
    pool = {"name": "lasting", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": [member]}
    listener = {"name": "lasting", "protocol": "HTTP", "protocol_port": 81, "default_pool": pool}
    balancer = cloud.load_balancer("pair", flavor_id=flavor.id, listeners=[listener])
    yield balancer
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    cloud.balancers.delete_flavor(flavor)
    cloud.balancers.delete_flavor_profile(profile)


def test_draining_connections_continue(lab, pair):
    """A clock that is an hour ahead does not end the drain time."""
    cloud = lab.cloud
    former = cloud.amphorae(pair)
    with long_connections.Member(cloud.settings, "member3", 9000) as member:
        visits = member.visits(cloud.settings, pair.vip_address, 81)
        cloud.balancers.failover_load_balancer(pair.id)
        cloud.active(pair.id)
        cloud.until(lambda: len(former & cloud.amphorae(pair)) == 1, "one former amphora drains")
        lab.clock.set(HOUR)
        # The controller checks the draining amphora every two seconds.
        lab.sees_for(2 * SILENT_AFTER)
        assert len(former & cloud.amphorae(pair)) == 1
        for visit in visits:
            visit.goes_on()
        member.finish()
        assert visits[0].rest() == member.sent
    cloud.until(lambda: not former & cloud.amphorae(pair), "the drained amphora is deleted")
    lab.clock.set(0.0)


def test_an_authority_is_replaced_while_the_clock_is_ahead(lab, balancer):
    """Controllers issue certificates with a clock that is ahead; amphorae still accept them."""
    lab.clock.set(HOUR)
    begun = lab.amphoractl("ca", "rotate", "--kind", "controller")

    def over():
        known = {one.id: one.state for one in lab.database.read(ca_records.list_cas)}
        return known == {begun["ID"]: CaState.CURRENT}

    lab.cloud.until(over, "the rotation has ended", 120)
    lab.changed(balancer, 9)
    lab.clock.set(0.0)
    lab.changed(balancer, 10)
    made = lab.cloud.served("after", ("member1",))
    lab.cloud.balancers.delete_load_balancer(made.id, cascade=True)
    lab.cloud.gone(made.id)
