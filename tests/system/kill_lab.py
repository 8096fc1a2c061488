# SPDX-License-Identifier: Apache-2.0
"""A sandbox in which processes are killed at chosen points, and checks of the state that remains.

Invariant: a process is killed by its own PID, and its death is verified. A test fails if its failpoint is not reached.
"""

import json
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import keystoneauth1.exceptions
import openstack.exceptions
import requests.exceptions
import sqlalchemy as sa
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver import config
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database import tables, tables_fleet
from amphora_driver.database.engine import Database
from amphora_driver.failpoints import VARIABLE
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import find_by_last_argument
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import failovers, spare_pools, status_outbox
from sandbox import demo

# The errors a client gets if the API process is killed or cannot complete the request.
FAILED = (
    OSError,
    requests.exceptions.RequestException,
    keystoneauth1.exceptions.ClientException,
    openstack.exceptions.SDKException,
)
# Seconds for a user's request after any kill.
TIME_LIMIT = 60.0
# Seconds for each killed process.
LIFE = 15.0
# Short intervals, because the kill matrix would otherwise take an hour.
HASTE = {
    "amp_controller": {
        "lease": "1",
        "retry_first": "0.1",
        "retry_most": "2",
        "forget_vip_after": "3",
        "housekeeping_interval": "1",
        "orphan_grace": "3",
    },
    "amp_octavia": {"commit_timeout": "2", "audit_after": "1", "audit_interval": "0.5"},
    "amp_certificates": {"settle": "2"},
}


def in_step(first, *others):
    """Return the points of these kinds of steps in order.

    The point before a step equals the point after the mark of the previous step, and is omitted.
    """
    return (f"{first}-before", *(f"{kind}-{moment}" for kind in (first, *others) for moment in ("done", "marked")))


@contextmanager
def lab(*, haste=None, **choices):
    """Run a sandbox with failpoints; `haste` has additional provider options."""
    with tempfile.TemporaryDirectory(prefix="adk-") as folder:
        os.environ[VARIABLE] = folder
        try:
            with running(options={**HASTE, **(haste or {})}, **choices) as (stack, settings):
                connection = demo.connect(settings)
                database = Database(settings.database_url)
                made = Lab(stack, settings, connection, database, Path(folder))
                try:
                    yield made
                    made.disarm()
                    made.cloud.clean()
                    made.settled()
                finally:
                    made.disarm()
                    database.dispose()
                    connection.close()
        finally:
            del os.environ[VARIABLE]


class Lab:
    """One sandbox, and the failpoints of its processes."""

    def __init__(self, stack, settings, connection, database, points):
        self.stack = stack
        self.settings = settings
        self.connection = connection
        self.database = database
        self.cloud = Cloud(settings, connection, database)
        self._points = points
        self._network = LocalNetwork(config.load([str(settings.driver_configuration)]), database)
        self._compute = NetnsCompute(config.load([str(settings.driver_configuration)]), self._network)

    # --- kills --------------------------------------------------------------------------------------------------------

    def arm(self, *points):
        """Kill the first process at one of these points."""
        for point in points:
            (self._points / point).write_text("die", encoding="ascii")

    def deadly(self, point):
        """Kill every process at this point."""
        (self._points / point).write_text("die again", encoding="ascii")

    def hold(self, point):
        """Suspend a process at this point."""
        # A process that was killed while it waited leaves this file.
        (self._points / f"{point}.here").unlink(missing_ok=True)
        (self._points / point).write_text("wait", encoding="ascii")

    def held(self, point, seconds=TIME_LIMIT):
        """Wait until a process is suspended at this point."""
        Cloud.until((self._points / f"{point}.here").exists, f"a process waits at {point}", seconds)

    def let_go(self, point):
        """Resume the suspended process."""
        (self._points / point).unlink()

    def armed(self):
        """Return the unreached points."""
        return {path.name for path in self._points.iterdir() if path.suffix != ".here"}

    def beside(self, request):
        """Send a request in a thread; return a function that waits for it and returns its success."""
        outcome = []

        def make():
            try:
                request()
                outcome.append(True)
            except (*FAILED, AssertionError):
                outcome.append(False)

        thread = threading.Thread(target=make)
        thread.start()

        def end():
            thread.join(TIME_LIMIT)
            assert outcome, "the API answers the request"
            return outcome[0]

        return end

    def disarm(self):
        for path in self._points.iterdir():
            path.unlink(missing_ok=True)

    def reached(self):
        """Wait until a process was killed at every armed point; held processes stay held."""
        seconds = TIME_LIMIT + LIFE * len(self._armed_kills())
        deadline = time.monotonic() + seconds
        while left := self._armed_kills():
            assert time.monotonic() < deadline, f"points that no process reached in {seconds:.0f} s: {sorted(left)}"
            time.sleep(0.02)

    def _armed_kills(self):
        found = set()
        for name in self.armed():
            with suppress(FileNotFoundError):
                if (self._points / name).read_text(encoding="ascii") == "die":
                    found.add(name)
        return found

    # --- requests to Octavia's API while its processes are killed -----------------------------------------------------

    def failed(self, request):
        """Send a request whose process is killed; return when the API answers again."""
        try:
            request()
        except FAILED as error:
            self.reached()
            self.answers()
            return error
        raise AssertionError("the API answered the request of a process that should have been killed")

    def set_members(self, pool_id, names):
        """Replace the members of a pool."""
        members = [self.cloud.member(one) for one in names]
        answer = self.connection.load_balancer.put(
            self.cloud.url(f"pools/{pool_id}/members"), json={"members": members}
        )
        assert answer.status_code < 300, answer.text

    def survive(self, request, *points):
        """Send a request while a process is killed at each of these points; return the answer."""
        self.arm(*points)
        answer = request()
        self.reached()
        self.settled()
        return answer

    def refused(self, request, points):
        """Send a request for each of these points, at which the API is killed; the request leaves no trace."""
        for point in points:
            self.arm(point)
            self.failed(request)
            self.settled()

    def answers(self):
        """Wait until the API answers."""

        def ask():
            try:
                return self.connection.load_balancer.get(self.settings.endpoint).status_code < 500
            except FAILED:
                return False

        Cloud.until(ask, "the API answers")

    # --- remaining state ----------------------------------------------------------------------------------------------

    def settled(self, seconds=TIME_LIMIT):
        """Wait until no object is PENDING, no job is left, and no orphan exists."""
        deadline = time.monotonic() + seconds
        # The cheapest check is first: the check with Octavia's API takes 0.1 s.
        while trouble := (self._undone() or self._undecided() or self._undone() or self.unowned()):
            assert time.monotonic() < deadline, f"after {seconds:.0f} s: {trouble}"
            time.sleep(0.1)

    def _undecided(self):
        """Return the objects that are PENDING in Octavia."""
        found = []
        for kind in ("loadbalancers", "listeners", "pools", "healthmonitors", "l7policies"):
            rows = self.connection.load_balancer.get(self.cloud.url(kind)).json()[kind]
            found += [(kind, row["id"], row["provisioning_status"]) for row in rows]
            if kind == "pools":
                for row in rows:
                    members = self.connection.load_balancer.get(self.cloud.url(f"pools/{row['id']}/members")).json()
                    # Another process may delete the pool meanwhile.
                    found += [("member", one["id"], one["provisioning_status"]) for one in members.get("members", [])]
        return [one for one in found if one[2].startswith("PENDING")]

    def _undone(self):
        """Return the provider's unfinished jobs and unreported statuses."""

        def read(connection):
            work = tables.job
            busy = sa.select(work.c.load_balancer_id, work.c.generation, work.c.applied, work.c.committed).where(
                sa.or_(
                    work.c.dirty,
                    work.c.owner.is_not(None),
                    work.c.applied < work.c.generation,
                    work.c.committed < work.c.generation,
                    work.c.read_back,
                ),
                # The spare pool's job never ends; the test checks its content.
                work.c.op != spare_pools.OP,
            )
            said = [(one.object_id, one.provisioning) for one in status_outbox.list_due_reports(connection, 100)]
            replacing = [("is being replaced", one.amphora_id) for one in failovers.list_open_failovers(connection)]
            return [tuple(row) for row in connection.execute(busy)] + said + replacing

        return self.database.read(read)

    def unowned(self):
        """Return machines, ports and rows that belong to no load balancer of Octavia."""
        known = {row["id"] for row in self._load_balancers()}

        def read(connection):
            def values(column):
                return set(connection.execute(sa.select(column).distinct()).scalars())

            return (
                {row.id: row.load_balancer_id for row in connection.execute(sa.select(tables.amphora))},
                {row.id: row.owner for row in connection.execute(sa.select(tables.local_port))},
                {
                    table.name: values(table.c.load_balancer_id)
                    for table in (
                        tables.job,
                        tables.desired_object,
                        tables.object_status,
                        tables.secret,
                        tables.vip_claim,
                    )
                },
                values(tables.amphora_heartbeat.c.amphora_id),
                values(tables.orphan.c.id),
                {row.load_balancer_id for row in spare_pools.list_pools(connection)},
            )

        amphorae, ports, owned, seen, noted, pools = self.database.read(read)
        found = [f"job without a load balancer: {one}" for one in owned["job"] - known - pools]
        found += [f"unknown to the provider: {one}" for one in known - owned["job"]]
        for name in ("desired_object", "object_status", "secret"):
            found += [f"{name} of {one}" for one in owned[name] - owned["job"]]
        found += [f"claim of {one}" for one in owned["vip_claim"] - owned["job"]]
        found += [f"amphora {one} of {of}" for one, of in amphorae.items() if of not in owned["job"]]
        found += [f"seen: {one}" for one in seen - amphorae.keys()]
        found += [f"noted as an orphan: {one}" for one in noted]
        hosts = {name.removeprefix(f"{self.settings.prefix}-") for name in namespaces.names(self.settings.prefix)}
        owners = {*amphorae, *hosts, *(f"lb-{one}" for one in owned["job"])}
        found += [f"port {one} of {of}" for one, of in ports.items() if of not in owners and not of.startswith("user-")]
        folders = {path.name for path in self.settings.amphorae.iterdir()}
        found += [f"folder of {one}" for one in folders - amphorae.keys()]
        found += [f"no folder of {one}" for one in amphorae.keys() - folders]
        fixed = {"switch", "control", "witness", "client", "member1", "member2", "member3"}
        machines = {self._compute.namespace(one).removeprefix(f"{self.settings.prefix}-") for one in amphorae}
        found += [f"namespace {one}" for one in hosts - fixed - machines]
        found += [
            f"process of {one}"
            for one in folders - amphorae.keys()
            if find_by_last_argument(str(self.settings.amphorae / one / "spec.json"))
        ]
        found += [
            f"{len(running)} machines of {one}"
            for one in amphorae
            # An amphora has two such processes: the outermost one and the first one inside.
            if len(running := find_by_last_argument(str(self.settings.amphorae / one / "spec.json"))) > 2
        ]
        return found

    # --- machines and fail-overs --------------------------------------------------------------------------------------

    def power_off(self, amphora_id):
        """Kill a machine without a message, as in a power cut."""
        record = self.settings.amphorae / amphora_id / "process.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)

    def replacements(self, load_balancer_id):
        """Return all fail-overs of a load balancer, oldest first."""
        table = tables_fleet.failover
        mine = sa.select(table).where(table.c.load_balancer_id == load_balancer_id).order_by(table.c.id)
        return self.database.read(lambda connection: connection.execute(mine).all())

    def _load_balancers(self):
        return self.connection.load_balancer.get(self.cloud.url("loadbalancers")).json()["loadbalancers"]


class ContinuousClient:
    """A client that sends requests to one load balancer continuously.

    No part of the control plane is in the path of a request, so no request may fail.
    """

    def __init__(self, cloud, address):
        self._cloud = cloud
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.failed = []
        self.answered = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _ask(self):
        while not self._over.wait(0.1):
            for said, number in self._cloud.answers(self._address, 2).items():
                if said.startswith("member"):
                    self.answered += number
                else:
                    self.failed.append(said)
