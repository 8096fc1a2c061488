# SPDX-License-Identifier: Apache-2.0
"""gunicorn's worker, in which a thread gets complete requests only.

gunicorn gives each new connection to a thread. Some clients that died, that send nothing, or that send very slowly
would hold all threads, and the API would answer no other caller. This worker reads a request in its main loop first.

Invariant: the number of connections whose request is not complete is limited, for each source address and for all. A
further connection closes the oldest one of the address that has the most. So no client can lock out others.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections import Counter
from functools import partial
from typing import Any

from gunicorn import http, sock
from gunicorn.workers.gthread import ThreadWorker

from amphora_cluster.api.attempts import network_of
from amphora_cluster.api.connections import limit_connection
from amphora_cluster.api.reading import ConnectionEnded, IncomingRequest
from amphora_driver.untrusted_text import printable

LOG = logging.getLogger(__name__)
# Maximum numbers of connections with an incomplete request in one worker process: for each source address, and in
# total.
MOST_OF_SOURCE, MOST_INCOMPLETE = 64, 512
_WARN_SECONDS = 60.0


class Worker(ThreadWorker):
    """A worker process."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        # The open connections whose request is incomplete, with the oldest connection first.
        self._incoming: dict[Any, IncomingRequest] = {}
        # By text, the time at which this worker last logged a warning.
        self._warned: dict[str, float] = {}

    def enqueue_req(self, conn: Any) -> None:
        """Read the request of a new connection, before a thread gets it."""
        limit_connection(conn)
        try:
            conn.sock.setblocking(False)
            if conn.cfg.is_ssl:
                conn.sock = self._make_context(conn).wrap_socket(
                    conn.sock, server_side=True, do_handshake_on_connect=False
                )
        except OSError:
            self._end(conn)
            return
        source = network_of(conn.client[0] if isinstance(conn.client, tuple) else "")
        self._make_room(source)
        self._incoming[conn] = incoming = IncomingRequest(conn.sock, source, time.monotonic())
        self.poller.register(conn.sock, incoming.events, partial(self._read, conn))

    def murder_keepalived(self, *words: Any, **named: Any) -> None:
        """Close connections whose request has not arrived in time. gunicorn calls this method every second."""
        super().murder_keepalived(*words, **named)
        now = time.monotonic()
        for conn in [one for one, incoming in self._incoming.items() if incoming.expires <= now]:
            self._drop(conn)

    def _read(self, conn: Any, _socket: Any) -> None:
        incoming = self._incoming.get(conn)
        if incoming is None:
            # The event loop may already have closed this connection because of an earlier event.
            return
        try:
            incoming.advance(time.monotonic())
        except ConnectionEnded:
            self._drop(conn)
            return
        if not incoming.complete:
            self.poller.modify(conn.sock, incoming.events, partial(self._read, conn))
            return
        self.poller.unregister(conn.sock)
        del self._incoming[conn]
        # The worker has set up TLS and received the request. With these attributes, gunicorn does neither again.
        conn.parser = http.get_parser(conn.cfg, conn.sock, conn.client)
        conn.initialized = conn.data_ready = True
        super().enqueue_req(conn)

    def _make_room(self, source: str) -> None:
        numbers = Counter(one.source for one in self._incoming.values())
        if numbers[source] < MOST_OF_SOURCE:
            if len(self._incoming) < MOST_INCOMPLETE:
                return
            [(source, _)] = numbers.most_common(1)
        oldest = next(conn for conn, one in self._incoming.items() if one.source == source)
        self._drop(oldest)
        self._warn(
            "the API closes the oldest connections from %s whose requests are not complete, because there are %d "
            "from this address, and %d in total",
            printable(source, 64),
            numbers[source],
            sum(numbers.values()),
        )

    def _make_context(self, conn: Any) -> ssl.SSLContext:
        try:
            context: ssl.SSLContext = sock.ssl_context(conn.cfg)
        except OSError as error:
            self._warn(
                "the API closes new connections, because it cannot load its certificate: %s; check certificate and "
                "private_key in [amp_cluster_api]",
                error,
            )
            raise
        return context

    def _warn(self, text: str, *words: object) -> None:
        """Log a warning if the same one was not logged for a minute."""
        now = time.monotonic()
        if now - self._warned.get(text, float("-inf")) > _WARN_SECONDS:
            self._warned[text] = now
            LOG.warning(text, *words)

    def _drop(self, conn: Any) -> None:
        del self._incoming[conn]
        self.poller.unregister(conn.sock)
        self._end(conn)

    def _end(self, conn: Any) -> None:
        self.nr_conns -= 1
        conn.close()
