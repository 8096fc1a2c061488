# SPDX-License-Identifier: Apache-2.0
"""Long connections: an endless download, and upgraded connections with an echo.

Invariant: every byte is verified. The received bytes are compared with the sent bytes.
"""

import hashlib
import itertools
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from amphora_driver.host import namespaces
from sandbox import topology

_CHUNK = 2000


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade"):
            self._echo()
        elif self.path == "/download":
            self._send()
        else:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _echo(self):
        self.send_response(101)
        self.send_header("Upgrade", "echo")
        self.send_header("Connection", "Upgrade")
        self.end_headers()
        self.close_connection = True
        while line := self.rfile.readline():
            self.wfile.write(line)

    def _send(self):
        """Send a block 20 times a second until the download ends; then close the connection."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        digest = hashlib.sha256()
        for number in itertools.count():
            over = self.server.over.wait(0.05)
            chunk = f"{number} ".encode() * _CHUNK
            self.wfile.write(chunk)
            digest.update(chunk)
            if over:
                break
        self.server.sent = digest.hexdigest()

    def log_message(self, *_):
        """Not used."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """The test closes connections on purpose."""


class Member:
    """A server in a member's namespace inside a with block."""

    def __init__(self, settings, host, port):
        self._server = namespaces.run_inside(
            namespaces.path(settings.host(host)), lambda: _Server(("0.0.0.0", port), _Handler)
        )
        self._server.over = threading.Event()
        self._server.sent = None
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._visits = []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.finish()
        for visit in self._visits:
            visit.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def visits(self, settings, address, port):
        """Start a download and two upgraded connections."""
        place = namespaces.path(settings.host(topology.CLIENT))
        plain = [
            namespaces.run_inside(place, lambda: socket.create_connection((address, port), timeout=10))
            for _ in range(3)
        ]
        self._visits += [Download(plain[0]), Echo(plain[1]), Echo(plain[2])]
        return self._visits

    def finish(self):
        """End the download."""
        self._server.over.set()

    @property
    def sent(self):
        """Return the digest of the bytes that the ended download sent."""
        return self._server.sent


class _Connection:
    """One client connection, after the response header."""

    request = ""

    def __init__(self, plain):
        self._plain = plain
        self._stream = plain.makefile("rb")
        plain.sendall(f"GET {self.request}\r\n\r\n".encode())
        head = list(iter(self._stream.readline, b"\r\n"))
        assert head[0].split()[1] in (b"200", b"101"), head

    def close(self):
        self._stream.close()
        self._plain.close()


class Download(_Connection):
    request = "/download HTTP/1.0"

    def __init__(self, plain):
        super().__init__(plain)
        self._digest = hashlib.sha256()
        self.goes_on()

    def goes_on(self):
        """Assert that more data arrives."""
        for _ in range(5):
            part = self._stream.read1(100_000)
            assert part, "the download continues"
            self._digest.update(part)

    def rest(self):
        """Read until the end; return the digest of all data."""
        while part := self._stream.read1(100_000):
            self._digest.update(part)
        return self._digest.hexdigest()


class Echo(_Connection):
    request = "/ HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo"

    def goes_on(self):
        """Assert that the echo of a line equals the line."""
        for number in range(5):
            line = f"{number}{'.' * 5000}\n".encode()
            self._plain.sendall(line)
            assert self._stream.readline() == line

    def is_cut(self, seconds):
        """Return whether the peer closes the connection in that time."""
        self._plain.settimeout(seconds)
        try:
            self._plain.sendall(b"hello\n")
            return self._stream.readline() == b""
        except ConnectionError:
            return True
