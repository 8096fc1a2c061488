# SPDX-License-Identifier: Apache-2.0
"""Members: real servers that report the requests they receive.

Invariant: a peer listens in the members' namespace, counts its connections, and closes all sockets at its end.
A web server returns its view of a request as JSON and keeps it in `requests`: a test can check client and member.

    WebServer    HTTP/1.x and (over TLS, by ALPN) HTTP/2; echoes after an upgrade; TLS and PROXY protocol on request
    EchoServer   TCP: sends its name, then echoes; TLS and PROXY protocol on request
    SilentServer TCP: accepts and sends nothing
    FullServer   does not accept: connection attempts time out
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus

import h2.config
import h2.connection
import h2.events
from cryptography import x509
from proxy_header import Proxied, read_proxy_header

MEMBER, MEMBER6 = "198.51.100.110", "2001:db8:1::110"
TIME_LIMIT = 20.0


class SocketFactory:
    """Opens sockets in a network namespace, for use by any thread."""

    def __init__(self, namespace) -> None:
        self._namespace = namespace

    def socket(self, address: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        return self._namespace.run(socket.socket, socket.AF_INET6 if ":" in address else socket.AF_INET, kind)


@dataclass
class Tls:
    """A TLS server's view of a connection."""

    version: str
    cipher: str
    alpn: str | None
    sni: str | None
    client: str | None
    """The subject of the client's certificate (RFC 4514)."""


@dataclass
class RecordedRequest:
    """A request as the member saw it: header fields in their order, in their case (lower case in HTTP/2)."""

    member: str
    connection: int
    method: str
    target: str
    version: str
    headers: list
    body: str
    peer: list
    proxied: Proxied | None = None
    tls: Tls | None = None
    trailers: list = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each.lower() == name.lower()]

    @classmethod
    def read(cls, document) -> RecordedRequest:
        tls, proxied = document.pop("tls"), document.pop("proxied")
        return cls(**document, tls=tls and Tls(**tls), proxied=proxied and Proxied(**proxied))


@dataclass
class Answer:
    """A web server's answer; the default body is its view of the request."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    trailers: tuple[tuple[str, str], ...] = ()


class Peer:
    """A server with a thread for each connection."""

    backlog = 128

    def __init__(
        self,
        sockets: SocketFactory,
        name: str,
        address: str = MEMBER,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        proxied: bool = False,
    ) -> None:
        self.name = name
        self.address = address
        self.port = port
        self.connections = 0
        self._room = sockets
        self._tls = tls
        self._proxied = proxied
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listening: socket.socket | None = None
        if tls is not None:
            tls.sni_callback = _remember_name
        self.start()

    # -- listening ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, again on the same port after `stop`."""
        self._listening = self._room.socket(self.address)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind((self.address, self.port))
        self.port = self._listening.getsockname()[1]
        self._listening.listen(self.backlog)
        self._spawn(self._accept, self._listening)

    def stop(self) -> None:
        """Refuse new connections, and break open ones."""
        if self._listening is None:
            return
        listening, self._listening = self._listening, None
        with self._changed:
            broken = [listening, *self._open]
        for each in broken:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIME_LIMIT)
        self._threads.clear()
        listening.close()

    close = stop

    def _spawn(self, function, *arguments) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True, name=f"peer {self.name}")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, peer = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._changed:
                    self.connections += 1
                    number = self.connections
                    self._open.add(connection)
                    self._changed.notify_all()
                self._spawn(self._serve, connection, peer, number)

    def _serve(self, connection: socket.socket, peer, number: int) -> None:
        using = connection
        try:
            proxied = read_proxy_header(connection) if self._proxied else None
            if self._tls is not None:
                # If the client has reset the connection, `wrap_socket` raises an error and leaves its socket open.
                connection.getpeername()
                using = self._tls.wrap_socket(connection, server_side=True)
                with self._changed:
                    self._open.discard(connection)
                    self._open.add(using)
            self.serve(using, list(peer[:2]), number, proxied)
        except (OSError, ValueError, EOFError) as error:
            self.trouble(error)
        finally:
            with self._changed:
                self._open -= {connection, using}
                self._changed.notify_all()
            # The shutdown notifies the client even if it still sends.
            with suppress(OSError):
                using.shutdown(socket.SHUT_RDWR)
            using.close()

    def serve(self, connection: socket.socket, peer: list, number: int, proxied: Proxied | None) -> None:
        raise NotImplementedError

    def trouble(self, error: Exception) -> None:
        """Record the error of a broken connection for the test."""
        with self._changed:
            self.last_trouble = error

    def until(self, condition: Callable[[], object], what: str, seconds: float = TIME_LIMIT):
        """Wait for a condition on this peer's connections or requests; return its result."""
        with self._changed:
            result = self._changed.wait_for(condition, seconds)
        assert result, f"not within {seconds} s: {what}"
        return result


class WebServer(Peer):
    """An HTTP server; a test may replace `answer`, which returns the answer to a request."""

    def __init__(self, sockets: SocketFactory, name: str, address: str = MEMBER, port: int = 0, **more) -> None:
        self.requests: list[RecordedRequest] = []
        self.answer: Callable[[RecordedRequest], Answer] = more.pop("answer", lambda seen: Answer())
        super().__init__(sockets, name, address, port, **more)

    def asked(self, path: str) -> list[RecordedRequest]:
        """Return the requests for a path; health checks use other paths."""
        with self._changed:
            return [seen for seen in self.requests if seen.target.partition("?")[0] == path]

    def hears(self, path: str, times: int = 1) -> list[RecordedRequest]:
        """Wait for requests for a path."""
        return self.until(lambda: len(found := self.asked(path)) >= times and found, f"a request for {path}")

    def _note(self, seen: RecordedRequest) -> Answer:
        with self._changed:
            self.requests.append(seen)
            self._changed.notify_all()
        return self.answer(seen)

    def serve(self, connection, peer, number, proxied) -> None:
        tls = _tls(connection)
        if tls is not None and tls.alpn == "h2":
            _Http2(connection, lambda **what: self._see(peer, number, proxied, tls, **what), self._note).run()
            return
        with connection.makefile("rb") as reader:
            while (request := read_request(reader)) is not None:
                method, target, version, headers, body = request
                seen = self._see(
                    peer,
                    number,
                    proxied,
                    tls,
                    method=method,
                    target=target,
                    version=version,
                    headers=headers,
                    body=body,
                )
                if seen.values("Upgrade"):
                    self._note(seen)
                    self._upgraded(connection, reader, seen)
                    return
                answer = self._note(seen)
                connection.sendall(write_answer(answer, seen))
                if "close" in seen.values("Connection") or version == "HTTP/1.0":
                    return

    def _see(self, peer, number, proxied, tls, **what) -> RecordedRequest:
        return RecordedRequest(member=self.name, connection=number, peer=peer, proxied=proxied, tls=tls, **what)

    def _upgraded(self, connection, reader, seen: RecordedRequest) -> None:
        kind = seen.values("Upgrade")[0]
        lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", f"Upgrade: {kind}"]
        lines += [f"Sec-WebSocket-Accept: {_websocket_accept(key)}" for key in seen.values("Sec-WebSocket-Key")]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        while data := reader.read1(65536):
            connection.sendall(data)


def _websocket_accept(key: str) -> str:
    """Return a WebSocket server's answer to a key (RFC 6455, 4.2.2)."""
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    return base64.b64encode(digest).decode()


class EchoServer(Peer):
    """A TCP server that sends its name, then echoes; `greetings` has PROXY headers and TLS states."""

    def __init__(self, *arguments, **more) -> None:
        self.greetings: list[tuple[Proxied | None, Tls | None]] = []
        super().__init__(*arguments, **more)

    def serve(self, connection, peer, number, proxied) -> None:
        with self._changed:
            self.greetings.append((proxied, _tls(connection)))
            self._changed.notify_all()
        connection.sendall(f"{self.name}\n".encode())
        while data := connection.recv(65536):
            connection.sendall(data)


class SilentServer(Peer):
    """A TCP server that reads and sends nothing; `heard` has the received bytes."""

    def __init__(self, *arguments, **more) -> None:
        self.heard = b""
        super().__init__(*arguments, **more)

    def serve(self, connection, peer, number, proxied) -> None:
        while data := connection.recv(65536):
            with self._changed:
                self.heard += data
                self._changed.notify_all()


class FullServer(Peer):
    """A server with a full accept queue: the kernel drops further attempts, which time out."""

    backlog = 0

    def start(self) -> None:
        super().start()
        self._waiting = []
        for _ in range(3):
            one = self._room.socket(self.address)
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect((self.address, self.port))
            self._waiting.append(one)

    def _accept(self, listening) -> None:
        pass

    def close(self) -> None:
        for one in self._waiting:
            one.close()
        super().close()


def _remember_name(connection, name, _context) -> None:
    connection.server_name = name


def _tls(connection) -> Tls | None:
    if not isinstance(connection, ssl.SSLSocket):
        return None
    certificate = connection.getpeercert(binary_form=True)
    return Tls(
        version=connection.version(),
        cipher=connection.cipher()[0],
        alpn=connection.selected_alpn_protocol(),
        sni=getattr(connection, "server_name", None),
        client=x509.load_der_x509_certificate(certificate).subject.rfc4514_string() if certificate else None,
    )


# -- HTTP/1 --------------------------------------------------------------------------------------------------------


def read_head(reader) -> tuple[str, list] | None:
    """Return first line and header fields as received; None at the end of the connection."""
    line = reader.readline(65536)
    if not line:
        return None
    headers = []
    while (field_line := reader.readline(65536)) not in (b"\r\n", b"\n"):
        if not field_line:
            raise EOFError("the connection ended in a header")
        name, _, value = field_line.decode("latin-1").partition(":")
        headers.append([name, value.strip()])
    return line.decode("latin-1").rstrip("\r\n"), headers


def read_request(reader):
    """Return method, target, version, headers and body of the next request, or None."""
    head = read_head(reader)
    if head is None:
        return None
    first, headers = head
    method, target, version = first.split(" ", 2)
    lower = {name.lower(): value for name, value in headers}
    if lower.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join(read_chunks(reader))
    else:
        body = reader.read(int(lower.get("content-length", 0)))
    return method, target, version, headers, body.decode("latin-1")


def read_chunks(reader):
    while size := int(reader.readline().partition(b";")[0], 16):
        yield reader.read(size)
        reader.readline()
    while reader.readline() not in (b"\r\n", b"\n", b""):
        pass


def body_of(answer: Answer, seen: RecordedRequest) -> bytes:
    return json.dumps(asdict(seen)).encode() if answer.body is None else answer.body


def write_answer(answer: Answer, seen: RecordedRequest) -> bytes:
    body = body_of(answer, seen)
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    if answer.status >= 200 and answer.status not in (204, 304):
        lines.append(f"Content-Length: {len(body)}")
    else:
        body = b""
    if seen.method == "HEAD":
        body = b""
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# -- HTTP/2 --------------------------------------------------------------------------------------------------------


class _Http2:
    """One HTTP/2 connection, from the server's side."""

    def __init__(self, connection, see, note) -> None:
        self._socket = connection
        self._see = see
        self._note = note
        self._requests: dict[int, dict] = {}
        config = h2.config.H2Configuration(client_side=False, header_encoding="latin-1")
        self._h2 = h2.connection.H2Connection(config)

    def run(self) -> None:
        self._h2.initiate_connection()
        self._socket.sendall(self._h2.data_to_send())
        while data := self._socket.recv(65536):
            for event in self._h2.receive_data(data):
                self._event(event)
            self._socket.sendall(self._h2.data_to_send())

    def _event(self, event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            headers = [list(each) for each in event.headers]
            self._requests[event.stream_id] = {"headers": headers, "body": b"", "trailers": []}
        elif isinstance(event, h2.events.DataReceived):
            self._requests[event.stream_id]["body"] += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self._requests[event.stream_id]["trailers"] = [list(each) for each in event.headers]
        elif isinstance(event, h2.events.StreamEnded):
            self._answer(event.stream_id, self._requests.pop(event.stream_id))

    def _answer(self, stream: int, request: dict) -> None:
        pseudo = {name: value for name, value in request["headers"] if name.startswith(":")}
        seen = self._see(
            method=pseudo[":method"],
            target=pseudo[":path"],
            version="HTTP/2",
            headers=request["headers"],
            body=request["body"].decode("latin-1"),
            trailers=request["trailers"],
        )
        answer = self._note(seen)
        self._h2.send_headers(stream, [(":status", str(answer.status)), *answer.headers])
        self._h2.send_data(stream, body_of(answer, seen), end_stream=not answer.trailers)
        if answer.trailers:
            self._h2.send_headers(stream, list(answer.trailers), end_stream=True)
