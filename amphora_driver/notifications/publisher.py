# SPDX-License-Identifier: Apache-2.0
"""The connection to the message bus of OpenStack.

Invariant: `publish` returns after RabbitMQ has confirmed the message in every topic, or raises. Each wait has a
time-out. An existing exchange or queue is used with its properties, because RabbitMQ refuses a second declaration with
other ones, and other services would fail then.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import kombu

from amphora_driver.notifications.envelope import PRIORITY

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 3.0
_NOT_FOUND = 404


class Publisher:
    """Sends messages over one connection, which the first message opens.

    Args:
        url: URLs of RabbitMQ, separated by semicolons. `discard` moves on to the next one.
        exchange: name of the topic exchange.
        topics: each has a queue for the priority `info`. A queue without a consumer keeps the messages.
        durable: properties of a missing exchange and of missing queues.
        quorum: missing queues are quorum queues, which are always durable.
        ca_certificate: PEM file of the CAs for URLs with `amqps`; None for those of the operating system.
    """

    def __init__(
        self,
        url: str,
        exchange: str,
        topics: Sequence[str],
        *,
        durable: bool,
        quorum: bool,
        ca_certificate: str | None = None,
    ) -> None:
        self._urls = deque(one.strip() for one in url.split(";") if one.strip())
        self._ca_certificate = ca_certificate
        durable = durable or quorum
        self._exchange = kombu.Exchange(exchange, type="topic", durable=durable)
        arguments = {"x-queue-type": "quorum"} if quorum else {}
        names = [f"{topic}.{PRIORITY}" for topic in topics]
        common = {"exchange": self._exchange, "durable": durable, "queue_arguments": arguments}
        self._queues = [kombu.Queue(name, routing_key=name, **common) for name in names]
        self._connection: Any = None
        self._producer: Any = None

    def publish(self, message: Mapping[str, str]) -> None:
        """Send a message to every topic; raises every error of the library and the connection."""
        if self._producer is None:
            self._connect()
        for queue in self._queues:
            sent = {"exchange": self._exchange.name, "routing_key": queue.routing_key, "serializer": "json"}
            self._producer.publish(dict(message), retry=False, timeout=_ANSWER_SECONDS, **sent)

    def close(self) -> None:
        """Close the connection; the next message opens a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(*connection.connection_errors, *connection.channel_errors):
                connection.release()

    def discard(self) -> None:
        """Drop the connection without a closing handshake, which could block."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect()
            self._urls.rotate(-1)

    def _connect(self) -> None:
        limits = {"read_timeout": _ANSWER_SECONDS, "write_timeout": _ANSWER_SECONDS, "confirm_publish": True}
        url = self._urls[0]
        # `server_hostname: None` makes kombu verify that the certificate names the host of the URL. Without this key,
        # kombu does not verify the name.
        tls: Any = {"server_hostname": None, "cert_reqs": ssl.CERT_REQUIRED, "ca_certs": self._ca_certificate}
        self._connection = kombu.Connection(
            url,
            connect_timeout=_CONNECT_SECONDS,
            transport_options=limits,
            ssl=tls if url.startswith("amqps:") else False,
        )
        # One attempt suffices, because the notification sender has its own back-off.
        self._connection.ensure_connection(max_retries=0, reraise_as_library_errors=False)
        self._declare(lambda channel, passive: self._exchange(channel).declare(passive=passive))
        for queue in self._queues:
            self._declare(lambda channel, passive, one=queue: one(channel).queue_declare(passive=passive))
        channel = self._connection.channel()
        for queue in self._queues:
            queue(channel).queue_bind()
        self._producer = self._connection.Producer(channel)

    def _declare(self, declare: Any) -> None:
        """Declare an exchange or queue if it does not exist."""
        # RabbitMQ closes the channel if a passive declaration finds no exchange or queue. So each declaration has its
        # own channel.
        try:
            with self._connection.channel() as channel:
                declare(channel, True)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != _NOT_FOUND:
                raise
            with self._connection.channel() as channel:
                declare(channel, False)
