# SPDX-License-Identifier: Apache-2.0
"""The parts of Keystone and Nova that Senlin needs beside the APIs of the sandbox.

Keystone issues any token: the sandbox's APIs check none. Nova shows the sandbox's members as servers.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from sandbox import topology

SERVERS = {str(uuid.uuid5(uuid.NAMESPACE_OID, name)): name for name in topology.MEMBERS}


class CloudStub:
    """One server with both APIs.

    Args:
        endpoint: Octavia's.
        network_endpoint: Neutron's.
    """

    def __init__(self, endpoint: str, network_endpoint: str) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*stub.get(urlsplit(self.path).path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*stub.post(urlsplit(self.path).path, body))

            def _answer(self, status: int, body: dict) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                if status == 201:
                    self.send_header("X-Subject-Token", "token")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_arguments) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        endpoints = {"load-balancer": endpoint, "network": network_endpoint, "compute": f"{self.url}/compute/v2.1"}
        self._catalog = [
            {
                "type": kind,
                "name": kind,
                "id": kind,
                "endpoints": [{"id": kind, "interface": "public", "region": None, "region_id": None, "url": url}],
            }
            for kind, url in endpoints.items()
        ]
        self.trusts: set[str] = set()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def auth_url(self) -> str:
        return f"{self.url}/v3"

    def get(self, path: str) -> tuple[int, dict]:
        if path.rstrip("/") == "/v3":
            link = {"rel": "self", "href": self.auth_url}
            return 200, {"version": {"id": "v3.14", "status": "stable", "links": [link]}}
        if path.rstrip("/") == "/compute/v2.1":
            link = {"rel": "self", "href": f"{self.url}/compute/v2.1"}
            found = {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1", "links": [link]}
            return 200, {"version": found}
        if (found := re.fullmatch(r"/compute/v2\.1/servers/([^/]+)", path)) and found[1] in SERVERS:
            return 200, {"server": self._server_body(found[1])}
        if path == "/compute/v2.1/flavors/flavor":
            return 200, {"flavor": {"id": "flavor", "name": "flavor", "vcpus": 1, "ram": 1, "disk": 1}}
        return 404, {"itemNotFound": {"code": 404, "message": path}}

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if path != "/v3/auth/tokens":
            return 404, {"error": {"code": 404, "message": path}}
        self.trusts.add(body["auth"]["scope"]["OS-TRUST:trust"]["id"])
        domain = {"id": "default", "name": "Default"}
        return 201, {
            "token": {
                "methods": ["password"],
                "user": {"id": "senlin", "name": "senlin", "domain": domain},
                "project": {"id": "sandbox", "name": "sandbox", "domain": domain},
                "roles": [{"id": "admin", "name": "admin"}],
                "catalog": self._catalog,
                "expires_at": "2126-01-01T00:00:00.000000Z",
                "issued_at": "2026-01-01T00:00:00.000000Z",
            }
        }

    @staticmethod
    def _server_body(server_id: str) -> dict:
        name = SERVERS[server_id]
        address = {"addr": f"192.0.2.{topology.MEMBERS[name]}", "version": 4, "OS-EXT-IPS:type": "fixed"}
        return {
            "id": server_id,
            "name": name,
            "status": "ACTIVE",
            "image": {"id": "image"},
            "flavor": {"id": "flavor", "original_name": "flavor", "vcpus": 1, "ram": 1, "disk": 1},
            "addresses": {"members": [address]},
            "metadata": {},
            "os-extended-volumes:volumes_attached": [],
            "security_groups": [],
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
