# SPDX-License-Identifier: Apache-2.0
"""Clients of a load balancer: the requests they send and the answers they receive.

Invariant: every connection begins in the clients' namespace; a `HttpClient` closes the connections it opened.

    client.fetch("/path", port=443, tls=trusting(authority))    one request on a new connection
    client.connect(port) / client.tls(port, ...)                a socket, for several requests or other data
    ask(connection, "/path", ...)                               a request on a socket (HTTP/1.x)
    upgrade(connection, "/path")                                a WebSocket's handshake
    ask_h2(connection, "/path", ...)                            the same in HTTP/2, with trailers
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
from peers import RecordedRequest, SocketFactory
from pki import Certificate
from wanted import VIP, VIP6

VIPS = (VIP, VIP6)
CLIENT, CLIENT6 = "198.51.100.20", "2001:db8:1::20"
OTHER, OTHER6 = "198.51.100.21", "2001:db8:1::21"
TIME_LIMIT = 20.0
_TROUBLE = (OSError, http.client.HTTPException, EOFError)


@dataclass
class Reply:
    """An answer as the client received it."""

    status: int
    version: str
    headers: list
    body: bytes
    trailers: list = field(default_factory=list)
    complete: bool = False

    def values(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each.lower() == name.lower()]

    def header(self, name: str) -> str | None:
        """Return the only value of a header field, or None."""
        values = self.values(name)
        assert len(values) < 2, f"{name} occurs {len(values)} times"
        return values[0] if values else None

    @property
    def seen(self) -> RecordedRequest:
        """Return the request as the answering member received it."""
        assert self.status == 200, f"{self.status}: {self.body[:300]!r}"
        return RecordedRequest.read(json.loads(self.body))

    @property
    def member(self) -> str:
        """Return the name of the answering member."""
        return self.seen.member


def ask(
    connection: socket.socket,
    path: str = "/",
    *,
    method: str = "GET",
    headers=(),
    host: str | None = "www.example.com",
    body: bytes = b"",
    version: str = "1.1",
) -> Reply:
    """Send an HTTP/1.x request with exactly these header fields, and return the answer."""
    lines = [f"{method} {path} HTTP/{version}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"Content-Length: {len(body)}"] if body else []
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return answer(connection, method)


def upgrade(connection: socket.socket, path: str = "/") -> Reply:
    """Request a WebSocket (RFC 6455, with the key of its example). The status of success is 101."""
    key = ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
    wanted = (("Connection", "Upgrade"), ("Upgrade", "websocket"), key, ("Sec-WebSocket-Version", "13"))
    return ask(connection, path, headers=wanted)


def answer(connection: socket.socket, method: str = "GET") -> Reply:
    """Return the next HTTP/1.x answer on a connection."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    said = f"HTTP/{response.version // 10}.{response.version % 10}"
    return Reply(response.status, said, [list(each) for each in response.getheaders()], response.read())


def ask_h2(
    connection: ssl.SSLSocket,
    path: str = "/",
    *,
    method: str = "GET",
    headers=(),
    host: str = "www.example.com",
    body: bytes = b"",
    trailers=(),
) -> Reply:
    """Send an HTTP/2 request on a new connection, and return the answer with trailers."""
    talk = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="latin-1"))
    talk.initiate_connection()
    stream = talk.get_next_available_stream_id()
    head = [(":method", method), (":scheme", "https"), (":authority", host), (":path", path), *headers]
    talk.send_headers(stream, head, end_stream=not body and not trailers)
    if body:
        talk.send_data(stream, body, end_stream=not trailers)
    if trailers:
        talk.send_headers(stream, list(trailers), end_stream=True)
    connection.sendall(talk.data_to_send())
    reply = Reply(0, "HTTP/2", [], b"")
    while not reply.complete:
        data = connection.recv(65536)
        if not data:
            raise EOFError("the connection ended during an answer")
        for event in talk.receive_data(data):
            _hear(talk, event, reply)
        connection.sendall(talk.data_to_send())
    return reply


def _hear(talk: h2.connection.H2Connection, event, reply: Reply) -> None:
    if isinstance(event, h2.events.ResponseReceived):
        reply.headers = [list(each) for each in event.headers if not each[0].startswith(":")]
        reply.status = int(dict(event.headers)[":status"])
    elif isinstance(event, h2.events.DataReceived):
        reply.body += event.data
        talk.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
    elif isinstance(event, h2.events.TrailersReceived):
        reply.trailers = [list(each) for each in event.headers]
    elif isinstance(event, h2.events.StreamReset):
        raise ConnectionResetError(f"stream reset: {event.error_code}")
    elif isinstance(event, h2.events.StreamEnded):
        reply.complete = True


def ended(connection: socket.socket, seconds: float = TIME_LIMIT) -> float:
    """Wait until the peer ends a connection, discard its data, and return the seconds."""
    begin = time.monotonic()
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while connection.recv(65536):
            pass
    return time.monotonic() - begin


class _Wrapped(ssl.SSLSocket):
    """A TLS socket that closes if its peer is gone before the handshake; CPython leaves it open."""

    def getpeername(self):
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended before the handshake") from None


def trusting(
    *authorities,
    certificate: Certificate | None = None,
    alpn=(),
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None,
    ciphers: str | None = None,
) -> ssl.SSLContext:
    """Return a client's TLS settings. Without an authority, the client verifies no certificate.

    The client offers old versions and weak ciphers on request: the server must refuse them.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = _Wrapped
    if authorities:
        context.load_verify_locations(cadata="".join(each.pem for each in authorities))
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.minimum_version, context.maximum_version = versions or (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    context.set_ciphers(f"{ciphers or 'ALL'}:@SECLEVEL=0")
    if alpn:
        context.set_alpn_protocols(list(alpn))
    present(context, certificate)
    return context


def serving(
    certificate: Certificate, *, alpn=(), clients=None, ciphers: str | None = None, versions=None
) -> ssl.SSLContext:
    """Return a member's TLS settings; `clients` is the authority of required client certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    if clients is not None:
        context.load_verify_locations(cadata=clients.pem)
        context.verify_mode = ssl.CERT_REQUIRED
    if versions:
        context.minimum_version, context.maximum_version = versions
    if ciphers:
        context.set_ciphers(ciphers)
    present(context, certificate)
    return context


def present(context: ssl.SSLContext, certificate: Certificate | None) -> None:
    """Load a certificate, which the ssl module takes from files only."""
    if certificate is not None:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(certificate.pem)
            file.flush()
            context.load_cert_chain(file.name)


class HttpClient:
    """A client in the clients' namespace."""

    def __init__(self, sockets: SocketFactory) -> None:
        self._room = sockets
        self._open = contextlib.ExitStack()

    def connect(
        self,
        port: int = 80,
        address: str = VIP,
        *,
        source: str | None = None,
        source_port: int = 0,
        timeout: float = TIME_LIMIT,
    ) -> socket.socket:
        """Open a TCP connection, from `source` and `source_port` if given."""
        opened = self._open.enter_context(self._room.socket(address))
        opened.settimeout(timeout)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source is not None:
            # The port of a connection that has just ended can be used again.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((source, source_port))
        opened.connect((address, port))
        return opened

    def tls(
        self,
        port: int = 443,
        address: str = VIP,
        *,
        tls: ssl.SSLContext | None = None,
        name: str | None = "www.example.com",
        session: ssl.SSLSession | None = None,
        **more,
    ) -> ssl.SSLSocket:
        """Open a TLS connection; `name` is the server name (SNI), which the client may verify."""
        plain = self.connect(port, address, **more)
        wrapped = (tls or trusting()).wrap_socket(plain, server_hostname=name, session=session)
        return self._open.enter_context(wrapped)

    def fetch(
        self,
        path: str = "/",
        *,
        port: int = 80,
        address: str = VIP,
        tls: ssl.SSLContext | None = None,
        name: str | None = "www.example.com",
        source: str | None = None,
        timeout: float = TIME_LIMIT,
        **request,
    ) -> Reply:
        """Send a request on a new connection, with HTTP/2 if ALPN selects it."""
        if tls is None:
            connection = self.connect(port, address, source=source, timeout=timeout)
        else:
            connection = self.tls(port, address, tls=tls, name=name, source=source, timeout=timeout)
        try:
            if tls is not None and connection.selected_alpn_protocol() == "h2":
                return ask_h2(connection, path, **request)
            return ask(connection, path, **request)
        finally:
            connection.close()

    def presented(self, port: int = 443, **more) -> tuple[bytes, ...]:
        """Return the server's certificates in its order (DER)."""
        connection = self.tls(port, **more)
        try:
            return tuple(ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in _chain(connection))
        finally:
            connection.close()

    def refused(self, port: int = 80, address: str = VIP, **more) -> bool:
        """Return whether a plain HTTP request receives no answer, or no connection."""
        try:
            self.fetch(port=port, address=address, **more)
        except _TROUBLE:
            return True
        return False

    def load(self, threads: int = 2, **request) -> Load:
        """Return a context that sends requests without a pause."""
        return Load(self, threads, request)

    def close(self) -> None:
        self._open.close()


def _chain(connection: ssl.SSLSocket):
    # Public from Python 3.13 on.
    return connection._sslobj.get_unverified_chain()


class Load:
    """Sends requests without a pause, each on a new connection; counts answers and keeps failures."""

    def __init__(self, client: HttpClient, threads: int, request: dict) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._client = client
        self._request = request
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                reply = self._client.fetch(**self._request)
                name = reply.member if reply.status == 200 else ""
                failure = "" if name else f"{reply.status} {reply.body[:100]!r}"
            except _TROUBLE as error:
                name, failure = "", f"{type(error).__name__}: {error}"
            with self._changed:
                if name:
                    self.answers[name] += 1
                else:
                    self.failures.append(failure)
                self._changed.notify_all()

    @property
    def total(self) -> int:
        return sum(self.answers.values())

    def goes_on(self, times: int = 5) -> None:
        """Wait for further answers, which were sent after earlier changes."""
        with self._changed:
            wanted = self.total + times
            assert self._changed.wait_for(lambda: self.total >= wanted or self.failures, TIME_LIMIT)
            assert not self.failures, self.failures[:3]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(TIME_LIMIT)
