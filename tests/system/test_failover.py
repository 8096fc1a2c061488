# SPDX-License-Identifier: Apache-2.0
"""Fail-overs under load: requested and automatic, with and without a spare, and failed ones.

AMPHORA_FAILOVER_TABLE names a file. The measurements are appended to it as rows of the table in
docs/explanation/failure-detection.md.
"""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from amphoractl import Amphoractl
from client_traffic import Traffic
from cloud import Cloud
from sandbox_of_a_test import AGENT_PYTHON, running

from amphora_driver import config
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.database.tables_fleet import failover, failover_event
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import amphorae, spare_pools
from sandbox import demo

pytestmark = pytest.mark.root

# Seconds between advertisements of pairs: a standby takes over after less than a second.
FAST = 0.2
# Time-out of a fail-over on any machine, in seconds.
LONG = 90.0
# `the holder, with a spare` shows the adoption of a spare in every run.
SPARE = [pytest.param(False, id="no spare"), pytest.param(True, id="a spare", marks=pytest.mark.extended)]
# Starts the agent. Once, a file makes it end at once or stay silent.
_AGENT = """#!/bin/sh
if [ "$2" = amphora_agent.services.supervisor ]; then
    if rm {folder}/ends 2>/dev/null; then echo "told to end"; exit 1; fi
    if rm {folder}/mute 2>/dev/null; then exec sleep 600; fi
fi
exec {python} "$@"
"""


class Lab:
    """A sandbox whose amphorae can fail at boot."""

    def __init__(self, cloud, compute, folder):
        self.cloud, self.compute, self.folder = cloud, compute, folder
        self.database = cloud.database
        self._flavors = {}

    def flavor(self, **data):
        """Return the id of a flavor with this data."""
        name = json.dumps(data, sort_keys=True)
        if name not in self._flavors:
            balancers, label = self.cloud.balancers, f"f{len(self._flavors)}"
            profile = balancers.create_flavor_profile(name=label, provider_name="haproxy", flavor_data=name)
            made = balancers.create_flavor(name=label, flavor_profile_id=profile.id, is_enabled=True)
            self._flavors[name] = made.id
        return self._flavors[name]

    def next_boot(self, what):
        """Make the next booted machine end at once (`ends`) or stay silent (`mute`)."""
        (self.folder / what).touch()

    def happened(self, what):
        """Return whether a booted machine has done that."""
        return not (self.folder / what).exists()

    def amphorae(self, balancer):
        found = self.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
        return {one.id: one for one in found}

    def holder(self, balancer):
        """Return the VIP holder, or the only amphora."""

        def ask():
            live = [one for one in self.amphorae(balancer).values() if one.state is not AmphoraState.RETIRING]
            says = [one for one in live if one.holds_vip or len(live) == 1]
            return says[0].id if len(says) == 1 else None

        return self.cloud.until(ask, "one amphora holds the VIPs", LONG)

    def heard(self, balancer):
        """Wait for a first heartbeat of every amphora, because detection ignores amphorae without one."""
        rows = lambda: self.amphorae(balancer).values()  # noqa: E731 - used in one line
        self.cloud.until(lambda: all(one.heard_at for one in rows()), "every amphora has sent a heartbeat", LONG)

    def warm(self, number=1):
        """Wait until this number of spares is ready."""
        query = sa.select(sa.func.count()).select_from(
            amphora.join(job, job.c.load_balancer_id == amphora.c.load_balancer_id)
        )
        ready = query.where(
            job.c.op == spare_pools.OP, amphora.c.state == "ready", amphora.c.management_address.is_not(None)
        )
        self.cloud.until(
            lambda: self.database.read(lambda c: c.execute(ready).scalar()) >= number,
            f"{number} spares are ready",
            LONG,
        )

    def over(self, balancer, number):
        """Wait for the end of this number of fail-overs; return their rows."""
        query = sa.select(failover).where(failover.c.load_balancer_id == balancer.id).order_by(failover.c.id)

        def ask():
            rows = self.database.read(lambda c: c.execute(query).all())
            return rows if len(rows) >= number and all(row.ended_at for row in rows) else None

        return self.cloud.until(ask, "the fail-over has ended", LONG)

    def line(self, row):
        """Return (word, detail) of each event."""
        query = sa.select(failover_event.c.word, failover_event.c.detail).order_by(failover_event.c.id)
        rows = self.database.read(lambda c: c.execute(query.where(failover_event.c.failover_id == row.id)).all())
        return [tuple(one) for one in rows]

    def tried(self, row):
        """Return the replacement amphorae in the time line of a fail-over."""
        query = sa.select(failover_event.c.amphora_id).where(
            failover_event.c.failover_id == row.id, failover_event.c.word.in_(("recorded", "booted", "ready"))
        )
        return set(self.database.read(lambda c: c.execute(query).scalars().all()))

    def recorded(self):
        """Return every recorded amphora: its row exists from before its boot until its removal."""
        return set(self.database.read(lambda c: c.execute(sa.select(amphora.c.id)).scalars().all()))

    def amphoractl(self, *words):
        """Run amphoractl successfully; return its output."""
        status, out, err = Amphoractl(self.cloud.settings).run(*words)
        assert status == 0, err
        return out


@contextmanager
def _lab(folder):
    agent = folder / "agent"
    agent.write_text(_AGENT.format(folder=folder, python=AGENT_PYTHON))
    agent.chmod(0o755)
    options = {
        "amp_compute_netns": {"agent_python": str(agent)},
        "amp_controller": {"lease": "3", "boot_timeout": "20", "retry_most": "5", "drain_timeout": "2"},
        # The breaker stays closed: no test here is about many dead amphorae.
        "amp_failover": {"breaker_percent": "100", "breaker_min": "50", "backoff_first": "0"},
    }
    with running(options=options) as (_stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        conf = config.load([str(settings.driver_configuration)])
        cloud = Cloud(settings, connection, database)
        try:
            yield Lab(cloud, NetnsCompute(conf, LocalNetwork(conf, database)), folder)
        finally:
            database.dispose()
            connection.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with _lab(tmp_path_factory.mktemp("failover")) as lab:
        yield lab


@pytest.fixture
def lab(whole):
    yield whole
    for name in ("ends", "mute"):
        (whole.folder / name).unlink(missing_ok=True)
    whole.cloud.clean()


def clients_of(lab, balancer):
    """Requests at short intervals and with a short time-out, so that the longest outage is exact."""
    return Traffic(lab.cloud, balancer.vip_address, pause=0.02, timeout=0.3)


def noted(cause, topology, spare, killed_at, row, clients):
    """Record one row of the table in docs/explanation/failure-detection.md."""
    detected = f"{row.begun_at - killed_at:.1f} s" if killed_at else "-"
    since = killed_at or row.begun_at
    cells = (cause, topology, spare, detected, f"{row.served_at - since:.1f} s", f"{clients.gap:.2f} s")
    text = "| " + " | ".join(cells) + " |\n"
    if name := os.environ.get("AMPHORA_FAILOVER_TABLE"):
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.mark.parametrize("spare", SPARE)
def test_a_planned_failover_of_a_single_amphora(lab, spare):
    balancer = lab.cloud.served("planned", flavor_id=lab.flavor(loadbalancer_topology="SINGLE", warm_spares=int(spare)))
    (old,) = lab.amphorae(balancer)
    if spare:
        lab.warm()
    with clients_of(lab, balancer) as clients:
        said = lab.amphoractl("amphora", "failover", old, "--reason", "a test")
        (row,) = lab.over(balancer, 1)
        clients.more()
    assert f"Amphora {old} is to be replaced" in said
    assert (row.cause, row.reason, row.outcome) == ("operator", "a test", "done")
    assert row.asked_by
    words = [word for word, _ in lab.line(row)]
    assert ("adopted" in words) is spare
    assert old not in lab.amphorae(balancer)
    assert old not in lab.compute.booted()
    # The replacement serves before the old amphora is removed; a busy machine may answer late.
    assert clients.gap < 5, clients.answers
    noted("planned", "SINGLE", "yes" if spare else "no", None, row, clients)


@pytest.mark.extended
def test_a_planned_failover_of_a_pair(lab):
    flavor = lab.flavor(loadbalancer_topology="ACTIVE_STANDBY", vrrp_advert_interval=FAST)
    balancer = lab.cloud.served("pair", flavor_id=flavor)
    before = set(lab.amphorae(balancer))
    lab.holder(balancer)
    with clients_of(lab, balancer) as clients:
        lab.cloud.balancers.failover_load_balancer(balancer.id)
        lab.cloud.active(balancer.id)
        rows = lab.over(balancer, 2)
        clients.more()
    assert {row.cause for row in rows} == {"asked"}
    assert before.isdisjoint(lab.amphorae(balancer))
    assert clients.gap < 5, clients.answers
    noted("planned (both)", "ACTIVE_STANDBY", "no", None, rows[-1], clients)


@pytest.mark.parametrize("spare", SPARE)
def test_the_failure_of_a_single_amphora(lab, spare):
    balancer = lab.cloud.served("dies", flavor_id=lab.flavor(loadbalancer_topology="SINGLE", warm_spares=int(spare)))
    (old,) = lab.amphorae(balancer)
    lab.heard(balancer)
    if spare:
        lab.warm()
    with clients_of(lab, balancer) as clients:
        killed_at = time.time()
        lab.compute.power_off(old)
        (row,) = lab.over(balancer, 1)
        clients.more()
    assert row.cause == "silent"
    assert killed_at < row.begun_at < row.served_at
    assert old not in lab.amphorae(balancer)
    assert old not in lab.compute.booted(), "the machine is deleted"
    assert ("adopted" in [word for word, _ in lab.line(row)]) is spare
    assert lab.cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
    assert clients.gap < LONG
    noted("amphora killed", "SINGLE", "yes" if spare else "no", killed_at, row, clients)


@pytest.mark.parametrize(
    ("victim", "spare"),
    [
        pytest.param("holder", False, id="the holder"),
        pytest.param("standby", False, id="the standby", marks=pytest.mark.extended),
        pytest.param("holder", True, id="the holder, with a spare", marks=pytest.mark.extended),
    ],
)
def test_the_failure_of_an_amphora_of_a_pair(lab, victim, spare):
    flavor = lab.flavor(
        loadbalancer_topology="ACTIVE_STANDBY", vrrp_advert_interval=FAST, **({"warm_spares": 1} if spare else {})
    )
    balancer = lab.cloud.served("half", flavor_id=flavor)
    lab.heard(balancer)
    first = lab.holder(balancer)
    (standby,) = set(lab.amphorae(balancer)) - {first}
    old, stays = (first, standby) if victim == "holder" else (standby, first)
    if spare:
        lab.warm()
    with clients_of(lab, balancer) as clients:
        killed_at = time.time()
        lab.compute.power_off(old)
        (row,) = lab.over(balancer, 1)
        clients.more()
    assert row.cause == "silent"
    now = lab.amphorae(balancer)
    assert stays in now
    assert old not in now
    assert sorted(one.role for one in now.values()) == ["BACKUP", "MASTER"]
    assert lab.holder(balancer) == stays, "the new amphora does not take the VIPs"
    # Three advertisements and a fraction (RFC 9568, 6.1); the rest is for a busy machine.
    assert clients.gap < 5, clients.answers
    noted(f"{victim} killed", "ACTIVE_STANDBY", "yes" if spare else "no", killed_at, row, clients)


def test_both_amphorae_of_a_pair_are_killed_together(lab):
    flavor = lab.flavor(loadbalancer_topology="ACTIVE_STANDBY", vrrp_advert_interval=FAST)
    balancer = lab.cloud.served("both", flavor_id=flavor)
    # No other amphora sends heartbeats: the sandbox's witness proves that the network works.
    lab.heard(balancer)
    before = set(lab.amphorae(balancer))
    with clients_of(lab, balancer) as clients:
        killed_at = time.time()
        for one in before:
            lab.compute.power_off(one)
        rows = lab.over(balancer, 2)
        clients.more()
    assert before.isdisjoint(lab.amphorae(balancer))
    assert {row.outcome for row in rows} == {"done"}
    noted("both killed", "ACTIVE_STANDBY", "no", killed_at, rows[-1], clients)


@pytest.mark.parametrize("how", ["ends", pytest.param("mute", marks=pytest.mark.extended)])
def test_a_failed_replacement_is_retried(lab, how):
    """The replacement ends during its boot or stays silent: another boot follows without client errors."""
    balancer = lab.cloud.served("fails", flavor_id=lab.flavor(loadbalancer_topology="SINGLE", warm_spares=0))
    (old,) = lab.amphorae(balancer)
    with clients_of(lab, balancer) as clients:
        lab.next_boot(how)
        lab.amphoractl("loadbalancer", "failover", balancer.id)
        (row,) = lab.over(balancer, 1)
        clients.more()
    assert lab.happened(how)
    failures = [detail for word, detail in lab.line(row) if word == "failed"]
    assert failures, "the time line contains the failure"
    assert any(("told to end" if how == "ends" else "has not answered") in one for one in failures), failures
    (new,) = lab.amphorae(balancer)
    assert new != old
    booted = set(lab.compute.booted())
    assert new in booted
    # Failed attempts and former amphorae are removed.
    assert booted & (lab.tried(row) | {old}) == {new}
    # Amphorae of earlier tests may still be under removal: all others have an owner.
    lab.cloud.until(lambda: set(lab.compute.booted()) <= lab.recorded(), "no machine is an orphan")
    assert clients.gap < 5, clients.answers
    assert lab.cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
