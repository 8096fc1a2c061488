# SPDX-License-Identifier: Apache-2.0
"""Receivers of log lines: syslog over UDP, TCP and TLS, JSON lines over HTTPS, and receivers that do not read."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from amphora_lab import CONTROLLER, eventually
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(directory: Path, address: str = CONTROLLER) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server whose certificate has this address, and the certificate in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"collector {address}")])
    now = dt.datetime.now(dt.timezone.utc)
    address_name = x509.IPAddress(ipaddress.ip_address(address))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address_name]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
    file = directory / f"collector-{address}.pem"
    file.write_text(private + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context, pem


def requiring(directory: Path, clients: str, *, tickets: bool = True) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server that requires a client certificate of some CAs, and its own CA in PEM."""
    context, pem = self_signed(directory)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=clients)
    context.num_tickets = 2 if tickets else 0
    return context, pem


def common_name(connection: ssl.SSLSocket) -> str | None:
    """Return the common name in the client certificate of a connection; None without one."""
    shown = connection.getpeercert()
    return dict(pair for (pair,) in shown["subject"]).get("commonName") if shown else None


class Receiver:
    """Messages that have arrived. Subclasses open a socket in the namespace of the thread that creates them."""

    scheme = ""
    path = ""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://{CONTROLLER}:{self.port}{self.path}"

    def wait_for(self, word: str) -> str:
        """Return the first message with a word."""
        return eventually(lambda: next((one for one in list(self.messages) if word in one), None), f"a message: {word}")

    def close(self) -> None:
        raise NotImplementedError


class UdpReceiver(Receiver):
    scheme = "udp"

    def __init__(self) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((CONTROLLER, 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        with suppress(OSError):
            while data := self._socket.recv(65536):
                self.messages.append(data.decode())

    def close(self) -> None:
        self._socket.close()


class TcpReceiver(Receiver):
    """Reads messages with octet counting. With ``reads`` false, it accepts connections and reads nothing."""

    scheme = "tcp"

    def __init__(self, context: ssl.SSLContext | None = None, *, port: int = 0, reads: bool = True) -> None:
        super().__init__()
        self._context = context
        self._reads = reads
        self.connections: list[socket.socket] = []
        self.clients: list[str | None] = []
        self.failures: list[str] = []
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((CONTROLLER, port))
        self._listener.listen(16)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                if self._reads:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
                self.clients.append(common_name(connection))
                self.connections.append(connection)
            self._read(connection)
        except (OSError, ValueError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _read(self, connection: socket.socket) -> None:
        buffer = b""
        while data := connection.recv(1 << 16):
            buffer += data
            while (space := buffer.find(b" ")) > 0 and len(buffer) > space + int(buffer[:space]):
                end = space + 1 + int(buffer[:space])
                self.messages.append(buffer[space + 1 : end].decode())
                buffer = buffer[end:]

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for one in (self._listener, *self.connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class TlsReceiver(TcpReceiver):
    scheme = "tls"


class HttpsReceiver(Receiver):
    """Stores the JSON lines of each request. It answers ``status``, once it is not None."""

    scheme, path = "https", "/ingest?kind=amphora"

    def __init__(self, context: ssl.SSLContext, idle_seconds: float | None = None) -> None:
        super().__init__()
        receiver = self
        self.closed = 0
        self.clients: list[str | None] = []
        self.requests: list[tuple[str, str | None, str]] = []
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # The server closes a connection that is idle for this number of seconds.
            timeout = idle_seconds

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.clients.append(common_name(self.connection))
                receiver.requests.append((self.path, self.headers["Authorization"], self.headers["Content-Type"]))
                if receiver.status == 200:
                    receiver.messages += body.splitlines()
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def finish(self) -> None:
                super().finish()
                receiver.closed += 1

            def log_message(self, *_) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_) -> None:
                pass

        self._server = Server((CONTROLLER, 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def documents(self) -> list[dict]:
        return [json.loads(one) for one in list(self.messages)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
