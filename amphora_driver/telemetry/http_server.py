# SPDX-License-Identifier: Apache-2.0
"""The server of status page and metrics.

Invariant: it can do its process no harm. It has threads of its own, so many at most; a connection has one request and
one time for all of it, whatever its client does or leaves; what it needs and does not get (its port, a certificate, the
database) is logged and tried again, and never ends the process or holds it up.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amphora_driver.store.process_registry import ProcessKind, installed_version
from amphora_driver.telemetry.handlers import Answer, Answers, TokenFile, refused
from amphora_driver.telemetry.http_request import LONGEST_HEAD, Refused, parse
from amphora_driver.telemetry.snapshot_cache import Looking, read_only
from amphora_driver.telemetry.status_page import Who

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
# Connections at once; one more ends the oldest of them.
_MOST = 16
_BACKLOG = 32
# Seconds for a whole connection; for a client that says nothing; for what it still sends after the answer.
_LONGEST = 20.0
_SILENT = 5.0
_FAREWELL = 1.0
_BIND_AGAIN = 10.0
_TICK = 0.5
_END = b"\r\n\r\n"


class StatusServer:
    """Serves one process's page, in threads of its own, between `start` and `stop`.

    Args:
        address: IPv4 or IPv6.
        port: TCP port; 0 for any (see `port`).
        answers: to what is asked.
        certificate: path of certificate and key in one PEM file; None for plain HTTP.
    """

    def __init__(self, address: str, port: int, answers: Answers, certificate: str | None = None) -> None:
        self.port = port
        self._address = address
        self._answers = answers
        self._certificate = certificate
        self._context: tuple[float, ssl.SSLContext] | None = None
        self._stopping = threading.Event()
        self._listening = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[int, tuple[socket.socket, float]] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._said = ""

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and with it every connection."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._cut(list(self._open))
            threads = list(self._threads)
        for one in threads:
            one.join(_FAREWELL)

    def listening(self, seconds: float) -> bool:
        """Whether the port is its own, within some seconds."""
        return self._listening.wait(seconds)

    # --- connections --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._bind() as listener:
                    self._listening.set()
                    self._accept(listener)
            except OSError as error:
                self._say(f"no status page on {self._address} port {self.port}: {error.strerror or error}")
            except Exception:
                LOG.exception("the status page fails, and is tried again")
            self._listening.clear()
            self._stopping.wait(_BIND_AGAIN)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        # The others of a host may have it now, and give it up later.
        made = socket.create_server((self._address, self.port), family=family, backlog=_BACKLOG)
        made.setblocking(False)
        self.port = made.getsockname()[1]
        LOG.info("status page and metrics on %s port %d", self._address, self.port)
        return made

    def _accept(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if selector.select(_TICK):
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        self._begin(*listener.accept())
                self._reap()

    def _begin(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        connection.settimeout(_SILENT)
        with self._lock:
            if len(self._open) >= _MOST:
                # Whoever looks is answered in milliseconds: who is here longest is the one who is slow.
                self._cut([min(self._open)])
            self._number += 1
            number = self._number
            self._open[number] = (connection, time.monotonic())
            thread = threading.Thread(
                target=self._serve, args=(number, connection, peer[0]), name="status", daemon=True
            )
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            LOG.warning("no thread for the status page: %s", error)
            self._end(number, connection)

    def _reap(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._cut([number for number, (_, since) in self._open.items() if now - since > _LONGEST])

    def _cut(self, numbers: list[int]) -> None:
        """Have threads notice that their time is over; with the lock held. They close their sockets themselves."""
        for number in numbers:
            connection, _ = self._open.pop(number)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _end(self, number: int, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(number, None)
        connection.close()

    # --- one of them --------------------------------------------------------------------------------------------------

    def _serve(self, number: int, connection: socket.socket, peer: str) -> None:
        try:
            if self._certificate is not None:
                connection = self._encrypted(number, connection)
            self._answer(connection, peer)
        except (OSError, ValueError) as error:
            # A client that goes, or speaks another protocol.
            LOG.debug("a connection to the status page ended: %s", error)
        except Exception:
            LOG.exception("the status page could not be shown")
        finally:
            self._end(number, connection)

    def _encrypted(self, number: int, connection: socket.socket) -> socket.socket:
        wrapped = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            with self._lock:
                if number in self._open:
                    self._open[number] = (wrapped, self._open[number][1])
            # One whose time is over already has been shut down, and fails here.
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _tls(self) -> ssl.SSLContext:
        """With the certificate as its file has it now: a new one counts without a restart."""
        path = Path(str(self._certificate))
        try:
            changed = path.stat().st_mtime
            if self._context is None or self._context[0] != changed:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(path)
                self._context = (changed, context)
        except OSError as error:
            self._say(f"the status page has no certificate: [status] certificate {path}: {error}")
            raise
        return self._context[1]

    def _answer(self, connection: socket.socket, peer: str) -> None:
        method, packs = "GET", False
        try:
            request = parse(_read(connection))
            method, packs = request.method, "gzip" in request.headers.get("accept-encoding", "")
            answer = self._answers.to(request, peer)
        except Refused as refusal:
            answer = refused(refusal)
        except OSError:
            raise
        except Exception:
            LOG.exception("the status page could not be made")
            answer = Answer(status=500, body=b"This went wrong: see the log of this process.\n")
        connection.sendall(answer.written(method, packs=packs))
        _farewell(connection)

    def _say(self, text: str) -> None:
        """Log it once, however often it is tried."""
        if self._said != text:
            self._said = text
            LOG.error("%s", text)


def _read(connection: socket.socket) -> bytes:
    """The head of a request.

    Raises:
        Refused: it does not end where a head should have ended.
        ConnectionError: nobody said anything.
    """
    found = b""
    while _END not in found:
        if len(found) > LONGEST_HEAD:
            raise Refused(431, "The head of this request is too long.")
        more = connection.recv(LONGEST_HEAD)
        if not more:
            raise ConnectionAbortedError("nothing was asked")
        found += more
    head = found.partition(_END)[0]
    if len(head) > LONGEST_HEAD:
        raise Refused(431, "The head of this request is too long.")
    return head


def _farewell(connection: socket.socket) -> None:
    """Take what still comes: a socket that is closed before that resets the connection, and takes the answer back."""
    until = time.monotonic() + _FAREWELL
    with suppress(OSError):
        connection.settimeout(_FAREWELL)
        if isinstance(connection, ssl.SSLSocket):
            connection.unwrap().close()
            return
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096) and time.monotonic() < until:
            pass


class NoServer:
    """Where none is wanted."""

    def start(self) -> None:
        """Nothing begins."""

    def stop(self) -> None:
        """Nothing ends."""


class Telemetry:
    """The status page of a process, as configured; a context manager around what the process does.

    Args:
        conf: options.
        kind: what the process is there for.
        name: of the process.
        does_its_duty: whether it does; asked by whoever watches the process.
    """

    def __init__(self, conf: ConfigOpts, kind: ProcessKind, name: str, does_its_duty: Callable[[], bool]) -> None:
        options = conf.status
        ports = {
            ProcessKind.HEALTH_MANAGER: options.health_bind_port,
            ProcessKind.PROVIDER_AGENT: options.provider_agent_port,
        }
        port = ports.get(kind, options.bind_port)
        self._looking: Looking | None = None
        self.server: StatusServer | NoServer = NoServer()
        if not port:
            return
        who = Who(
            kind=kind.value,
            name=name,
            version=installed_version(),
            interval=conf.health.interval,
            silent_after=conf.failover.silent_after,
        )
        self._looking = Looking(read_only(conf.store.connection), conf.health.interval, conf.spares.number)
        answers = Answers(self._looking, who, TokenFile(conf.status.token_file), does_its_duty)
        self.server = StatusServer(conf.status.bind_address, port, answers, conf.status.certificate)

    def __enter__(self) -> Telemetry:
        self.server.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.server.stop()
        if self._looking is not None:
            self._looking.close()
