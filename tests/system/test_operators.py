# SPDX-License-Identifier: Apache-2.0
"""An operator finds, repairs and explains faults with amphoractl alone.

Automatic fail-over is off, so that the operator has to act.
"""

import json
import os
import signal
import sqlite3
import threading
import uuid

import pytest
import sqlalchemy as sa
from amphoractl import Amphoractl
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from sandbox import demo

pytestmark = pytest.mark.root
OPTIONS = {
    "amp_failover": {"automatic": "false", "silent_after": "4"},
    "amp_controller": {"retry_first": "0.2", "retry_most": "2", "orphan_grace": "3", "housekeeping_interval": "1"},
    "amp_octavia": {"audit_after": "3600"},
}


@pytest.fixture(scope="module")
def lab():
    with running(options=OPTIONS) as (stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        try:
            yield OperatorLab(stack, settings, Cloud(settings, connection, database))
        finally:
            database.dispose()
            connection.close()


class OperatorLab:
    """A sandbox with the commands of a user and of an operator."""

    def __init__(self, stack, settings, cloud):
        self.stack = stack
        self.settings = settings
        self.cloud = cloud
        self.ctl = Amphoractl(settings)

    def power_off(self, amphora_id):
        """Kill a machine without a message, as in a power cut."""
        record = self.settings.amphorae / amphora_id / "process.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)

    def octavia(self, *statements):
        """Change Octavia's own rows with SQL."""
        path = sa.make_url(self.settings.octavia_database_url).database
        with sqlite3.connect(path, timeout=30) as database:
            for statement, *values in statements:
                assert database.execute(statement, values).rowcount > 0, statement
        database.close()

    def resync(self, *words):
        """Run a resync; return outcome and detail by load balancer."""
        found = self.ctl.json("loadbalancer", "resync", *words, "--wait", "60")
        return {one["Load balancer"]: (one["Outcome"], one["Detail"]) for one in found}


@pytest.fixture
def balancer(lab):
    """A serving load balancer whose statuses are all reported to Octavia."""
    made = lab.cloud.served("operated", ("member1", "member2"))
    lab.cloud.online(made.id)
    lab.cloud.until(lambda: lab.ctl.json("job", "list") == [], "no job is pending")
    yield made
    lab.cloud.clean()


def test_an_operator_replaces_a_silent_amphora(lab, balancer):
    ctl, cloud = lab.ctl, lab.cloud
    # On a busy machine, a heartbeat may be late.
    cloud.until(lambda: ctl.check()[0]["Silent amphorae"] == "Success", "no amphora is silent")
    before, _status = ctl.check()
    assert "Failure" not in before.values(), "no check fails at first"
    assert (before["Agents"], before["Witnesses"], before["Load balancers"]) == ("Success",) * 3
    ctl.run("loadbalancer", "list")
    (dead,) = cloud.amphorae(balancer)
    lab.power_off(dead)
    # The operator's view.
    cloud.until(lambda: ctl.check()[0]["Silent amphorae"] == "Warning", "an amphora is silent")
    status, shown, _err = ctl.program("status", "check", "--problems")
    assert (status >= 1, dead in shown) == (True, True)
    ctl.run("status", "check", "--problems")
    assert [one["ID"] for one in ctl.json("loadbalancer", "list", "--stale")] == [balancer.id]
    (silent,) = ctl.json("amphora", "list", "--stale")
    assert (silent["ID"], silent["Last heartbeat"] > 3) == (dead, True)
    ctl.run("amphora", "list", "--stale")
    ctl.run("loadbalancer", "show", balancer.id[:8])
    # The operator's commands, with shortened ids.
    assert ctl.run("amphora", "failover", dead[:8], "--reason", "power cut in rack 7")[0] == 0
    ctl.run("loadbalancer", "show", balancer.id[:8])
    cloud.until(
        lambda: cloud.amphorae(balancer) not in ({dead}, set()) and dead not in cloud.amphorae(balancer),
        "the amphora is replaced",
    )
    cloud.until(lambda: cloud.answers(balancer.vip_address, 4).keys() <= {"member1", "member2"}, "the members answer")
    # The remains of the old amphora.
    cloud.until(lambda: ctl.check()[0]["Fail-overs"] == "Success", "no fail-over is open")
    lines = ctl.json("loadbalancer", "history", balancer.id[:8])
    events = [one["Event"] for one in lines if one["What"] == "fail-over"][::-1]
    assert (events[0], events[-1]) == ("begun", "ended")
    assert events.index("booted") < events.index("ready") < events.index("confirmed") < events.index("ended")
    begun = next(one for one in lines if one["Event"] == "begun")
    assert "power cut in rack 7" in begun["Detail"]
    assert begun["Object"] == dead
    ctl.run("loadbalancer", "history", balancer.id[:8])
    # The operating status follows the new amphora's heartbeats.
    well = lambda found: (found["Silent amphorae"], found["Load balancers"]) == ("Success", "Success")  # noqa: E731
    cloud.until(lambda: well(ctl.check()[0]), "both checks succeed")
    ctl.run("status", "check")


def test_a_resync_repairs_manually_changed_rows_of_octavia(lab, balancer):
    """A restored backup or manual SQL lost and changed members and left statuses in PENDING."""
    ctl, cloud = lab.ctl, lab.cloud
    pool, listener = cloud.pool_of(balancer), cloud.listener_of(balancer)
    one, two = sorted(cloud.balancers.members(pool), key=lambda member: member.name)
    stuck = "provisioning_status='PENDING_UPDATE', operating_status='OFFLINE'"
    lab.octavia(
        (f"UPDATE load_balancer SET {stuck} WHERE id=?", balancer.id),
        ("UPDATE listener SET provisioning_status='PENDING_UPDATE' WHERE id=?", listener.id),
        ("UPDATE pool SET provisioning_status='ERROR', operating_status='ERROR' WHERE id=?", pool.id),
        ("UPDATE member SET weight=3 WHERE id=?", one.id),
        ("DELETE FROM member WHERE id=?", two.id),
    )
    ctl.run("loadbalancer", "show", balancer.id[:8])
    found = lab.resync(balancer.id[:8])
    outcome, detail = found[balancer.id]
    assert outcome == "done"
    assert f"member {one.id} differs in weight" in detail
    assert f"member {two.id} is missing in Octavia" in detail
    cloud.active(balancer.id)
    shown = cloud.online(balancer.id)
    assert shown.operating_status == "ONLINE"
    assert cloud.balancers.get_listener(listener.id).provisioning_status == "ACTIVE"
    found = cloud.balancers.get_pool(pool.id)
    assert (found.provisioning_status, found.operating_status) == ("ACTIVE", "ONLINE")
    cloud.until(lambda: set(cloud.answers(balancer.vip_address, 6)) == {"member1"}, "member1 serves alone")
    # A user can change the load balancer again.
    cloud.balancers.update_member(one.id, pool, weight=2)
    cloud.active(balancer.id)
    ctl.run("loadbalancer", "history", balancer.id[:8], "--limit", "6")


@pytest.mark.extended
def test_a_resync_reports_active_only_for_served_changes(lab, balancer):
    """During continuous changes, ACTIVE in Octavia means that the amphora serves the change."""
    cloud, database = lab.cloud, lab.cloud.database
    pool = cloud.pool_of(balancer)
    member = next(iter(cloud.balancers.members(pool)))
    ended = threading.Event()
    outcomes = []

    def resync():
        while not ended.is_set():
            outcomes.append(lab.resync(balancer.id)[balancer.id][0])

    def changed(weight):
        """Return whether Octavia accepts the change: a resync makes the object immutable for a moment."""
        path = f"pools/{pool.id}/members/{member.id}"
        answer = cloud.balancers.put(cloud.url(path), json={"member": {"weight": weight}})
        assert answer.status_code in {200, 409}, answer.text
        return answer.status_code == 200

    def newest(connection):
        asked = sa.select(sa.func.max(tables.request.c.generation)).where(
            tables.request.c.load_balancer_id == balancer.id
        )
        applied = sa.select(tables.job.c.applied).where(tables.job.c.load_balancer_id == balancer.id)
        return connection.execute(asked).scalar(), connection.execute(applied).scalar()

    operator = threading.Thread(target=resync)
    operator.start()
    try:
        for weight in range(10, 22):
            cloud.until(lambda weight=weight: changed(weight), "the change is accepted")
            asked, _applied = database.read(newest)
            cloud.active(balancer.id)
            # The value is read after ACTIVE: a later change may have raised it, but it is never lower.
            _asked, applied = database.read(newest)
            assert applied >= asked, f"weight {weight} is ACTIVE in Octavia and not served"
    finally:
        ended.set()
        operator.join()
    assert outcomes, "a resync ends meanwhile"
    assert set(outcomes) <= {"done", "not done yet"}
    cloud.active(balancer.id)


def test_the_operator_finds_a_stopped_controller(lab, balancer):
    """Requests wait; the output names the stopped service, and no request is lost."""
    ctl, cloud = lab.ctl, lab.cloud
    pool = cloud.pool_of(balancer)
    member = next(iter(cloud.balancers.members(pool)))
    lab.stack.supervision.stop("amphora-controller")
    try:
        cloud.balancers.update_member(member.id, pool, weight=7)
        cloud.until(lambda: ctl.json("job", "list")[0]["Waits for"] == "a controller", "the job waits")
        cloud.until(lambda: ctl.check()[0]["Controllers"] == "Failure", "the check reports the missing controller")
        ctl.run("status", "check", "--problems")
        ctl.run("job", "list", "--fit-width")
        ctl.run("controller", "list", "--fit-width")
        (shown,) = ctl.json("loadbalancer", "list", "--status", "PENDING")
        assert (shown["ID"], shown["Wanted"] - shown["Applied"]) == (balancer.id, 1)
    finally:
        lab.stack.up()
    cloud.active(balancer.id)
    cloud.until(lambda: ctl.json("job", "list") == [], "no job is pending")
    assert ctl.run("circuit-breaker", "open", "--reason", "the network is rebuilt")[0] == 0
    assert ctl.check()[0]["Circuit breaker"] == "Warning"
    ctl.run("failover", "status")
    ctl.run("status", "check", "--problems")
    assert ctl.run("circuit-breaker", "close")[0] == 0
    cloud.until(lambda: ctl.check()[0]["Circuit breaker"] == "Success", "the circuit breaker is closed")
    ctl.run("certificate", "list", "--fit-width")


def test_a_resync_reports_load_balancers_that_one_side_lacks(lab, balancer):
    ctl, cloud = lab.ctl, lab.cloud
    stranger = str(uuid.uuid4())
    columns = "project_id, name, description, provisioning_status, operating_status, enabled, topology, provider"
    lab.octavia(
        (
            f"INSERT INTO load_balancer (id, {columns}) SELECT ?, {columns} FROM load_balancer WHERE id=?",
            *(stranger, balancer.id),
        ),
        ("INSERT INTO vip (load_balancer_id, ip_address) VALUES (?, '198.51.100.99')", stranger),
    )
    assert lab.resync(stranger)[stranger][0] == "unrecorded"
    unknown = str(uuid.uuid4())
    assert lab.resync(unknown)[unknown] == ("nowhere", None)
    assert ctl.run("loadbalancer", "resync", "no-such-id")[0] == 1
    assert stranger in {one.id for one in cloud.balancers.load_balancers()}, "the resync only reports the load balancer"
    assert lab.resync(stranger, "--remove-unknown")[stranger][0] == "removed"
    assert stranger not in {one.id for one in cloud.balancers.load_balancers()}
    lost = cloud.load_balancer("lost")
    cloud.until(lambda: ctl.json("job", "list") == [], "no job is pending")
    lab.octavia(("UPDATE load_balancer SET provisioning_status='DELETED' WHERE id=?", lost.id))
    found = lab.resync("--all")
    assert (found[lost.id][0], found[balancer.id][0]) == ("unknown", "done")
    assert ctl.check()[0]["Octavia's records"] == "Warning"
    ctl.run("loadbalancer", "resync")
    assert [one["ID"] for one in ctl.json("loadbalancer", "list") if one["ID"] == lost.id] == [lost.id]
    assert lab.resync(lost.id[:8], "--remove-unknown")[lost.id][0] == "removed"
    cloud.until(lambda: lost.id not in {one["ID"] for one in ctl.json("loadbalancer", "list")}, "the row is removed")
    assert cloud.active(balancer.id)
