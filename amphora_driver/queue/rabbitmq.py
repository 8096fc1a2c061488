# SPDX-License-Identifier: Apache-2.0
"""What hints look like on the broker: a quorum queue for controllers, a fan-out for reporters.

Invariant: a message names a load balancer, or nothing at all. No state, no secret, no argument of a user's call
travels this way, so that a message that is lost, late, doubled or forged changes nothing but when somebody looks.
"""

from __future__ import annotations

from typing import Any

import celery
import kombu

from amphora_driver.queue import local_socket

# One message goes to one controller, whichever has hands free.
CONTROLLERS = "amphora-driver.controllers"
TASK = "amphora_driver.look"
# All provider agents hear that something is to be told; the one on duty does it.
REPORTERS = kombu.Exchange("amphora-driver.reporters", type="fanout", durable=True)
# Seconds for a connection, and for every answer on it.
CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 3.0
# Seconds between signs of life; a peer that misses two is taken for dead.
HEARTBEAT_SECONDS = 10


def application(url: str) -> celery.Celery:
    """Celery's application: both who publishes and who consumes describe the queue in the same words.

    Args:
        url: of the broker; several, separated by semicolons, are tried one after the other.
    """
    app = celery.Celery("amphora-driver", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[
            kombu.Queue(
                CONTROLLERS,
                kombu.Exchange(""),
                routing_key=CONTROLLERS,
                durable=True,
                # Hints that nobody wants any more shall not pile up while there is no controller.
                queue_arguments={"x-queue-type": "quorum", "x-max-length": 100_000, "x-message-ttl": 600_000},
            )
        ],
        task_default_queue=CONTROLLERS,
        task_create_missing_queues=False,
        task_ignore_result=True,
        # Early: a hint that dies with its controller is no loss, the row is due when the lease has run out.
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


class Sender:
    """One connection to publish hints on; made when it is needed, and anew after `drop`.

    Publishing waits for no confirmation: while the broker does not read, the kernel takes what fits, and the rest
    fails after a few seconds.
    """

    def __init__(self, url: str) -> None:
        self._app = application(url)
        self._app.conf.broker_transport_options = {"read_timeout": _ANSWER_SECONDS, "write_timeout": _ANSWER_SECONDS}
        self._connection: Any = None
        self._producer: Any = None

    def send(self, role: str, load_balancer_id: str | None) -> None:
        """Publish one hint; raises whatever keeps it from being published."""
        if self._producer is None:
            self._connection = self._app.connection_for_write()
            self._producer = self._app.amqp.Producer(self._connection)
        if role == local_socket.REPORTER:
            self._producer.publish({}, exchange=REPORTERS, declare=[REPORTERS], retry=False, delivery_mode="transient")
        else:
            self._app.send_task(TASK, args=(load_balancer_id,), producer=self._producer, retry=False)

    def drop(self) -> None:
        """Forget the connection without a word: who does not listen cannot be told goodbye."""
        if self._connection is not None:
            self._connection.collect()
        self._connection = self._producer = None

    def close(self) -> None:
        """End the connection."""
        self.drop()
