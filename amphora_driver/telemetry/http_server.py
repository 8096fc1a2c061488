# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the status page and the metrics.

Invariant: the server never stops or delays its process. The server has a limited number of separate threads. A
connection has one request and one total time limit, independent of the client. The server logs an unavailable port,
certificate or database, and tries again.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import ssl
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from amphora_driver.installation import installed_version
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry.handlers import RequestHandler, Response, TokenFile, refusal_response
from amphora_driver.telemetry.http_request import MAX_HEAD_SIZE, RequestRefused, parse_request
from amphora_driver.telemetry.records import RecordReader, read_options
from amphora_driver.telemetry.snapshot_cache import SnapshotCache, open_read_only
from amphora_driver.telemetry.status_page import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.telemetry.http_request import Request

LOG = logging.getLogger(__name__)
# Maximum number of open connections. At the maximum, the server closes the oldest connection before the server accepts
# a new connection.
_MAX_CONNECTIONS = 16
_BACKLOG = 32
# A connection may take _CONNECTION_TIMEOUT seconds, a single read _READ_TIMEOUT seconds, and the close of the
# connection _CLOSE_TIMEOUT seconds.
_CONNECTION_TIMEOUT = 20.0
_READ_TIMEOUT = 5.0
_CLOSE_TIMEOUT = 1.0
_RESTART_DELAY = 10.0
_ACCEPT_TIMEOUT = 0.5
_HEAD_END = b"\r\n\r\n"


class Handler(Protocol):
    """Answers the requests of a server."""

    def handle(self, request: Request, peer: str) -> Response: ...


class StatusServer:
    """Serves the status page of one process in separate threads, between `start` and `stop`.

    Args:
        port: TCP port; 0 for any free port. The attribute `port` has the port in use.
        certificate: path of certificate and key in one PEM file; None for plain HTTP.
    """

    def __init__(self, address: str, port: int, handler: Handler, certificate: str | None = None) -> None:
        self.port = port
        self._address = address
        self._handler = handler
        self._certificate = certificate
        self._context: tuple[float, ssl.SSLContext] | None = None
        self._stopping = threading.Event()
        self._listening = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[int, tuple[socket.socket, float]] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._logged = ""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and stop all threads."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._shut_down(list(self._open))
            threads = list(self._threads)
        for one in threads:
            one.join(_CLOSE_TIMEOUT)

    def wait_until_listening(self, seconds: float) -> bool:
        """Wait until the server listens on a port, and return whether it does."""
        return self._listening.wait(seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._bind() as listener:
                    self._listening.set()
                    self._accept_until_stopped(listener)
            except OSError as error:
                attempt = f"cannot serve the status page on {self._address} port {self.port}"
                self._log_once(f"{attempt}, trying again every {_RESTART_DELAY:.0f} s: {error.strerror or error}")
            except Exception:
                LOG.exception(
                    "the status page server failed with an unexpected error and restarts in %.0f s", _RESTART_DELAY
                )
            self._listening.clear()
            self._stopping.wait(_RESTART_DELAY)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        # While another process uses the port, `create_server` raises an error, and the caller tries again later.
        made = socket.create_server((self._address, self.port), family=family, backlog=_BACKLOG)
        made.setblocking(False)
        self.port = made.getsockname()[1]
        LOG.info("this process serves the status page and the metrics on address %s, port %d", self._address, self.port)
        return made

    def _accept_until_stopped(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if selector.select(_ACCEPT_TIMEOUT):
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        self._start_connection(*listener.accept())
                self._close_overdue()

    def _start_connection(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        connection.settimeout(_READ_TIMEOUT)
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                # A normal request takes milliseconds, so the oldest connection belongs to a slow client.
                self._shut_down([min(self._open)])
            number = next(self._numbers)
            self._open[number] = (connection, time.monotonic())
            work = (number, connection, peer[0])
            thread = threading.Thread(target=self._serve, args=work, name="status", daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            LOG.warning(
                "the status page server cannot start a thread for a connection and closes the connection: %s", error
            )
            self._close(number, connection)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._shut_down([number for number, (_, since) in self._open.items() if now - since > _CONNECTION_TIMEOUT])

    def _shut_down(self, numbers: list[int]) -> None:
        """Shut connections down, so that their threads close them. The caller holds the lock."""
        for number in numbers:
            connection, _ = self._open.pop(number)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _close(self, number: int, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(number, None)
        connection.close()

    def _serve(self, number: int, connection: socket.socket, peer: str) -> None:
        try:
            if self._certificate is not None:
                connection = self._wrap_tls(number, connection)
            self._answer(connection, peer)
        except (OSError, ValueError) as error:
            # The cause is a client that closed its connection or does not speak TLS. Operators need no warning about
            # it.
            LOG.debug("a connection to the status page failed, and the server closes it: %s", error)
        except Exception:
            LOG.exception(
                "the status page server failed to serve a connection because of an unexpected error, and closes the "
                "connection"
            )
        finally:
            self._close(number, connection)

    def _wrap_tls(self, number: int, connection: socket.socket) -> socket.socket:
        wrapped = self._load_tls_context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            with self._lock:
                if number in self._open:
                    self._open[number] = (wrapped, self._open[number][1])
            # The handshake starts after the entry in `_open`. So another thread can close the connection if the
            # handshake exceeds the time limit.
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _load_tls_context(self) -> ssl.SSLContext:
        """Return a context with the current certificate. A changed file takes effect without a restart."""
        path = Path(str(self._certificate))
        try:
            changed = path.stat().st_mtime
            if self._context is None or self._context[0] != changed:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(path)
                self._context = (changed, context)
        except OSError as error:
            happened = f"cannot use [amp_status_page] certificate {path}: {error}"
            self._log_once(happened)
            raise
        return self._context[1]

    def _answer(self, connection: socket.socket, peer: str) -> None:
        method, accepts_gzip = "GET", False
        try:
            request = parse_request(_read_head(connection))
            method, accepts_gzip = request.method, "gzip" in request.headers.get("accept-encoding", "")
            response = self._handler.handle(request, peer)
        except RequestRefused as refusal:
            response = refusal_response(refusal)
        except OSError:
            raise
        except Exception:
            LOG.exception(
                "the status page server failed to process a request because of an unexpected error, and responds "
                "with status 500"
            )
            response = Response(status=500, body=b"Internal error: see the log of this process.\n")
        connection.sendall(response.encode(method, accepts_gzip=accepts_gzip))
        _close_gracefully(connection)

    def _log_once(self, text: str) -> None:
        """Log an error unless it repeats the previous one."""
        if self._logged != text:
            self._logged = text
            LOG.error(
                "the status page server does not work, so the process serves no status page and no metrics: %s", text
            )


def _read_head(connection: socket.socket) -> bytes:
    """Return the head of a request without the empty line at the end, of at most `MAX_HEAD_SIZE` bytes."""
    found = b""
    while _HEAD_END not in found and len(found) <= MAX_HEAD_SIZE:
        more = connection.recv(MAX_HEAD_SIZE)
        if not more:
            raise ConnectionAbortedError("the client sent no complete request")
        found += more
    head = found.partition(_HEAD_END)[0]
    if len(head) > MAX_HEAD_SIZE:
        raise RequestRefused(431, "The head of this request is too long.")
    return head


def _close_gracefully(connection: socket.socket) -> None:
    """Read until the client closes: an earlier close would reset the connection and lose the response."""
    until = time.monotonic() + _CLOSE_TIMEOUT
    with suppress(OSError):
        connection.settimeout(_CLOSE_TIMEOUT)
        if isinstance(connection, ssl.SSLSocket):
            connection.unwrap().close()
            return
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096) and time.monotonic() < until:
            pass


def port_of(port: int, index: int) -> int:
    """Return the port of one of several processes: the configured port for the first one, with index 0.

    The ports after the configured one are the defaults of other processes.
    """
    return port if index == 0 else port + 100 + index


class Telemetry:
    """The status page of a process; a context manager around the work of the process.

    `is_working` returns the result of the health check. Without a configured port, `server` is None. Several processes
    of one kind on one host have an `index`, from which `port_of` computes their ports.
    """

    def __init__(
        self, conf: ConfigOpts, kind: ProcessKind, name: str, is_working: Callable[[], bool], index: int = 0
    ) -> None:
        options = conf.amp_status_page
        names = {ProcessKind.HEALTH_MANAGER: "health_bind_port", ProcessKind.PROVIDER_AGENT: "provider_agent_port"}
        port = options[names.get(kind, "bind_port")]
        self._snapshots: SnapshotCache | None = None
        self.server: StatusServer | None = None
        if not port:
            return
        process = ProcessIdentity(
            kind=kind.value,
            name=name,
            version=installed_version(),
            interval=conf.amp_health.interval,
            silent_after=conf.amp_failover.silent_after,
        )
        database = open_read_only(conf.amp_database.connection)
        self._snapshots = SnapshotCache(
            database, conf.amp_health.interval, conf.amp_spares.number, expiry_days=conf.amp_tls.expiry_days
        )
        records = RecordReader(database, process.version, read_options(conf))
        handler = RequestHandler(self._snapshots, records, process, TokenFile(options.token_file), is_working)
        self.server = StatusServer(options.bind_address, port_of(port, index), handler, options.certificate)

    def __enter__(self) -> Telemetry:
        if self.server is not None:
            self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None and self._snapshots is not None:
            self.server.stop()
            self._snapshots.close()
