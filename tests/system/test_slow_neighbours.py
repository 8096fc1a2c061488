# SPDX-License-Identifier: Apache-2.0
"""Unreachable amphorae delay their own load balancers only.

The controller has two workers, and more amphorae than that are unreachable. Leases last longer than every test, so no
test passes because of a lease expiry.
"""

import signal
import time
from contextlib import suppress

import pytest
import sqlalchemy as sa
from sandbox_of_a_test import running

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job
from amphora_driver.host import namespaces
from amphora_driver.queue import local_socket
from amphora_driver.store.requests import RequestRecorder
from sandbox import demo, topology

pytestmark = pytest.mark.root

WORKERS, LEASE = 2, 120
# More unreachable amphorae than workers.
HOLES = 3
# Seconds. A connection to an agent may take 60 and a lease 120, so a wait for either exceeds SOON. Usual values are far
# below SOON, but the machine may be busy.
SOON, CONNECT = 25.0, 60


@pytest.fixture(scope="module")
def sandbox():
    slow = {
        "amp_controller": {"threads": str(WORKERS), "lease": str(LEASE)},
        "amp_agent": {"connect_timeout": str(CONNECT)},
    }
    with running(options=slow) as (stack, settings):
        yield stack, settings


@pytest.fixture(scope="module")
def settings(sandbox):
    return sandbox[1]


@pytest.fixture(scope="module")
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="module")
def database(settings):
    database = Database(settings.database_url)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def connection(settings):
    connection = demo.connect(settings)
    yield connection
    connection.close()


@pytest.fixture
def recorder(cloud, settings, database):
    """Call the driver directly, because Octavia refuses requests while the load balancer is PENDING."""
    sockets = str(settings.run / "sockets")
    made = RequestRecorder(database, lambda node: None)

    def ask(call, load_balancer_id):
        getattr(made, call)(load_balancer_id)
        local_socket.wake_role(sockets, local_socket.CONTROLLER)
        local_socket.wake_role(sockets, local_socket.REPORTER)

    return ask


@pytest.fixture
def unreachable(cloud, settings):
    """Makes amphorae unreachable until the test ends."""
    made = UnreachableAmphorae(settings)
    yield made
    made.undo()


class UnreachableAmphorae:
    """Makes amphorae unreachable in two ways: a stopped machine, and a disabled interface."""

    def __init__(self, settings):
        self._settings = settings
        self._frozen = []
        self._cut = []

    def freeze(self, amphora_id):
        for process in namespaces.processes(self._namespace(amphora_id)):
            process.signal(signal.SIGSTOP)
            self._frozen.append(process)

    def cut(self, amphora_id):
        self._link(amphora_id, "down")
        self._cut.append(amphora_id)

    def undo(self):
        for process in self._frozen:
            with suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
        for amphora_id in self._cut:
            if namespaces.exists(self._namespace(amphora_id)):
                self._link(amphora_id, "up")

    def _namespace(self, amphora_id):
        return f"{self._settings.prefix}-{amphora_id[:13]}"

    def _link(self, amphora_id, state):
        def work(kernel):
            kernel.link("set", index=kernel.link_lookup(ifname="eth0")[0], state=state)

        namespaces.run_with_netlink(namespaces.path(self._namespace(amphora_id)), work)


def booting(cloud, name):
    """Create a load balancer and wait until its machine runs; return load balancer and amphora id."""
    made = cloud.balancers.create_load_balancer(name=name, vip_subnet_id=topology.VIP_SUBNET)
    amphora_id = cloud.until(lambda: next(iter(cloud.amphorae(made)), None), "an amphora is recorded")
    cloud.until((cloud.settings.amphorae / amphora_id / "process.json").exists, "the machine runs")
    return made, amphora_id


def owners(database):
    return [one for one in database.read(lambda c: c.execute(sa.select(job.c.owner)).scalars().all()) if one]


def make_unreachable(cloud, unreachable, name, kind="freeze"):
    """Start a change of a load balancer whose amphora does not answer."""
    balancer = cloud.served(name, ("member1",))
    pool = cloud.pool_of(balancer)
    (amphora_id,) = cloud.amphorae(balancer)
    getattr(unreachable, kind)(amphora_id)
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    return balancer, amphora_id


@pytest.mark.extended
def test_black_holes_delay_no_other_load_balancer(cloud, stack, unreachable, database):
    log = stack.supervision.log("amphora-controller")
    well = cloud.served("well", ("member1",))
    pool = cloud.pool_of(well)
    make_unreachable(cloud, unreachable, "cut off", "cut")
    pools = {}
    for number in range(HOLES):
        hole = cloud.served(f"hole-{number}", ("member1",))
        pools[hole.id] = cloud.pool_of(hole)
        unreachable.freeze(*cloud.amphorae(hole))
    begin, asked = log.stat().st_size, time.monotonic()
    for one in pools.values():
        cloud.balancers.create_member(one, **cloud.member("member2"))
    cloud.until(lambda: len(owners(database)) >= WORKERS, "all workers wait")
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(well.id)
    # A second for a free worker, and the change; an unreachable amphora blocks its worker for 10 s or more.
    assert time.monotonic() - asked < SOON
    with log.open(encoding="utf-8") as file:
        file.seek(begin)
        lines = file.readlines()
    served = next(number for number, line in enumerate(lines) if f"{well.id}: the controller starts step Push" in line)
    given_up = [number for number, line in enumerate(lines) if "again in" in line and any(one in line for one in pools)]
    assert not given_up or served < given_up[0], "the push ends before the first time-out"
    cloud.balanced(well.vip_address, {"member1": 1, "member2": 1})


def test_a_deletion_does_not_wait_for_unreachable_amphorae(cloud, unreachable, database, recorder):
    balancer, amphora_id = make_unreachable(cloud, unreachable, "hangs")
    cloud.until(lambda: owners(database), "a controller works on the load balancer")
    begin = time.monotonic()
    recorder("delete_load_balancer", balancer.id)
    cloud.until(lambda: not (cloud.settings.amphorae / amphora_id).exists(), "the amphora is deleted")
    assert time.monotonic() - begin < SOON
    cloud.gone(balancer.id)


def test_a_fail_over_does_not_wait_for_unreachable_amphorae(cloud, unreachable, database, recorder):
    balancer, amphora_id = make_unreachable(cloud, unreachable, "replaced")
    cloud.until(lambda: owners(database), "a controller works on the load balancer")
    begin = time.monotonic()
    recorder("fail_over", balancer.id)
    cloud.until(lambda: cloud.amphorae(balancer) - {amphora_id}, "another amphora is recorded")
    assert time.monotonic() - begin < SOON
    cloud.active(balancer.id)
    cloud.until(lambda: amphora_id not in cloud.amphorae(balancer), "the old amphora is deleted")
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})


def test_booting_machines_hold_neither_worker_nor_lease(cloud, unreachable, database, recorder):
    frozen = []
    for number in range(WORKERS + 1):
        made, amphora_id = booting(cloud, f"slow-boot-{number}")
        unreachable.freeze(amphora_id)
        frozen.append(made)
    begin = time.monotonic()
    cloud.load_balancer("quick-boot")
    assert time.monotonic() - begin < SOON, "the creation does not wait"
    cloud.until(lambda: not owners(database), "no controller works on booting load balancers")
    first = frozen.pop()
    (amphora_id,) = cloud.amphorae(first)
    begin = time.monotonic()
    recorder("delete_load_balancer", first.id)
    cloud.until(lambda: not (cloud.settings.amphorae / amphora_id).exists(), "the amphora is deleted")
    assert time.monotonic() - begin < SOON, "the deletion does not wait for the boot"
    unreachable.undo()
    for one in frozen:
        cloud.active(one.id)


def test_jobs_of_a_killed_controller_continue_before_the_lease_expires(cloud, stack, unreachable, database):
    balancer, _ = make_unreachable(cloud, unreachable, "orphaned")
    cloud.until(lambda: owners(database), "a controller works on the load balancer")
    process = stack.supervision.running("amphora-controller")
    for one in (process, *process.children()):
        one.signal(signal.SIGKILL)
    assert process.wait(10)
    before = owners(database)
    assert before, "the killed controller's lease remains"
    unreachable.undo()
    begin = time.monotonic()
    stack.up()
    cloud.active(balancer.id)
    assert time.monotonic() - begin < LEASE / 2
    assert not set(before) & set(owners(database))


def test_a_stopping_controller_releases_its_leases(cloud, stack, unreachable, database):
    balancer, _ = make_unreachable(cloud, unreachable, "given-back")
    cloud.until(lambda: owners(database), "a controller works on the load balancer")
    stack.supervision.stop("amphora-controller")
    assert owners(database) == []
    unreachable.undo()
    stack.up()
    cloud.active(balancer.id)
