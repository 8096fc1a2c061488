# SPDX-License-Identifier: Apache-2.0
"""Outages of services: requests are accepted or refused completely; no amphora is replaced.

Octavia's own database is a file here, and stays available. AMPHORA_OUTAGE_SECONDS is the duration of an outage in each
test.
"""

import os
import re
import time
from collections import Counter

import kill_lab
import mariadb
import pytest
from kill_lab import ContinuousClient

from amphora_driver.store import circuit_breaker
from sandbox import topology

# Every outage here lasts longer than the limit for silent amphorae.
SILENT_AFTER = 4.0
SECONDS = max(float(os.environ.get("AMPHORA_OUTAGE_SECONDS", "8")), 2 * SILENT_AFTER)
HASTE = {
    "amp_health": {"interval": "0.5", "flush_interval": "0.2"},
    "amp_failover": {"silent_after": str(SILENT_AFTER), "backoff_first": "0"},
}
LOGS = ("octavia-driver-agent.log", "amphora-controller.log", "amphora-health-manager.log")
LOGGER = re.compile("[A-Z]+ (amphora_driver|__main__)")
pytestmark = [pytest.mark.root, pytest.mark.lasts(300 + 3 * SECONDS)]


@pytest.fixture(scope="module")
def server():
    with mariadb.killable("provider") as made:
        yield made


@pytest.fixture(scope="module")
def lab(server):
    with kill_lab.lab(store_url=server.urls[0], haste=HASTE) as made:
        yield made


@pytest.fixture(scope="module")
def balancer(lab):
    """A load balancer with a continuous client, whose amphora must not be replaced."""
    cloud = lab.cloud
    monitor = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}
    balancer = cloud.served("steady", ("member1", "member2"), monitor=monitor)
    cloud.online(balancer.id)
    before = cloud.amphorae(balancer)
    with ContinuousClient(cloud, balancer.vip_address) as client:
        yield balancer
    assert client.failed == []
    assert client.answered > 100
    assert cloud.amphorae(balancer) == before, "no amphora is replaced"


@pytest.fixture
def no_failover(lab, balancer):
    """Assert after a test that the statuses are right, and no fail-over has begun."""
    yield
    lab.settled()
    found = lab.cloud.online(balancer.id)
    assert found.provisioning_status == "ACTIVE"
    assert lab.replacements(balancer.id) == [], "no fail-over has begun"


def change(lab, balancer):
    """Send an update of a load balancer; return status and body."""
    pool = lab.cloud.pool_of(balancer)
    member = next(iter(lab.cloud.balancers.members(pool)))
    answer = lab.cloud.balancers.put(
        lab.cloud.url(f"pools/{pool.id}/members/{member.id}"), json={"member": {"weight": member.weight + 1}}
    )
    return answer.status_code, answer.text


def create(lab, name):
    body = {"loadbalancer": {"name": name, "vip_subnet_id": topology.VIP_SUBNET}}
    answer = lab.cloud.balancers.post(lab.cloud.url("loadbalancers"), json=body)
    return answer.status_code, answer.text


def names(lab):
    return {one.name for one in lab.cloud.balancers.load_balancers()}


@pytest.mark.usefixtures("no_failover")
def test_the_database_hangs(lab, balancer, server):
    """Connections stay open without answers: callers wait, and continue afterwards."""
    changing = lab.beside(lambda: accepted(change(lab, balancer)))
    server.freeze()
    try:
        creating = lab.beside(lambda: accepted(create(lab, "while-it-hangs")))
        time.sleep(SECONDS)
    finally:
        server.thaw()
    changing()
    made = creating()
    lab.settled()
    assert ("while-it-hangs" in names(lab)) == made


def accepted(answer):
    status, text = answer
    assert status < 300, text


def log_lines(cloud, begins):
    """Return the log lines of the product by file, from the given sizes on, without time and process."""
    found = {}
    for path in (cloud.settings.log / name for name in LOGS):
        lines = path.read_bytes()[begins.get(path.name, 0) :].decode(errors="replace").splitlines()
        named = (line.split(maxsplit=3) for line in lines)
        found[path.name] = [words[3] for words in named if len(words) > 3 and LOGGER.match(words[3])]
    return found


@pytest.mark.usefixtures("no_failover")
def test_the_database_is_gone(lab, balancer, server):
    logs = {name: (lab.cloud.settings.log / name).stat().st_size for name in LOGS}
    server.kill()
    before = next(iter(lab.cloud.balancers.members(lab.cloud.pool_of(balancer)))).weight
    try:
        begin = time.monotonic()
        status, text = change(lab, balancer)
        assert status == 500
        assert "database" in text, "the error names the database"
        # Octavia calls the sandbox's network first, which uses the same database.
        assert create(lab, "while-it-is-gone")[0] >= 400
        assert time.monotonic() - begin < 30, "both requests are refused in time"
        # No report is possible, and none is sent.
        assert lab.cloud.balancers.get_load_balancer(balancer.id).operating_status == "ONLINE"
        time.sleep(SECONDS)
        assert lab.cloud.balancers.get_load_balancer(balancer.id).operating_status == "ONLINE"
    finally:
        server.start()
    lab.settled()
    assert "while-it-is-gone" not in names(lab)
    assert next(iter(lab.cloud.balancers.members(lab.cloud.pool_of(balancer)))).weight == before
    accepted(change(lab, balancer))
    for name, lines in log_lines(lab.cloud, logs).items():
        repeated = {line: number for line, number in Counter(lines).items() if number > 1}
        warnings = [line for line in lines if line.startswith(("WARNING", "ERROR"))]
        assert warnings, (name, "each process reports the outage")
        assert not repeated.keys() & set(warnings), (name, "a repeated warning is logged once a minute")
        assert any("the database answers again" in line for line in lines), name


def sees_for(lab, seconds):
    """Wait until the detector has had heartbeats for this time without a gap."""

    def ask():
        sight = lab.database.read(circuit_breaker.read_breaker_rows).get(circuit_breaker.SIGHT)
        now = lab.database.now()
        return sight is not None and sight.state == circuit_breaker.SEEING and now - sight.since > seconds

    lab.cloud.until(ask, f"the detector receives heartbeats for {seconds:.0f} s")


@pytest.mark.extended
@pytest.mark.usefixtures("no_failover")
def test_database_outage_causes_no_failover(lab, server):
    """The outage exceeds the limit for silent amphorae; a later failure is still detected."""
    cloud = lab.cloud
    other = cloud.served("watched", ("member1",))
    cloud.online(other.id)
    sees_for(lab, 0)
    server.kill()
    try:
        time.sleep(2 * SILENT_AFTER)
    finally:
        server.start()
    # A wrong detection would have happened by now.
    sees_for(lab, 2 * SILENT_AFTER)
    assert lab.replacements(other.id) == []
    assert cloud.balancers.get_load_balancer(other.id).operating_status == "ONLINE"
    (dead,) = cloud.amphorae(other)
    lab.power_off(dead)
    cloud.until(lambda: lab.replacements(other.id), "the fail-over begins")
    cloud.until(
        lambda: cloud.amphorae(other) not in ({dead}, set()) and dead not in cloud.amphorae(other),
        "the amphora is replaced",
    )
    (row,) = lab.replacements(other.id)
    assert (row.cause, row.amphora_id) == ("silent", dead)
    lab.settled()
    cloud.balancers.delete_load_balancer(other.id, cascade=True)
    cloud.gone(other.id)


@pytest.mark.usefixtures("no_failover")
def test_a_creation_is_completed_after_a_database_outage(lab, balancer, server):
    lab.hold("Plug-done")
    accepted(create(lab, "interrupted"))
    lab.held("Plug-done")
    server.kill()
    lab.disarm()
    time.sleep(SECONDS / 2)
    server.start()
    made = next(one for one in lab.cloud.balancers.load_balancers() if one.name == "interrupted")
    assert lab.cloud.active(made.id)
    lab.cloud.balancers.delete_load_balancer(made.id)


@pytest.mark.extended
@pytest.mark.usefixtures("no_failover")
def test_an_outage_of_octavias_agent_delays_reports_only(lab, balancer):
    """Changes are applied and recorded meanwhile; Octavia then gets current statuses, not outdated ones."""
    cloud = lab.cloud
    member = next(one for one in cloud.balancers.members(cloud.pool_of(balancer)) if one.name == "member2")
    lab.stack.supervision.stop("octavia-driver-agent")
    accepted(change(lab, balancer))
    lab.stack.supervision.stop("member2")
    time.sleep(SECONDS / 2)
    begin_again(lab)
    time.sleep(SECONDS / 2)
    found = cloud.balancers.get_load_balancer(balancer.id)
    assert (found.provisioning_status, found.operating_status) == ("PENDING_UPDATE", "ONLINE"), "Octavia has no report"
    lab.stack.up()
    said = set()

    def settled():
        said.add(cloud.balancers.get_member(member.id, cloud.pool_of(balancer)).operating_status)
        return cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"

    cloud.until(settled, "the load balancer is ACTIVE")
    lab.settled()
    assert said == {"ONLINE"}, "Octavia gets no outdated status"


def begin_again(lab):
    """Restart the member's server only."""
    program = next(one for one in lab.stack.programs() if one.name == "member2")
    lab.stack.supervision.start(program)
    lab.stack.supervision.wait_ready(program, 60)


@pytest.mark.usefixtures("no_failover")
def test_an_outage_of_the_health_manager_sets_no_error(lab, balancer):
    """Without heartbeats the operating status is unknown, and changes continue."""
    cloud = lab.cloud
    lab.stack.supervision.stop("amphora-health-manager")
    try:
        time.sleep(SECONDS)
        assert cloud.balancers.get_load_balancer(balancer.id).operating_status == "ONLINE"
        accepted(change(lab, balancer))
        cloud.active(balancer.id)
    finally:
        lab.stack.up()
