# SPDX-License-Identifier: Apache-2.0
"""Notifications over a real RabbitMQ, to consumers on kombu and on oslo.messaging."""

import datetime as dt
import ipaddress
import json
import ssl
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import kombu
import pytest
import rabbitmq
from amqp.exceptions import AMQPError
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from amphora_driver.notifications.envelope import build_message
from amphora_driver.notifications.outbox import Event, Notification
from amphora_driver.notifications.publisher import Publisher

pytestmark = pytest.mark.extended
PAYLOAD = {"loadbalancer_id": "lb", "project_id": "demo", "name": "shöp"}
ERRORS = (OSError, AMQPError)
LISTENER = Path(__file__).with_name("oslo_listener.py")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1 with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bus")])
    now = dt.datetime.now(dt.timezone.utc)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("bus") / "bus.pem"
    file.write_bytes(made.public_bytes(Encoding.PEM))
    with file.open("ab") as out:
        out.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


@pytest.fixture(scope="module")
def broker(certificate):
    if rabbitmq.missing():
        pytest.skip(rabbitmq.missing())
    with rabbitmq.server(certificate) as broker:
        yield broker


@pytest.fixture
def names():
    """An exchange and a topic of one test."""
    number = uuid.uuid4().hex[:8]
    return f"octavia-{number}", f"topic-{number}"


@contextmanager
def publisher(broker, names, *, durable=False, quorum=False, url=None, ca_certificate=None):
    exchange, topic = names
    properties = {"durable": durable, "quorum": quorum, "ca_certificate": ca_certificate}
    made = Publisher(url or broker.url, exchange, [topic], **properties)
    try:
        yield made
    finally:
        made.discard()


def message(event=Event.CREATE, message_id=None):
    one = Notification(
        id=1,
        message_id=message_id or str(uuid.uuid4()),
        event=event,
        ready_at=1790000000.5,
        payload=json.dumps(PAYLOAD),
    )
    return build_message(one)


def taken(broker, topic, number=1):
    """Take messages from the queue of a topic, as a consumer on kombu does."""
    found = []
    with kombu.Connection(broker.url, connect_timeout=5) as connection:
        queue = connection.SimpleQueue(kombu.Queue(f"{topic}.info", no_declare=True))
        for _ in range(number):
            one = queue.get(timeout=10)
            found.append(one.payload)
            one.ack()
        assert len(queue) == 0
        queue.close()
    return [json.loads(one["oslo.message"]) for one in found]


@contextmanager
def listener(broker, names):
    """Run the consumer on oslo.messaging; yield a function that returns its next line."""
    url = broker.url.replace("amqp://", "rabbit://")
    argv = [sys.executable, str(LISTENER), url, *names]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert json.loads(process.stdout.readline()) == "ready"
            yield lambda: json.loads(process.stdout.readline())
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            watchdog.cancel()
            process.kill()


def test_a_consumer_on_oslo_messaging_receives_each_event(broker, names):
    with listener(broker, names) as next_line, publisher(broker, names) as made:
        for event in Event:
            sent = message(event)
            made.publish(sent)
            received, content = next_line(), json.loads(sent["oslo.message"])
            assert received["event_type"] == f"octavia.loadbalancer.{event.value}.end"
            assert received["payload"] == PAYLOAD
            assert received["publisher_id"] is None
            assert received["metadata"]["message_id"] == content["message_id"]
            assert received["metadata"]["timestamp"] == "2026-09-21 14:13:20.500000"
            assert received["context"] == {
                "project_id": "demo",
                "request_id": f"req-{content['message_id']}",
            }


@pytest.mark.parametrize("kind", [{}, {"durable": True}, {"quorum": True}])
def test_a_queue_without_a_consumer_keeps_the_messages(broker, names, kind):
    with publisher(broker, names, **kind) as made:
        for event in Event:
            made.publish(message(event))
    # An exchange and a queue with other properties exist now.
    with publisher(broker, names, durable=not kind) as made:
        made.publish(message())
        made.close()
        made.publish(message())
    found = taken(broker, names[1], 5)
    assert [one["event_type"].split(".")[2] for one in found] == ["create", "update", "delete", "create", "create"]


def test_the_connection_is_restored_after_the_loss_of_the_broker(broker, names):
    with publisher(broker, names) as made:
        made.publish(message())
        broker.lose_everything()
        with pytest.raises(ERRORS):
            made.publish(message())
        made.discard()
        broker.start()
        made.publish(message())
    assert len(taken(broker, names[1])) == 1


def test_the_next_url_is_used_after_an_error(broker, names):
    with publisher(broker, names, url=f"amqp://guest:guest@127.0.0.1:1//;{broker.url}") as made:
        with pytest.raises(ERRORS):
            made.publish(message())
        made.discard()
        made.publish(message())
    assert len(taken(broker, names[1])) == 1


@pytest.mark.parametrize(("host", "trusted"), [("127.0.0.1", True), ("127.1", True), ("127.0.0.1", False)])
def test_the_certificate_of_the_server_is_verified(broker, names, certificate, host, trusted):
    """The certificate contains the name 127.0.0.1 only, and no operating system trusts it."""
    url = f"amqps://guest:guest@{host}:{broker.tls_port}//"
    with publisher(broker, names, url=url, ca_certificate=str(certificate) if trusted else None) as made:
        if trusted and host == "127.0.0.1":
            made.publish(message())
            assert len(taken(broker, names[1])) == 1
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                made.publish(message())


def test_a_broker_that_hangs_delays_for_a_bounded_time(broker, names):
    with publisher(broker, names) as made:
        made.publish(message())
        broker.freeze()
        try:
            for _ in range(2):  # over the open connection, and over a new one
                begun = time.monotonic()
                with pytest.raises(ERRORS):
                    made.publish(message())
                assert time.monotonic() - begun < 15
                made.discard()
        finally:
            broker.thaw()
        made.publish(message())
