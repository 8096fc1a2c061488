# SPDX-License-Identifier: Apache-2.0
"""Two hosts with MariaDB and RabbitMQ; each has a controller, and the first one has Octavia.

A directory of sockets and a separate database connection simulate the other host. The hosts share only the database
and the broker.
"""

import json
import re
import sys
import time
from configparser import ConfigParser
from contextlib import contextmanager, suppress

import kombu
import mariadb
import pytest
import rabbitmq
import sqlalchemy as sa
from cloud import Cloud
from faulty_proxy import FaultyProxy
from sandbox_of_a_test import running

from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from amphora_driver.queue import local_socket
from amphora_driver.queue.rabbitmq import HintSender
from sandbox import demo, topology
from sandbox.processes import Program

pytestmark = [pytest.mark.root, pytest.mark.extended]
FIRST, OTHER = "amphora-controller", "other-controller"
# Seconds between two polls of the other host's controller: an earlier reaction proves a hint.
POLL = 45.0
# Time-out of a call, independent of the broker. Usually it takes 20 ms; the rest is for a busy machine.
ANSWERED = 5.0


@pytest.fixture(scope="module")
def broker():
    if rabbitmq.missing():
        pytest.skip(rabbitmq.missing())
    with rabbitmq.server() as broker:
        yield broker


@pytest.fixture(scope="module")
def sandbox(broker):
    with (
        mariadb.server("octavia", "provider") as (octavia, provider),
        running(
            store_url=provider,
            octavia_url=octavia,
            broker_url=broker.url,
            options={"amp_notifications": {"enabled": "true", "url": broker.url}},
        ) as (stack, settings),
        FaultyProxy(sa.make_url(provider).query["unix_socket"]) as line,
    ):
        stack.line = line
        yield stack, settings


@pytest.fixture(scope="module")
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="module")
def database(sandbox):
    database = Database(sandbox[1].database_url)
    yield database
    database.dispose()


@pytest.fixture
def cloud(sandbox, database):
    stack, settings = sandbox
    connection = demo.connect(settings)
    cloud = Cloud(settings, connection, database)
    yield cloud
    stack.supervision.stop(OTHER)
    stack.up()
    cloud.clean()
    connection.close()


def program(stack):
    """Return the program of the other host's controller."""
    settings = stack.settings
    options = ConfigParser(interpolation=None)
    options.read(settings.driver_configuration)
    sockets = settings.run / "far"
    sockets.mkdir(exist_ok=True)
    url = sa.make_url(settings.database_url).update_query_dict({"unix_socket": stack.line.path})
    options["amp_database"]["connection"] = url.render_as_string(hide_password=False)
    options["amp_queue"].update({"socket_dir": str(sockets), "poll_interval": str(POLL)})
    file = settings.etc / "other.conf"
    with file.open("w", encoding="utf-8") as target:
        options.write(target)
    argv = ("env", f"AMPHORA_DRIVER_CONFIG={file}", sys.executable, "-m", "amphora_driver.controller.service")
    return Program(name=OTHER, argv=argv, namespace=settings.control)


def first(stack):
    """Return the program of the controller on Octavia's host."""
    return next(program for program in stack.programs() if program.name == FIRST)


@contextmanager
def other_host(stack, *, alone):
    """Run the other host's controller, alone or beside the first host's; wait until it receives hints."""
    if alone:
        stack.supervision.stop(FIRST)
    stack.supervision.start(program(stack))
    try:
        Cloud.until(
            lambda: "Connected to amqp" in text(stack, OTHER), "the other controller is connected to the broker"
        )
        yield
    finally:
        stack.supervision.stop(OTHER)
        stack.up()


def text(stack, name):
    log = stack.supervision.log(name)
    return log.read_text(encoding="utf-8") if log.exists() else ""


def worked_on(stack, name, begin=0):
    """Return the load balancers that a controller worked on."""
    return set(re.findall(r"load balancer (\S+): the controller starts step Record ", text(stack, name)[begin:]))


def create(cloud, name):
    return cloud.balancers.create_load_balancer(name=name, vip_subnet_id=topology.VIP_SUBNET)


def answered(call):
    begun = time.monotonic()
    result = call()
    assert time.monotonic() - begun < ANSWERED
    return result


def test_a_controller_of_another_host_receives_a_hint(cloud, stack):
    with other_host(stack, alone=True):
        # The controller polls at its start, and then at a hint or after POLL seconds.
        time.sleep(1)
        begun = time.monotonic()
        made = create(cloud, "far")
        cloud.until(lambda: made.id in worked_on(stack, OTHER), "the other controller begins", POLL)
        assert time.monotonic() - begun < POLL / 2, "the controller reacts to the hint"
        cloud.active(made.id)
        assert len(cloud.amphorae(made)) == 1


def test_hosts_share_the_work_and_a_hint_twice_is_one_job(cloud, stack, broker):
    with other_host(stack, alone=False):
        log = len(text(stack, FIRST))
        made = []
        # The faster controller claims a load balancer; after several, each has claimed one.
        while not worked_on(stack, OTHER) or not worked_on(stack, FIRST, log):
            assert len(made) < 20, "each controller claims a load balancer"
            made += [create(cloud, f"shared-{len(made) + number}") for number in range(4)]
            sender = HintSender(broker.url)
            for one in made:
                for _ in range(3):
                    sender.send(local_socket.CONTROLLER, one.id)
            sender.discard_connection()
            for one in made:
                cloud.active(one.id)
        mine, theirs = worked_on(stack, FIRST, log), worked_on(stack, OTHER)
        assert mine | theirs == {one.id for one in made}
        for one in made:
            assert len(cloud.amphorae(one)) == 1, "the load balancer has one amphora"


def test_a_broken_broker_delays_no_call(cloud, stack, broker):
    balancer = cloud.served("hung", ("member1",))
    pool = cloud.pool_of(balancer)
    broker.freeze()
    try:
        answered(lambda: cloud.balancers.create_member(pool, **cloud.member("member2")))
        cloud.active(balancer.id)
        during = answered(lambda: create(cloud, "during-hang"))
        cloud.active(during.id)
    finally:
        broker.thaw()
    broker.kill()
    after = answered(lambda: create(cloud, "without-broker"))
    cloud.active(after.id)
    # Polling finds jobs with lost hints, so the broker's messages can be discarded.
    broker.lose_everything()
    lost = answered(lambda: create(cloud, "lost"))
    broker.start()
    cloud.active(lost.id)
    assert cloud.answers(balancer.vip_address, 4) == {"member1": 2, "member2": 2}
    with other_host(stack, alone=True):
        made = create(cloud, "heard-again")
        begun = time.monotonic()
        # The publisher detects the closed connection with its first hint.
        cloud.until(lambda: made.id in worked_on(stack, OTHER), "the other controller receives hints", POLL + 15)
        cloud.active(made.id)
        assert time.monotonic() - begun < 2 * POLL


def test_a_controller_without_the_database_loses_its_lease_and_is_fenced(cloud, stack, database):
    line = stack.line
    with other_host(stack, alone=True):
        made = create(cloud, "parted")
        cloud.until(lambda: made.id in worked_on(stack, OTHER), "the other controller begins", POLL + 15)
        line.freeze()
        try:
            # `stack.up()` would write the sandbox's networks. The isolated controller may hold a lock on such a row,
            # until the server ends its transaction.
            stack.supervision.start(first(stack))
            cloud.active(made.id)
            row = sa.select(tables.job.c.epoch, tables.job.c.generation, tables.job.c.applied).where(
                tables.job.c.load_balancer_id == made.id
            )
            before = tuple(database.read(lambda c: c.execute(row).one()))
            amphorae = cloud.amphorae(made)
            assert before[0] >= 2, "the first controller takes the lease over"
        finally:
            line.thaw()
        cloud.until(
            lambda: re.search(f"{made.id}: .*Could not", text(stack, OTHER)), "the isolated controller logs an error"
        )
        assert tuple(database.read(lambda c: c.execute(row).one())) == before
        assert cloud.amphorae(made) == amphorae
        assert len(amphorae) == 1
        on_the_machine = {path.name for path in stack.settings.amphorae.iterdir() if path.is_dir()}
        assert amphorae == on_the_machine


def test_other_services_receive_notifications(cloud, broker):
    found = []

    def receive(body, answer):
        found.append(json.loads(body["oslo.message"]))
        answer.ack()

    def await_event(event):
        name = f"octavia.loadbalancer.{event}.end"
        # The duty of a controller that was killed expires after 30 s.
        deadline = time.monotonic() + 60
        while not (mine := [one for one in found if one["payload"]["loadbalancer_id"] == made.id]) or (
            mine[-1]["event_type"] != name
        ):
            assert time.monotonic() < deadline, f"{name} is received"
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.5)
        return mine

    queue = kombu.Queue("notifications.info", kombu.Exchange("octavia", type="topic", durable=False), durable=False)
    with kombu.Connection(broker.url) as connection, connection.Consumer(queue, callbacks=[receive]):
        made = create(cloud, "announced")
        cloud.active(made.id)
        payload = await_event("create")[-1]["payload"]
        assert payload["vip_address"] == made.vip_address
        assert payload["project_id"] == made.project_id
        cloud.put(f"loadbalancers/{made.id}", {"loadbalancer": {"name": "renamed"}})
        cloud.active(made.id)
        assert await_event("update")[-1]["payload"]["name"] == "renamed"
        cloud.balancers.create_listener(loadbalancer_id=made.id, protocol="TCP", protocol_port=81)
        cloud.active(made.id)
        cloud.balancers.delete_load_balancer(made.id, cascade=True)
        assert [one["event_type"].split(".")[2] for one in await_event("delete")] == ["create", "update", "delete"]
