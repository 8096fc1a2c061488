# SPDX-License-Identifier: Apache-2.0
"""Rotations of amphorae through Octavia's API while their load balancers serve clients.

`AMPHORA_ROTATION=20` makes it twenty load balancers. An amphora takes one or two processor seconds to boot, and
two processors run the whole test.
"""

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from cloud import Cloud
from rotation_lab import Clients, Counting, Fleet
from sandbox_of_a_test import AGENT_PYTHON, running

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty, job
from amphora_driver.store import process_registry, rotations
from amphora_driver.store.rotations import RotationState
from sandbox import demo

pytestmark = pytest.mark.root

NUMBER = int(os.environ.get("AMPHORA_ROTATION", "6"))
# One load balancer in five is a pair.
PAIRS = max(1, NUMBER // 5)
# Time-out of a rotation on a busy machine, in seconds.
TIME_LIMIT = 60.0 + 30.0 * NUMBER
# The VIPs do not answer until the new amphora has announced them: milliseconds on an idle machine. Eight sandboxes may
# run at the same time.
MOST_OUTAGE = 8.0
OPTIONS = {
    "amp_controller": {
        "give_up_after": "3",
        "retry_first": "0.2",
        "retry_most": "1",
        "lease": "3",
        "drain_timeout": "5",
    },
    "amp_rotation": {"settle": "1", "replacement_timeout": "180"},
    # An overloaded machine must not count as silent.
    "amp_failover": {"silent_after": "30"},
    "amp_vrrp": {"advert_interval": "0.3"},
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The agents' Python, which a test can make fail."""
    path = tmp_path_factory.mktemp("python") / "python"
    _working(path)
    return path


def _working(path):
    _replace(path, f'#!/bin/sh\nexec {AGENT_PYTHON} "$@"\n')


def _replace(path, text):
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o755)
    new.rename(path)


@contextmanager
def broken(path):
    _replace(path, "#!/bin/sh\nexit 3\n")
    try:
        yield
    finally:
        _working(path)


@pytest.fixture(scope="module")
def sandbox(python):
    options = {**OPTIONS, "amp_compute_netns": {"agent_python": str(python)}}
    with running(options=options) as (stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        try:
            yield stack, Fleet(cloud)
            cloud.clean()
        finally:
            database.dispose()
            connection.close()


@pytest.fixture(scope="module")
def fleet(sandbox):
    return sandbox[1]


@pytest.fixture(scope="module")
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="module")
def balancers(fleet, request):
    """Load balancers to rotate; only two, none of them a pair, if no extended test of this file runs."""
    many = any(item.get_closest_marker("extended") for item in request.session.items if item.path == request.path)
    number, pairs = (NUMBER, PAIRS) if many else (2, 0)
    data = json.dumps({"loadbalancer_topology": "ACTIVE_STANDBY"})
    made = fleet.cloud.balancers
    profile = made.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=data)
    flavor = made.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True)
    return fleet.make(number, pairs, flavor.id)


@pytest.fixture(autouse=True)
def no_active_rotation(fleet):
    """End the rotations that a failed test has left."""
    yield
    left = fleet.database.read(rotations.get_active_rotation)
    if left is not None and left.state is not RotationState.ABORTED:
        fleet.database.write(lambda c: rotations.abort_rotation(c, left.id))
    Cloud.until(lambda: fleet.database.read(rotations.get_active_rotation) is None, "no rotation is active", TIME_LIMIT)


@pytest.fixture
def second_controller(stack, fleet):
    """Another controller beside the one of the sandbox."""
    (first,) = [one for one in stack.programs() if one.name == "amphora-controller"]
    program = msgspec.structs.replace(first, name="amphora-controller-2", ready=lambda _: True)
    stack.supervision.start(program)
    Cloud.until(lambda: len(controllers(fleet)) == 2, "the second controller is registered")
    yield program
    stack.supervision.stop(program.name)
    stack.up()
    Cloud.until(lambda: len(controllers(fleet)) == 1, "the row of the second controller is deleted")


def controllers(fleet):
    rows = fleet.database.read(lambda c: process_registry.list_processes(c, process_registry.ProcessKind.CONTROLLER))
    return {row.name: row for row in rows}


def kill(stack, pid):
    """Send SIGKILL to the controller of this process and to its parent; return the program."""
    for name in ("amphora-controller", "amphora-controller-2"):
        process = stack.supervision.running(name)
        # Each thread of the process has its own list of children.
        lists = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [int(one) for path in lists for one in path.read_text(encoding="ascii").split()]
        if pid in (process.pid, *children):
            process.signal(signal.SIGKILL)
            for one in children:
                os.kill(one, signal.SIGKILL)
            assert process.wait(10)
            return name
    raise AssertionError(f"no controller has process {pid}")


def rotating(fleet):
    """Return the name of the controller that executes the rotation."""
    query = sa.select(duty.c.owner).where(duty.c.name == "rotation", duty.c.leased_until > 0.0)
    return fleet.database.read(lambda c: c.scalar(query))


def settled(fleet, balancers):
    """Wait until the load balancers are ACTIVE and ONLINE."""
    for one in balancers:
        Cloud.until(lambda one=one: fleet.status(one) == ("ACTIVE", "ONLINE"), f"{one.name} is ONLINE", 60)


def told(record_property, clients):
    outages = sorted(clients.outage.values())
    record_property("outages", [round(one, 2) for one in outages])
    record_property("failed", sorted(clients.failed.values()))
    assert outages[-1] < MOST_OUTAGE, outages


@pytest.mark.extended
def test_a_rotation_under_load_is_paused_resumed_aborted_and_repeated(fleet, balancers, record_property):
    before = fleet.serving(balancers)
    with Clients(fleet.cloud, balancers) as clients, Counting(fleet.database) as counting:
        first = fleet.ctl("rotate", "--all", "--max-unavailable", "2")["ID"]
        Cloud.until(lambda: fleet.counts(first).get("running") == 2, "two replacements run", TIME_LIMIT)
        # The test writes the row itself, because a command takes many seconds to start on a busy machine.
        fleet.database.write(lambda c: rotations.pause_rotation(c, first, "a test paused it"))
        Cloud.until(lambda: "running" not in fleet.counts(first), "the replacements have ended", TIME_LIMIT)
        paused = fleet.counts(first)
        assert paused == {"done": 2, "waiting": NUMBER - 2}
        shown = fleet.ctl("rotation", "show", str(first))
        assert (shown["State"], shown["Reason"]) == ("paused", "a test paused it")
        assert shown["Load balancers"] == paused, "a paused rotation begins no replacement"
        assert shown["Seconds each"] > 0

        fleet.database.write(lambda c: rotations.resume_rotation(c, first))
        Cloud.until(lambda: fleet.counts(first).get("running") == 2, "the rotation continues", 30)
        fleet.database.write(lambda c: rotations.abort_rotation(c, first))
        assert fleet.ended(first, TIME_LIMIT).state.value == "aborted"
        assert fleet.counts(first) == {"done": 4, "skipped": NUMBER - 4}

        second = fleet.rotate(2, left_of=first)
        assert fleet.ended(second, TIME_LIMIT).state.value == "done"
        settled(fleet, balancers)
    now = fleet.serving(balancers)
    assert all(now[one].isdisjoint(before[one]) for one in before)
    assert fleet.failovers(first, second) == {one: len(ids) for one, ids in before.items()}, (
        "each amphora is replaced once"
    )
    assert counting.most_turns == 2
    assert counting.most_replaced <= 2
    took = [one.ended_at - one.begun_at for one in fleet.items(first) + fleet.items(second) if one.state == "done"]
    record_property("seconds each", [round(one, 1) for one in took])
    told(record_property, clients)


@pytest.mark.extended
def test_a_failed_replacement_pauses_the_rotation(fleet, balancers, python):
    one, other = balancers[-2:]
    before = fleet.serving([one, other])
    with Clients(fleet.cloud, [one, other]) as clients:
        with broken(python):
            number = fleet.rotate(1, everything=True, load_balancers=(one.id, other.id))
            found = Cloud.until(
                lambda: (now := fleet.rotation(number)).state.value == "paused" and now,
                "the rotation is paused",
                TIME_LIMIT,
            )
            assert one.id in found.reason
            assert fleet.counts(number) == {"failed": 1, "waiting": 1}
        assert fleet.failovers(number) == {one.id: 1}, "no other load balancer is replaced"
        fleet.database.write(lambda c: rotations.resume_rotation(c, number))
        fleet.ended(number, TIME_LIMIT)
    assert fleet.counts(number) == {"done": 2}
    now = fleet.serving([one, other])
    assert all(now[name].isdisjoint(before[name]) for name in before)
    assert max(clients.outage.values()) < MOST_OUTAGE, "the old amphora serves until the new one serves"
    settled(fleet, [one, other])


@pytest.mark.extended
def test_another_controller_continues_the_rotation_of_a_killed_one(
    fleet, balancers, stack, second_controller, record_property
):
    before = fleet.serving(balancers)
    with Clients(fleet.cloud, balancers) as clients, Counting(fleet.database) as counting:
        number = fleet.rotate(2, everything=True)
        Cloud.until(
            lambda: (now := fleet.counts(number)).get("done") and now.get("running"),
            "the second replacement runs",
            TIME_LIMIT,
        )
        name = rotating(fleet)
        killed = kill(stack, int(name.split(":")[1]))
        Cloud.until(lambda: name not in controllers(fleet), "the killed controller's row is deleted", 30)
        fleet.ended(number, TIME_LIMIT)
        settled(fleet, balancers)
    assert killed in ("amphora-controller", second_controller.name)
    now = fleet.serving(balancers)
    assert all(now[one].isdisjoint(before[one]) for one in before)
    assert fleet.failovers(number) == {one: len(ids) for one, ids in before.items()}, "each amphora is replaced once"
    assert counting.most_turns <= 2
    assert counting.most_replaced <= 2
    told(record_property, clients)


def said(stack, words):
    """Count a message in the logs of both controllers."""
    logs = [stack.supervision.log(name) for name in ("amphora-controller", "amphora-controller-2")]
    return sum(log.read_text(encoding="utf-8").count(words) for log in logs)


@pytest.mark.extended
def test_a_draining_controller_leaves_the_rotation_to_the_other(fleet, balancers, stack, second_controller):
    chosen = balancers[-1]
    number = fleet.rotate(1, everything=True, load_balancers=tuple(one.id for one in balancers[-3:]))
    drained = Cloud.until(lambda: rotating(fleet), "a controller has the duty", 30)
    # The test writes the row itself, so that the rotation still runs when the controller reads the row.
    fleet.database.write(lambda c: process_registry.set_process_draining(c, drained, draining=True))
    other = Cloud.until(
        lambda: (now := rotating(fleet)) not in (None, drained) and now, "the other controller has the duty", 60
    )
    fleet.ended(number, TIME_LIMIT)
    query = sa.select(job.c.owner).where(job.c.owner == drained)
    Cloud.until(lambda: fleet.database.read(lambda c: c.scalar(query)) is None, "the drained controller has no job", 60)
    Cloud.until(
        lambda: drained not in fleet.database.read(process_registry.list_duties),
        "the drained controller has no duty",
        60,
    )
    rows = {one["Name"]: one for one in fleet.ctl("controller", "list")}
    assert {name: one["Draining"] for name, one in rows.items()} == {drained: True, other: False}
    assert rows[drained]["Jobs"] == 0

    # A drained host stays drained after commands for one controller, also for new controllers.
    host, before = rows[drained]["Host"], said(stack, "drains on request")
    fleet.database.write(lambda c: process_registry.set_process_draining(c, drained, draining=False))
    Cloud.until(lambda: said(stack, "starts jobs again") == 1, "the controller starts jobs again", 30)
    fleet.database.write(lambda c: process_registry.set_host_draining(c, host, "a test", draining=True))
    Cloud.until(lambda: said(stack, "drains on request") == before + 2, "both controllers drain", 30)
    again = fleet.rotate(1, everything=True, load_balancers=(chosen.id,))
    Cloud.until(lambda: rotating(fleet) is None, "no controller has the duty", 30)
    assert fleet.counts(again) == {"waiting": 1}
    fleet.database.write(lambda c: process_registry.set_host_draining(c, host, "a test", draining=False))
    fleet.ended(again, TIME_LIMIT)
    assert fleet.counts(again) == {"done": 1}
