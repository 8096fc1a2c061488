# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for HAProxy: `GET /`, `GET /metrics` and `GET /ping/<member id>`.

Invariant: one thread does all work except metrics: a waiting ping costs a socket, not a thread. After an unexpected
error the server closes all sockets and opens new ones. A new program continues open requests.
"""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from amphora_agent.errors import AgentError
from amphora_agent.network.icmp_echo import Pinger
from amphora_agent.responder.prometheus import CONTENT_TYPE

ADDRESS = "127.0.0.1"
# An unanswered request ends after LONGEST_SECONDS, and a slow transmission of the metrics after SEND_SECONDS.
LONGEST_SECONDS = 30.0
SEND_SECONDS = 10.0
# Maximum number of simultaneous scrapes of the metrics. A HAProxy worker forwards up to 4 (haproxy/config_file.py), and
# two workers exist during a reload.
MOST_SCRAPES = 8
MOST_OPEN = 4096
_BACKLOG = 4096
_RETRY_SECONDS = 1.0
_LARGEST_REQUEST = 8192
_WANTED_FILES = 4 * MOST_OPEN
_PING = "/ping/"
# Text for a browser at the path `/`, which Prometheus never requests.
_FRONT = "The metrics of this load balancer are at /metrics"
# A connection that a former responder has left open, and the bytes that have arrived on it.
Waiting = tuple[socket.socket, bytes]
# An Opener calls a function in HAProxy's network namespace, and returns the sockets that the function opens.
Opener = Callable[..., tuple[Pinger, socket.socket]]
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class Exchange:
    """One connection of HAProxy, from its request to the answer."""

    __slots__ = ("deadline", "mark", "received", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.deadline = time.monotonic() + LONGEST_SECONDS
        self.received = b""
        self.mark: bytes | None = None


class Responder:
    """The server with its threads. `start` returns at once; the server answers when it has its port.

    ``inside`` calls a function in HAProxy's namespace and returns its result. ``scrape`` asks HAProxy and returns the
    metrics in parts; it raises AgentError. ``targets`` returns the address to ping, by member. ``version`` is the
    answer to `GET /version`. ``listener`` and ``waiting`` are the listening socket and the open connections of the
    former program.

    ``last_error`` is the reason why the server does not answer; empty while it answers.
    """

    def __init__(
        self,
        inside: Opener,
        port: int,
        scrape: Callable[[], Iterator[str]],
        targets: Callable[[], Mapping[str, str]],
        *,
        version: str = "",
        listener: socket.socket | None = None,
        waiting: list[Waiting] | None = None,
    ) -> None:
        self._inside = inside
        self._scrape = scrape
        self._targets = targets
        self._version = version
        self._port = port
        self._inherited = listener
        self._waiting = waiting or []
        self._handing_over = False
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._scrapes: set[socket.socket] = set()
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the threads; open requests get no answer."""
        self._stop()
        for one in list(self._scrapes):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def hand_over(self) -> tuple[socket.socket | None, list[Waiting]]:
        """Stop the threads after open scrapes; return the listener and the open connections."""
        deadline = time.monotonic() + SEND_SECONDS
        while self._scrapes and time.monotonic() < deadline:
            time.sleep(0.01)
        self._handing_over = True
        self._stop()
        return self._inherited, self._waiting

    def _stop(self) -> None:
        self._stopping.set()
        self._wake.send(b".")
        if self._thread.is_alive():
            self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._open_session() as session:
                    self.last_error = ""
                    while not self._stopping.is_set():
                        session.serve()
                    if self._handing_over:
                        self._inherited, self._waiting = session.leave()
            except Exception as error:  # noqa: BLE001 (without answers HAProxy reports each pinged member as down)
                text = f"{type(error).__name__}: {error}"
                if text != self.last_error:
                    unexpected = not isinstance(error, (OSError, AgentError))
                    _log(
                        "the responder (for pings and metrics) has an error, closes all its sockets, and opens "
                        f"them again soon: {text}",
                        unexpected=unexpected,
                    )
                self.last_error = text
                self._stopping.wait(_RETRY_SECONDS)

    def _open_session(self) -> _Session:
        pinger, listener = self._inside(_open, self._port, self._inherited)
        self._inherited, waiting, self._waiting = None, self._waiting, []
        session = _Session(pinger, listener, self._woken, self._answer_scrape, self._targets, self._version)
        for connection, received in waiting:
            session.adopt(connection, received)
        return session

    def _answer_scrape(self, connection: socket.socket, version: str) -> None:
        """Answer in a separate thread, because a scraper may be slow."""
        if len(self._scrapes) >= MOST_SCRAPES:
            with connection, suppress(OSError):
                _send_text(connection, 503, f"{MOST_SCRAPES} scrapes are in progress")
            return
        self._scrapes.add(connection)
        threading.Thread(target=self._send_metrics, args=(connection, version), name="scrape", daemon=True).start()

    def _send_metrics(self, connection: socket.socket, version: str) -> None:
        try:
            connection.settimeout(SEND_SECONDS)
            try:
                parts = self._scrape()
            except AgentError as error:
                _send_text(connection, 503, str(error))
                return
            _stream(connection, parts, chunked=version == "HTTP/1.1")
        except OSError:
            # The client has closed the connection during the scrape, which is no error.
            pass
        except Exception as error:  # noqa: BLE001 (this thread has no caller)
            _log(
                f"the responder failed to answer a scrape of the metrics: {type(error).__name__}: {error}",
                unexpected=True,
            )
        finally:
            self._scrapes.discard(connection)
            connection.close()


class _Session:
    """The sockets and open requests between two errors."""

    def __init__(
        self,
        pinger: Pinger,
        listener: socket.socket,
        woken: socket.socket,
        on_scrape: Callable[[socket.socket, str], None],
        targets: Callable[[], Mapping[str, str]],
        version: str,
    ) -> None:
        self._on_scrape = on_scrape
        self._targets = targets
        self._version = version
        self._most = _connection_limit()
        # Open connections by file descriptor, the earliest deadline first.
        self._open: dict[int, Exchange] = {}
        self._pinger, self._listener = pinger, listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for family, one in self._pinger.sockets.items():
            self._selector.register(one, selectors.EVENT_READ, partial(self._receive_echo, family))

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        # The new responder has a duplicate of the listening socket (see `leave`), so no new connection is lost.
        self._listener.close()
        for exchange in list(self._open.values()):
            self._drop(exchange).close()
        self._pinger.close()
        self._selector.close()

    def leave(self) -> tuple[socket.socket, list[Waiting]]:
        """Return the sockets for the new program; this process does not use them any more."""
        waiting = [(self._drop(exchange), exchange.received) for exchange in list(self._open.values())]
        return self._listener.dup(), waiting

    def adopt(self, connection: socket.socket, received: bytes) -> None:
        """Continue a request of the former program: its ping is sent again."""
        exchange = self._begin(connection)
        exchange.received = received
        if b"\r\n\r\n" in received:
            self._handle(exchange)

    def serve(self) -> None:
        """Wait for events and handle them."""
        for key, _ in self._selector.select(self._expire()):
            if isinstance(key.data, Exchange):
                if self._open.get(key.fd) is key.data:
                    # An earlier event from the same select() may have closed this connection. So the responder reads a
                    # connection only if it is still open.
                    self._read(key.data)
            else:
                key.data()

    def _expire(self) -> float | None:
        """Answer expired requests; return the seconds until the next expiry."""
        now = time.monotonic()
        while self._open:
            first = next(iter(self._open.values()))
            if first.deadline > now:
                return first.deadline - now
            self._answer(first, 503, f"no echo within {LONGEST_SECONDS:.0f} s")
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        while len(self._open) >= self._most:
            self._answer(next(iter(self._open.values())), 503, "too many requests are open")
        self._read(self._begin(connection))

    def _begin(self, connection: socket.socket) -> Exchange:
        connection.setblocking(False)
        exchange = Exchange(connection)
        self._open[connection.fileno()] = exchange
        self._selector.register(connection, selectors.EVENT_READ, exchange)
        return exchange

    def _read(self, exchange: Exchange) -> None:
        try:
            data = exchange.socket.recv(_LARGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(exchange).close()
            return
        if exchange.mark is not None:
            # The request waits for the answer to its ping, and further data are ignored.
            return
        exchange.received += data
        if b"\r\n\r\n" in exchange.received:
            self._handle(exchange)
        elif len(exchange.received) >= _LARGEST_REQUEST:
            self._answer(exchange, 431, "the request headers are too long")

    def _handle(self, exchange: Exchange) -> None:
        words = exchange.received.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
            self._answer(exchange, 400, "this is not an HTTP/1 request")
            return
        method, (path, *_), version = words[0], words[1].split("?"), words[2]
        if path not in ("/", "/metrics", "/version") and not path.startswith(_PING):
            self._answer(exchange, 404, "the only path is /metrics")
        elif method != "GET":
            self._answer(exchange, 405, "the only method is GET", "Allow: GET\r\n")
        elif path == "/":
            self._answer(exchange, 200, _FRONT)
        elif path == "/metrics":
            self._on_scrape(self._drop(exchange), version)
        elif path == "/version":
            self._answer(exchange, 200, self._version)
        else:
            self._ping(exchange, path.removeprefix(_PING))

    def _ping(self, exchange: Exchange, member: str) -> None:
        address = self._targets().get(member)
        if address is None:
            self._answer(exchange, 404, "this member is not pinged")
            return
        try:
            exchange.mark = self._pinger.send(address, exchange)
        except OSError as error:
            self._answer(exchange, 503, f"cannot send an echo request: {error}")

    def _receive_echo(self, family: socket.AddressFamily) -> None:
        exchange = self._pinger.receive(family)
        if isinstance(exchange, Exchange):
            self._answer(exchange, 200, "the member answers")

    def _answer(self, exchange: Exchange, status: int, text: str, head: str = "") -> None:
        connection = self._drop(exchange)
        with suppress(OSError):
            _send_text(connection, status, text, head)
        connection.close()

    def _drop(self, exchange: Exchange) -> socket.socket:
        """Remove a request; the caller owns its connection."""
        self._selector.unregister(exchange.socket)
        del self._open[exchange.socket.fileno()]
        if exchange.mark is not None:
            self._pinger.cancel(exchange.mark)
        return exchange.socket


def _open(port: int, inherited: socket.socket | None) -> tuple[Pinger, socket.socket]:
    pinger = Pinger()
    try:
        return pinger, inherited or _listen(port)
    except OSError:
        pinger.close()
        raise


def _listen(port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # TCP_DEFER_ACCEPT: the kernel reports a connection when its data have arrived, which saves one event for each
        # request.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(LONGEST_SECONDS))
        opened.bind((ADDRESS, port))
        opened.listen(_BACKLOG)
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened


def _log(text: str, *, unexpected: bool) -> None:
    """Write to the log of the service manager; an unexpected error with its traceback."""
    if unexpected:
        import traceback  # noqa: PLC0415 (rarely needed, and costs memory)

        text = f"{text}\n{traceback.format_exc()}"
    sys.stderr.write(f"responder: {text}\n")
    sys.stderr.flush()


def _connection_limit() -> int:
    """Return the limit of open connections: half of the process's files. Raises the limit of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_OPEN if soft == resource.RLIM_INFINITY else min(MOST_OPEN, soft // 2)


def _send_text(connection: socket.socket, status: int, text: str, head: str = "") -> None:
    body = f"{text}\n".encode()
    connection.sendall(
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n{head}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )


def _stream(connection: socket.socket, parts: Iterator[str], *, chunked: bool) -> None:
    """Send the parts in chunks, or without them for HTTP/1.0. Raises TimeoutError for a slow scraper."""
    deadline = time.monotonic() + LONGEST_SECONDS
    coding = "Transfer-Encoding: chunked\r\n" if chunked else ""
    connection.sendall(
        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nCache-Control: no-store\r\n{coding}"
        "Connection: close\r\n\r\n".encode()
    )
    for part in parts:
        data = part.encode()
        connection.sendall(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if time.monotonic() > deadline:
            raise TimeoutError(f"a scrape took more than {LONGEST_SECONDS:.0f} s")
    if chunked:
        connection.sendall(b"0\r\n\r\n")
