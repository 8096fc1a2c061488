# SPDX-License-Identifier: Apache-2.0
"""Hints never block a caller; tests/system/test_distributed.py uses a real broker."""

import logging
import multiprocessing
import socket
import threading
import time

import pytest

from amphora_driver import config, repeated_messages
from amphora_driver.queue import local_socket, notifier, rabbitmq


@pytest.fixture
def silent_broker():
    """A broker that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}//"


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A short folder name: the path of a socket has at most 107 characters."""
    return tmp_path_factory.mktemp("t")


def configured(tmp_path, url, engine="celery"):
    file = tmp_path / "driver.conf"
    file.write_text(f"[amp_queue]\nengine = {engine}\nbroker_url = {url}\nsocket_dir = {tmp_path}/bells\n")
    return config.load([str(file)])


@pytest.fixture
def publisher(silent_broker):
    publisher = notifier.Publisher(silent_broker, most=3)
    yield publisher
    publisher.close()


def test_an_unpublishable_hint_is_dropped_without_a_wait(publisher):
    begun = time.monotonic()
    left = [publisher.enqueue(local_socket.CONTROLLER, f"lb{number}") for number in range(1000)]
    # No network is involved: 1,000 hints take a few milliseconds. The bound allows for a busy machine.
    assert time.monotonic() - begun < 2
    # One hint may be with the publisher already.
    assert 3 <= sum(left) <= 4


def test_a_load_balancer_is_queued_once(publisher):
    publisher.enqueue(local_socket.CONTROLLER, "first")
    assert all(publisher.enqueue(local_socket.CONTROLLER, "lb") for _ in range(100))
    assert len(publisher._waiting) <= 2


def test_the_log_has_the_same_message_for_each_hint_without_a_broker(monkeypatch, caplog):
    """The log limits repeated messages (`repeated_messages`). A connection attempt of the library takes 12 seconds."""
    caplog.set_level(logging.INFO)
    sent = threading.Event()
    failures = [ConnectionRefusedError("with a password")] * 4

    class Sender(rabbitmq.HintSender):
        def send(self, role, load_balancer_id):
            if failures:
                raise failures.pop()
            sent.set()

    # Publishers of other tests may still run. They keep the original class.
    monkeypatch.setattr(rabbitmq, "HintSender", Sender)
    publisher = notifier.Publisher("amqp://nowhere")
    for number in range(3):
        publisher.enqueue(local_socket.CONTROLLER, f"lb{number}")
    assert sent.wait(30)
    publisher.close()
    first, second, end = caplog.records
    assert first.getMessage() == second.getMessage()
    assert "Could not announce new work through the message broker: ConnectionRefusedError" in first.getMessage()
    assert repeated_messages._has_error(first)
    assert end.levelno == logging.INFO
    assert "with a password" not in caplog.text


def test_the_local_controller_is_woken_if_the_broker_fails(tmp_path, silent_broker):
    conf = configured(tmp_path, silent_broker)
    with local_socket.WakeupSocket(conf.amp_queue.socket_dir, local_socket.CONTROLLER) as bell:
        notifier.notify(conf, local_socket.CONTROLLER, "lb")
        assert bell.wait(5)
    notifier._publishers.pop(silent_broker).close()


def test_the_embedded_engine_needs_no_broker(tmp_path):
    conf = configured(tmp_path, "amqp://nowhere", engine="embedded")
    notifier.notify(conf, local_socket.CONTROLLER, "lb")
    assert "amqp://nowhere" not in notifier._publishers
    with notifier.reporter_hints(conf, lambda: None), notifier.controller_hints(conf, lambda _: None):
        pass


def test_a_forked_process_has_its_own_publisher(tmp_path, silent_broker):
    conf = configured(tmp_path, silent_broker)
    notifier.notify(conf, local_socket.CONTROLLER, "lb")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_tells, args=(conf, silent_broker))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    notifier._publishers.pop(silent_broker).close()


def _tells(conf, url):
    assert url not in notifier._publishers
    notifier.notify(conf, local_socket.CONTROLLER, "lb")
    assert notifier._publishers[url]._thread.is_alive()


def test_the_log_names_the_broker_without_its_password():
    (option,) = [one for one in config.GROUPS["amp_queue"] if one.name == "broker_url"]
    assert option.secret
