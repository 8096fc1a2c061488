# SPDX-License-Identifier: Apache-2.0
"""A TLS server in place of an agent, and CAs that sign certificates for both sides."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from amphora_driver import config
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.ca import Authority, create_authority

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 5

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.server.agent.serve(self, self.rfile.read(length))

    do_PUT = do_POST = do_GET  # noqa: N815 - the names http.server looks for

    def handle(self):
        # A closed connection is expected here.
        with contextlib.suppress(OSError):
            super().handle()

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *arguments):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64
    block_on_close = True

    def get_request(self):
        plain, address = self.socket.accept()
        self.agent.connections += 1
        # The handshake takes place in the connection's own thread, at its first read.
        plain.settimeout(5)
        return self.agent.context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False), address


class FakeAgent:
    """Returns `answer` (status, body) and records the requests."""

    def __init__(self, issued, client_ca, directory, port=0):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.load_verify_locations(cadata=client_ca.decode())
        pem = directory / f"agent-{time.monotonic_ns()}.pem"
        pem.write_bytes(issued.bundle().reveal())
        self.context.load_cert_chain(pem)
        self.requests = []
        self.connections = 0
        self.answer = (200, {"amphora_id": AMPHORA, "agent_version": "1"})
        self.behave = None
        self.server = _Server(("127.0.0.1", port), _Handler)
        self.server.agent = self
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def serve(self, handler, body):
        self.requests.append((handler.command, handler.path, body, dict(handler.headers)))
        if self.behave is not None:
            self.behave(handler)
            return
        status, answer = self.answer
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        if status in {301, 302, 307, 308}:
            handler.send_header("Location", "https://192.0.2.1/elsewhere")
        handler.end_headers()
        handler.wfile.write(content)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class AgentLab:
    """Two CAs, the configuration of a controller, and agents on demand."""

    def __init__(self, directory):
        self.directory = directory
        self.agents = []
        self.clients = []
        self.server_ca, key = create_authority("amphorae")
        self.server_authority = Authority(self.server_ca, key)
        self.client_ca, key = create_authority("controllers")
        self.client_authority = Authority(self.client_ca, key)
        self.trust = directory / "ca.pem"
        self.trust.write_bytes(self.server_ca)
        self.identity = directory / "controller.pem"
        self.identity.write_bytes(self.client_authority.issue_client("controller", 1).bundle().reveal())

    def agent(self, *, issued=None, port=0):
        issued = issued or self.server_authority.issue_server(AMPHORA, 1)
        agent = FakeAgent(issued, self.client_ca, self.directory, port)
        self.agents.append(agent)
        return agent

    def client(self, port, **options):
        conf = config.load([])
        conf.set_override("ca_certificate", str(self.trust), "amp_certificates")
        conf.set_override("client_certificate", str(self.identity), "amp_certificates")
        conf.set_override("port", port, "amp_agent")
        for name, value in options.items():
            conf.set_override(name, value, "amp_agent")
        client = AgentClient(conf)
        self.clients.append(client)
        return client

    def close(self):
        for client in self.clients:
            client.close()
        for agent in self.agents:
            agent.close()


@pytest.fixture
def lab(tmp_path):
    made = AgentLab(tmp_path)
    yield made
    made.close()
