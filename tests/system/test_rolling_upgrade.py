# SPDX-License-Identifier: Apache-2.0
"""A deployment of the last release is upgraded under load, in the order of docs/how-to/upgrade.md.

The new version is this one with an expand migration and a contract migration. Each process is replaced while clients
send requests and a user changes load balancers. MariaDB has the tables of the driver, because SQLite has no locks of
tables.
"""

import json
import os
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path

import kill_lab
import mariadb
import previous
import pytest
import sqlalchemy as sa
from client_traffic import Traffic, of
from cloud import Cloud
from sandbox_of_a_test import AGENT_PYTHON
from two_versions import amphoractl, controllers, environment, left_to, of_version, processes, second_controller

from amphora_driver import config
from amphora_driver.database.tables import request
from amphora_driver.host.detached_process import find_by_last_argument
from amphora_driver.store import rotations
from sandbox import demo
from sandbox.stack import Stack

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(1500)]

# In the order of their replacement. The first one has a substitute meanwhile.
REPLACED = ("amphora-controller", "amphora-health-manager", "octavia-driver-agent", "octavia-api")
OPTIONS = {
    "amp_controller": {**kill_lab.HASTE["amp_controller"], "lease": "3", "drain_timeout": "3"},
    "amp_rotation": {"settle": "1"},
    # An overloaded machine must not count as silent.
    "amp_failover": {"silent_after": "30"},
    "amp_vrrp": {"advert_interval": "0.3"},
}


class Versions:
    """The old and the new version, and the Python of the agents."""

    def __init__(self, folder):
        self.old, self.new, self._python = folder / "old", folder / "new", folder / "python"
        for one in (self.old, self.new):
            one.mkdir()
        self.release = previous.release(self.old)
        self.expand, self.contract = previous.next_schema(self.new)
        # The first process of an amphora reads the folder before it creates its own mount namespace.
        for one in (folder, self.old, self.new):
            one.chmod(0o755)
        self.python = self.boot(self.old)

    def boot(self, version):
        """Let amphorae that boot from now on run the agent in this folder."""
        return previous.interpreter(self._python, AGENT_PYTHON, version)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def lab(versions, tmp_path_factory):
    """A sandbox whose processes, agents and tables are those of the release."""
    original = Stack.programs

    def programs(stack):
        return [of_version(one, versions.old) if one.name in REPLACED else one for one in original(stack)]

    options = {**OPTIONS, "amp_compute_netns": {"agent_python": str(versions.python)}}
    with mariadb.server("octavia", "provider") as (octavia, provider), pytest.MonkeyPatch.context() as patch:
        create_tables(versions, provider, tmp_path_factory.mktemp("etc") / "driver.conf")
        patch.setattr(Stack, "programs", programs)
        with kill_lab.lab(store_url=provider, octavia_url=octavia, haste=options) as made:
            patch.undo()
            yield made


def create_tables(versions, url, file):
    file.write_text(f"[amp_database]\nconnection = {url}\n")
    words = [sys.executable, "-m", "amphora_driver.cli.main", "database", "upgrade", "-f", "json"]
    done = subprocess.run(
        words,
        env={**os.environ, config.FILE_VARIABLE: str(file), **environment(versions.old)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["After"] == versions.release


class Changes:
    """A user that changes the weights of members without a pause, each time after the previous change is ACTIVE.

    It reads no tables, because the version of the test does not work with them after the last step.

    Attributes:
        accepted: number of accepted changes by load balancer.
        unclear: number of requests that were sent again without an answer, while octavia-api was replaced.
        weights: the weight of the last accepted change by load balancer.
    """

    def __init__(self, lab, balancers):
        self._connection = demo.connect(lab.settings)
        self._lab = lab
        self._members = {}
        for one in balancers:
            pool = lab.cloud.pool_of(one)
            member = next(member for member in lab.cloud.balancers.members(pool) if member.name == "member1")
            self._members[one.id] = lab.cloud.url(f"pools/{pool.id}/members/{member.id}")
        self.accepted = dict.fromkeys(self._members, 0)
        self.weights = dict.fromkeys(self._members, 1)
        self.unclear = 0
        self._errors = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        self._connection.close()
        assert self._errors == []

    @property
    def done(self):
        return sum(self.accepted.values())

    def more(self, number=2):
        """Wait until this number of further changes is ACTIVE."""
        # One change may have been accepted before, and the last one is ACTIVE when the next one is accepted.
        wanted = self.done + number + 2
        Cloud.until(lambda: self._errors or self.done >= wanted, f"{number} more changes are ACTIVE", 120)
        assert self._errors == []

    def _run(self):
        try:
            for weight in cycle((2, 3, 1)):
                for one in self._members:
                    if self._stopping.is_set():
                        return
                    self._change(one, weight)
        except BaseException as error:  # noqa: BLE001 - the test reads it
            self._errors.append(error)

    def _change(self, one, weight):
        body = {"member": {"weight": weight}}
        # 409: an earlier attempt was accepted without an answer, and its object is PENDING.
        while (answer := self._ask(self._connection.load_balancer.put, self._members[one], json=body)) == 409:
            time.sleep(0.1)
        assert answer["member"]["weight"] == weight
        self.accepted[one] += 1
        self.weights[one] = weight
        url = self._lab.cloud.url(f"loadbalancers/{one}")
        deadline = time.monotonic() + 60
        while True:
            status = self._ask(self._connection.load_balancer.get, url)["loadbalancer"]["provisioning_status"]
            if status == "ACTIVE":
                return
            assert status == "PENDING_UPDATE", status
            assert time.monotonic() < deadline, "the change is PENDING"
            time.sleep(0.1)

    def _ask(self, send, url, **more):
        """Return the answer, or 409; repeat the request while octavia-api is replaced."""
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = send(url, **more)
            except kill_lab.FAILED as error:
                assert time.monotonic() < deadline, "octavia-api does not answer"
                self.unclear += "Connection refused" not in str(error)
                time.sleep(0.1)
                continue
            if answer.status_code == 409:
                return 409
            assert answer.status_code == 200, answer.text
            return answer.json()


def revisions(lab):
    """Return the newest revisions that the live processes know, by kind."""
    now = lab.database.now()
    found = {}
    for row in processes(lab).values():
        if row.seen_at > now - 5:
            found.setdefault(row.kind, set()).add(row.schema_revision)
    return found


def all_of(revision):
    return {one: {revision} for one in ("controller", "health-manager", "provider-agent")}


def log_of(lab, name):
    return lab.stack.supervision.log(name).read_text(encoding="utf-8")


def replace(lab, versions, name):
    """Replace a program by the new version."""
    (program,) = [of_version(one, versions.new) for one in lab.stack.programs() if one.name == name]
    lab.stack.supervision.stop(name)
    lab.stack.supervision.start(program)
    lab.stack.supervision.wait_ready(program, 60)


def agent_folders(lab, amphora_id):
    """Return the folders from which the processes of an amphora import."""
    found = set()
    for process in find_by_last_argument(str(lab.settings.amphorae / amphora_id / "spec.json")):
        words = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        paths = [word.removeprefix("PYTHONPATH=") for word in words if word.startswith("PYTHONPATH=")]
        found |= {path.partition(":")[0] for path in paths}
    return found


def upgrade(lab, versions, *words):
    return amphoractl(lab, "database", "upgrade", *words, folder=versions.new)


def test_a_release_is_upgraded_under_load(lab, versions, record_property):
    cloud, begun = lab.cloud, time.monotonic()
    balancers = [cloud.served("single"), cloud.served("pair", flavor_id=pairs(lab))]
    try:
        with (
            Traffic(cloud, balancers[0].vip_address, pause=0.05, timeout=5) as single,
            Traffic(cloud, balancers[1].vip_address, pause=0.05, timeout=5) as pair,
            Changes(lab, balancers) as changes,
        ):
            upgrade_everything(lab, versions, balancers, changes)
        record_property("release", previous.release_before())
        record_property("seconds", round(time.monotonic() - begun, 1))
        record_property("changes", changes.done)
        record_property("unclear", changes.unclear)
        for name, traffic in (("single", single), ("pair", pair)):
            record_property(name, dict(traffic.answers))
            record_property(f"gap_{name}", round(traffic.gap, 2))
        assert single.failed == pair.failed == 0, (single.answers, pair.answers)
    finally:
        forget_contract(lab, versions)
    lab.settled()
    assert {one.provisioning_status for one in cloud.balancers.load_balancers()} == {"ACTIVE"}
    for one in balancers:
        cloud.balanced(one.vip_address, {"member1": changes.weights[one.id], "member2": 1})
        rows = lab.database.read(lambda c, lb=one.id: c.execute(history(lb)).all())
        assert changes.accepted[one.id] <= len(rows) <= changes.accepted[one.id] + changes.unclear
        assert all(row.applied_at is not None for row in rows)


def history(load_balancer_id):
    mine = request.c.load_balancer_id == load_balancer_id, request.c.action == "update member"
    return sa.select(request).where(*mine)


def pairs(lab):
    data = json.dumps({"loadbalancer_topology": "ACTIVE_STANDBY"})
    profile = lab.cloud.balancers.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=data)
    return lab.cloud.balancers.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True).id


def upgrade_everything(lab, versions, balancers, changes):
    cloud = lab.cloud
    assert revisions(lab) == all_of(versions.release)
    changes.more()

    # 1. The schema. The processes of the release work on it.
    status, said = upgrade(lab, versions)
    assert (status, said["After"], said["Contract migrations"]) == (0, versions.expand, versions.contract), said
    assert said["Before"] < versions.expand
    cloud.served("on-new-schema", ("member1",))
    changes.more()
    newer = f"works with the schema {versions.expand}, newer than {versions.release} of this version"
    for name in REPLACED:
        cloud.until(lambda one=name: newer in log_of(lab, one), f"{name} has checked the schema")
    changes.more()
    assert revisions(lab) == all_of(versions.release)

    # 2. Controllers of both versions, in turn.
    (ours,) = controllers(lab)
    with second_controller(lab, versions.new):
        cloud.until(lambda: len(controllers(lab)) == 2, "the second controller is registered")
        (theirs,) = controllers(lab) - {ours}
        status, said = upgrade(lab, versions, "--contract")
        assert (status, ours in said, theirs in said) == (1, True, False), said
        for works, rests in ((theirs, ours), (ours, theirs)):
            left_to(lab, works, rests)
            changes.more()

        # 3. Every process, one at a time.
        for name in REPLACED:
            replace(lab, versions, name)
            changes.more()
    cloud.until(lambda: revisions(lab) == all_of(versions.contract), "all processes are of the new version")

    # 4. The agents. Those of the release continue to work.
    changes.more()
    before = cloud.amphorae(balancers[1])
    assert {str(versions.old)} == set().union(*(agent_folders(lab, one) for one in before))
    versions.boot(versions.new)
    status, said = amphoractl(lab, "rotate", "--loadbalancer", balancers[1].id, "--all", folder=versions.new)
    assert status == 0, said
    cloud.until(lambda: rotated(lab, said["ID"]), "the rotation has ended", 180)
    now = {one.id for one in of(cloud, balancers[1]).values()}
    assert len(now) == 2
    assert now.isdisjoint(before)
    assert {str(versions.new)} == set().union(*(agent_folders(lab, one) for one in now))
    changes.more()

    # 5. The contract migration.
    status, said = upgrade(lab, versions, "--contract")
    assert (status, said) == (0, {"Before": versions.expand, "After": versions.contract, "Contract migrations": ""})
    changes.more()


def rotated(lab, number):
    found = lab.database.read(lambda c: rotations.get_rotation(c, number))
    assert found.state.value != "paused", found.reason
    return found.ended_at is not None


def forget_contract(lab, versions):
    """Let the test, whose version does not know the contract migration, read the tables again."""
    engine = sa.create_engine(lab.settings.database_url)
    with engine.begin() as connection:
        back = sa.text("UPDATE alembic_version SET version_num = :expand WHERE version_num = :contract")
        connection.execute(back, {"expand": versions.expand, "contract": versions.contract})
        gone = sa.text("DELETE FROM schema_minimum WHERE revision = :contract")
        connection.execute(gone, {"contract": versions.contract})
    engine.dispose()
