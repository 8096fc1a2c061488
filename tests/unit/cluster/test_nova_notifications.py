# SPDX-License-Identifier: Apache-2.0
"""Nova's versioned notifications: their form, and a real RabbitMQ that restarts."""

import json
import queue
import time
import uuid

import kombu
import pytest
import rabbitmq

from amphora_cluster.cloud import notifications
from amphora_cluster.cloud.notifications import NovaNotifications, read_notification

SERVER, PROJECT = "3b2c1a", "p1"


def notification(server=SERVER, event="instance.create.end", wrapped=True):
    """A notification in the form of Nova and oslo.messaging."""
    payload = {
        "nova_object.name": "InstanceCreatePayload",
        "nova_object.namespace": "nova",
        "nova_object.version": "1.12",
        "nova_object.data": {"uuid": server, "tenant_id": PROJECT, "state": "active"},
    }
    content = {
        "message_id": str(uuid.uuid4()), "publisher_id": "nova-compute:host1", "event_type": event, "priority": "INFO",
        "timestamp": "2026-01-02 03:04:05.678901", "payload": payload,
    }  # fmt: skip
    return {"oslo.version": "2.0", "oslo.message": json.dumps(content)} if wrapped else content


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (notification(), (SERVER, PROJECT)),
        (json.dumps(notification()), (SERVER, PROJECT)),
        (notification(wrapped=False), (SERVER, PROJECT)),
        (notification(event="instance.delete.end"), (SERVER, PROJECT)),
        (notification(event="service.update"), None),
        (notification("x" * 200), ("x" * 58 + " (cut)", PROJECT)),
        ({}, None),
        ([], None),
        (None, None),
        ("no JSON", None),
        ({"oslo.message": 5}, None),
        ({"event_type": "instance.create.end", "payload": {}}, None),
        ({"event_type": "instance.create.end", "payload": {"nova_object.data": "text"}}, None),
    ],
)
def test_the_form_of_a_notification(body, found):
    assert read_notification(body) == found


@pytest.fixture(scope="module")
def broker():
    if rabbitmq.missing():
        pytest.skip(rabbitmq.missing())
    with rabbitmq.server() as broker:
        yield broker


class Nova:
    """Sends notifications as Nova does: to a topic exchange that oslo.messaging has declared."""

    def __init__(self, url):
        self.url = url

    def send(self, *servers, priority="info"):
        with kombu.Connection(self.url, connect_timeout=5) as connection:
            exchange = kombu.Exchange("nova", type="topic", durable=False)
            producer = connection.Producer(serializer="json")
            for one in servers:
                key = f"versioned_notifications.{priority}"
                producer.publish(notification(one), exchange=exchange, routing_key=key, declare=[exchange])


@pytest.fixture
def received(broker, monkeypatch):
    monkeypatch.setattr(notifications, "_FIRST_BACKOFF", 0.1)
    monkeypatch.setattr(notifications, "_LONGEST_BACKOFF", 0.5)
    found = queue.Queue()
    receivers = []

    def start(on_servers=found.put):
        receivers.append(NovaNotifications(broker.url, on_servers))
        receivers[-1].start()
        return found

    yield start
    for one in receivers:
        one.stop(10)


def take(nova, found, server, seconds=60):
    """Send until the receiver, which connects at some moment, has a notification."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            nova.send(server)
            if server in (changed := found.get(timeout=1.5)):
                return changed
        except (queue.Empty, OSError):
            assert time.monotonic() < deadline, f"{server} is not received"


def test_each_process_receives_and_a_burst_is_collected(broker, received):
    nova = Nova(broker.url)
    first, second = queue.Queue(), queue.Queue()
    received(first.put)
    received(second.put)
    for one in (first, second):
        assert take(nova, one, "a") == {"a": PROJECT}
    nova.send(*(f"s{number}" for number in range(200)), priority="error")
    for one in (first, second):
        seen, number = {}, 0
        while len(set(seen) - {"a"}) < 200:
            seen |= one.get(timeout=10)
            number += 1
        assert number < 20


def test_a_failing_receiver_continues(broker, received):
    found = queue.Queue()

    def fail(changed):
        found.put(changed)
        raise ValueError

    received(fail)
    for server in ("a", "b"):
        assert server in take(Nova(broker.url), found, server)


def test_a_restarted_broker(broker, received, caplog):
    found = received()
    nova = Nova(broker.url)
    take(nova, found, "a")
    # The exchange is gone too, until Nova declares it again.
    broker.lose_everything()
    broker.start()
    assert "b" in take(nova, found, "b")
    assert "lost its connection" in caplog.text
    assert "guest:guest" not in caplog.text
