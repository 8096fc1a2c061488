# SPDX-License-Identifier: Apache-2.0
"""An HTTP member that answers with its name, the request's headers and path, and the client's name.

Invariant: inside the with block, it listens in a member's namespace for IPv4 and IPv6. The client's name is the common
name in the client certificate.
"""

import json
import socket
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dataplane.proxy_header import read_proxy_header

from amphora_driver.host import namespaces


class _Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    name = ""
    proxied = False

    def handle_error(self, request, client_address):
        """Ignore health checks that close after the connection or the handshake."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    proxied = None

    def setup(self):
        if self.server.proxied:
            self.proxied = read_proxy_header(self.request)
        super().setup()

    def do_GET(self):
        shown = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        client = dict(pair for (pair,) in shown["subject"]).get("commonName") if shown else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        said = {"member": self.server.name, "path": self.path, "headers": headers, "client": client}
        if self.proxied is not None:
            said["proxied"] = {"version": self.proxied.version, "source": self.proxied.source[0]}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Not used."""


@contextmanager
def answering(settings, host, port, *, certificate=None, clients=None, proxied=False):
    """Run an echo server on a member's port.

    Args:
        settings: the sandbox's.
        host: the member.
        port: where it listens.
        certificate: path of certificate and key, for TLS.
        clients: path of the CA of required client certificates.
        proxied: whether each connection begins with a PROXY header.
    """
    place = namespaces.path(settings.host(host))
    server = namespaces.run_inside(place, lambda: _Server(("::", port), _Handler))
    server.name, server.proxied = host, proxied
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
        # The thread of the connection does the handshake, so that a slow one does not block accept().
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
