# SPDX-License-Identifier: Apache-2.0
"""Hints on the broker: a quorum queue for controllers, a fan-out exchange for reporters.

Invariant: a message holds at most the id of a load balancer. It holds no state, no secret and no argument of a user's
call. A lost, late, repeated or forged message changes only when a process reads the database.
"""

from __future__ import annotations

from typing import Any

import celery
import kombu

from amphora_driver.queue import local_socket

# RabbitMQ delivers each message of this queue to one controller.
CONTROLLERS = "amphora-driver.controllers"
TASK = "amphora_driver.look"
# RabbitMQ delivers each message of this exchange to all provider agents. Only the provider agent that reports to
# Octavia at present acts on the message.
REPORTERS = kombu.Exchange("amphora-driver.reporters", type="fanout", durable=True)
CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 3.0
# Seconds between two AMQP heartbeats. After two missing heartbeats, the connection counts as dead.
HEARTBEAT_SECONDS = 10


def create_celery_app(url: str) -> celery.Celery:
    """Return the Celery application; publisher and consumer share this definition of the queue.

    Celery tries several URLs, separated by semicolons, in order.
    """
    app = celery.Celery("amphora-driver", broker=url, set_as_current=False)
    # These limits bound the queue while no controller runs. Lost messages about new work are harmless, because
    # controllers also find work by polling.
    limits = {"x-queue-type": "quorum", "x-max-length": 100_000, "x-message-ttl": 600_000}
    exchange = kombu.Exchange("")
    queue = kombu.Queue(CONTROLLERS, exchange, routing_key=CONTROLLERS, durable=True, queue_arguments=limits)
    app.conf.update(
        task_queues=[queue],
        task_default_queue=CONTROLLERS,
        task_create_missing_queues=False,
        task_ignore_result=True,
        # A message about new work is acknowledged before its job starts, so a crash can lose the message. Another
        # controller then finds the job after the lease has expired.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        broker_connection_timeout=CONNECT_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_heartbeat=HEARTBEAT_SECONDS,
        accept_content=["json"],
        task_serializer="json",
    )
    return app


class HintSender:
    """One connection for hints, opened at the first hint and again after `discard_connection`.

    Publishing waits for no confirmation. If the broker does not read, the socket buffer fills and the write times out.
    """

    def __init__(self, url: str) -> None:
        self._app = create_celery_app(url)
        self._app.conf.broker_transport_options = {"read_timeout": _ANSWER_SECONDS, "write_timeout": _ANSWER_SECONDS}
        self._connection: Any = None
        self._producer: Any = None

    def send(self, role: str, load_balancer_id: str | None) -> None:
        """Publish one hint; raises every error of the library and the connection."""
        if self._producer is None:
            self._connection = self._app.connection_for_write()
            self._producer = self._app.amqp.Producer(self._connection)
        if role == local_socket.REPORTER:
            self._producer.publish({}, exchange=REPORTERS, declare=[REPORTERS], retry=False, delivery_mode="transient")
        else:
            self._app.send_task(TASK, args=(load_balancer_id,), producer=self._producer, retry=False)

    def discard_connection(self) -> None:
        """Drop the connection without a closing handshake, which could block."""
        if self._connection is not None:
            self._connection.collect()
        self._connection = self._producer = None
