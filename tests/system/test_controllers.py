# SPDX-License-Identifier: Apache-2.0
"""Two controllers share the work; after a crash of one, the other completes its unfinished work."""

import json
import os
import signal

import msgspec
import pytest
import sqlalchemy as sa
from cloud import Cloud
from sandbox_of_a_test import provider_agents

from amphora_driver.database import tables
from amphora_driver.model.enums import Kind
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = pytest.mark.root


@pytest.fixture
def second_controller(stack):
    """A second controller beside the sandbox's, as a Program with start and stop."""
    program = msgspec.structs.replace(controller(stack), name="amphora-controller-2", ready=lambda _: True)
    sockets = stack.settings.run / "sockets"
    before = set(sockets.glob("controller-*"))
    stack.supervision.start(program)
    Cloud.until(lambda: set(sockets.glob("controller-*")) - before, "the second controller listens")
    yield program
    stack.supervision.stop(program.name)


def controller(stack):
    return next(one for one in stack.programs() if one.name == "amphora-controller")


def kill(stack, name):
    """Send SIGKILL to the process and its children."""
    process = stack.supervision.running(name)
    for one in (process, *process.children()):
        one.signal(signal.SIGKILL)
    assert process.wait(10)


def owners(database):
    rows = database.read(lambda c: c.execute(sa.select(tables.job.c.owner)).scalars().all())
    return {owner for owner in rows if owner}


def test_two_controllers_share_the_work(cloud, second_controller, database):
    seen, made = set(), []

    def all_active():
        seen.update(owners(database))
        return all(cloud.balancers.get_load_balancer(one.id).provisioning_status == "ACTIVE" for one in made)

    # The faster controller claims a load balancer; after several, each has claimed one.
    while len(seen) < 2:
        assert len(made) < 12, "each controller claims a load balancer"
        for _ in range(2):
            name = f"shared-{len(made)}"
            made.append(cloud.balancers.create_load_balancer(name=name, vip_subnet_id=topology.VIP_SUBNET))
        cloud.until(all_active, "all load balancers are ACTIVE")
    for one in made:
        assert len(cloud.amphorae(one)) == 1, "the load balancer has one amphora"


EARLIER = [pytest.param(one, marks=pytest.mark.extended) for one in ("Record", "Boot", "Plug", "AwaitAgent")]


@pytest.mark.parametrize("moment", [*EARLIER, "Push"])
def test_a_creation_is_completed_after_a_controller_crash(cloud, stack, moment):
    log = stack.supervision.log("amphora-controller")
    begin = log.stat().st_size

    def reached():
        with log.open("rb") as file:
            file.seek(begin)
            return f": the controller starts step {moment} ".encode() in file.read()

    made = cloud.balancers.create_load_balancer(name=f"killed-{moment.lower()}", vip_subnet_id=topology.VIP_SUBNET)
    cloud.until(reached, f"the controller starts step {moment}")
    kill(stack, "amphora-controller")
    assert cloud.balancers.get_load_balancer(made.id).provisioning_status in ("PENDING_CREATE", "ACTIVE")
    stack.up()
    cloud.active(made.id)
    assert len(cloud.amphorae(made)) == 1, "the load balancer has one amphora"
    on_the_machine = {path.name for path in stack.settings.amphorae.iterdir() if path.is_dir()}
    assert on_the_machine == cloud.amphorae(made)


def test_an_amphora_that_is_killed_during_its_boot_is_booted_again(cloud, stack):
    made = cloud.balancers.create_load_balancer(name="stillborn", vip_subnet_id=topology.VIP_SUBNET)
    amphora_id = cloud.until(lambda: next(iter(cloud.amphorae(made)), None), "the amphora is recorded")
    record = stack.settings.amphorae / amphora_id / "process.json"
    pid = json.loads(cloud.until(lambda: record.exists() and record.read_text(), "the machine runs"))["pid"]
    os.kill(pid, signal.SIGKILL)
    cloud.active(made.id)
    assert cloud.amphorae(made) == {amphora_id}


def test_a_request_without_a_running_controller_is_not_lost(cloud, stack):
    balancer = cloud.served("waiting", ("member1",))
    pool = cloud.pool_of(balancer)
    kill(stack, "amphora-controller")
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "PENDING_UPDATE"
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}, "member1 serves meanwhile"
    stack.up()
    cloud.active(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})


def test_statuses_are_reported_after_octavias_agent_restarts(cloud, stack):
    balancer = cloud.served("deaf", ("member1",))
    pool = cloud.pool_of(balancer)
    stack.supervision.stop("octavia-driver-agent")
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.until(lambda: "member2" in cloud.answers(balancer.vip_address, 4), "member2 serves")
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "PENDING_UPDATE"
    stack.up()
    cloud.active(balancer.id)


def test_the_provider_agent_restarts_without_octavias_agent(cloud, stack):
    """octavia-driver-agent starts one process once; its child processes replace it and each other."""
    balancer = cloud.served("told", ("member1",))
    pool = cloud.pool_of(balancer)

    (watcher,) = provider_agents(stack)
    both = watcher.children()
    assert len(both) == 2, "the provider agent has a reporter and a standby"
    watcher.signal(signal.SIGKILL)
    cloud.until(lambda: sum(one.alive() for one in both) == 1, "the reporter ends, because its parent has ended")
    (standby,) = (one for one in both if one.alive())
    after = cloud.until(lambda: len(found := standby.children()) == 2 and found, "the standby has two children")
    for one in after:
        one.signal(signal.SIGKILL)
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(balancer.id)


def test_the_provider_agent_ends_with_a_killed_octavias_agent(cloud, stack):
    """The provider agent's processes end with Octavia's agent, whose next start creates new ones."""
    balancer = cloud.served("told-by-others", ("member1",))
    # Another test may have killed the children of Octavia's agent.
    stack.supervision.stop("octavia-driver-agent")
    stack.up()
    octavia = stack.supervision.running("octavia-driver-agent")
    (watcher,) = provider_agents(stack)
    both = cloud.until(lambda: len(found := watcher.children()) == 2 and found, "the provider agent has two children")
    ours = [watcher, *both]
    octavia.signal(signal.SIGKILL)
    cloud.until(lambda: not any(one.alive() for one in ours), "the provider agent has ended")
    # Octavia's own processes have not ended.
    os.killpg(octavia.pid, signal.SIGKILL)
    cloud.balancers.create_member(cloud.pool_of(balancer), **cloud.member("member2"))
    stack.up()
    cloud.active(balancer.id)


def test_an_unrecorded_answer_of_a_different_rendering_is_replaced(cloud, stack, database):
    """A controller crashed before it recorded the agent's answer; its successor renders different text."""
    balancer = cloud.served("renamed", ("member1",))
    stack.supervision.stop("amphora-controller")

    mine, its_amphora = tables.job.c.load_balancer_id == balancer.id, tables.amphora.c.load_balancer_id == balancer.id

    def forget_the_answer(connection):
        found = connection.execute(sa.select(tables.job.c.generation).where(mine)).scalar_one()
        listener = desired_objects.load_object(connection, Kind.LISTENER, cloud.listener_of(balancer).id)
        desired_objects.update_objects(
            connection, found, [msgspec.structs.replace(listener, timeout_client_data=61_000)]
        )
        connection.execute(tables.job.update().where(mine).values(applied=found - 1, dirty=True, due_at=0.0))
        connection.execute(tables.amphora.update().where(its_amphora).values(confirmed=found - 1))
        return found

    generation = database.write(forget_the_answer)
    stack.up()
    applied = sa.select(tables.job.c.applied).where(mine)
    cloud.until(lambda: database.read(lambda c: c.scalar(applied)) == generation + 1, "the next generation is served")
    assert cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}
