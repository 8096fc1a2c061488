# SPDX-License-Identifier: Apache-2.0
"""A connection that receives messages without a pause also sends its heartbeats, to a real RabbitMQ."""

import logging
import threading
import time

import pytest
import rabbitmq

from amphora_driver.queue import local_socket
from amphora_driver.queue.consumer import ReporterConsumer
from amphora_driver.queue.rabbitmq import HintSender

pytestmark = pytest.mark.extended
_HEARTBEAT_SECONDS = 1


def test_many_messages_do_not_end_the_connection(monkeypatch, caplog):
    """RabbitMQ closes a connection after two intervals without a heartbeat."""
    if rabbitmq.missing():
        pytest.skip(rabbitmq.missing())
    caplog.set_level(logging.WARNING, "amphora_driver.queue.consumer")
    monkeypatch.setattr("amphora_driver.queue.rabbitmq.HEARTBEAT_SECONDS", _HEARTBEAT_SECONDS)
    received = threading.Semaphore(0)
    with rabbitmq.server() as broker:
        consumer = ReporterConsumer(broker.url, received.release)
        consumer.start()
        sender = HintSender(broker.url)
        try:
            # Messages before the queue exists are lost, so the first ones are repeated.
            while not received.acquire(timeout=0.2):
                sender.send(local_socket.REPORTER, None)
            end = time.monotonic() + 5 * _HEARTBEAT_SECONDS
            while time.monotonic() < end:
                sender.send(local_socket.REPORTER, None)
                assert received.acquire(timeout=10), caplog.text
        finally:
            consumer.stop(10)
            sender.discard_connection()
    assert not caplog.records
