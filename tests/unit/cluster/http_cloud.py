# SPDX-License-Identifier: Apache-2.0
"""The APIs of Nova and Octavia over HTTP, without Keystone, as far as a controller calls them.

The pools are in memory. A load balancer is PENDING for a moment after each change, as with a real provider.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PENDING_SECONDS = 0.05


class HttpCloud:
    """Servers by id, pools with their members, and the calls.

    Attributes:
        effects: called with method and path after the effect of a change, and before its answer.
    """

    def __init__(self, role="role"):
        self.role, self.servers, self.pools, self.pending = role, {}, {}, {}
        self.lock, self.calls, self.monitors = threading.RLock(), [], True
        self.effects = lambda _method, _path: None
        self.made = 0

    def boot(self, name, group, address):
        server = {
            "id": name,
            "name": name,
            "status": "ACTIVE",
            "created": "2026-01-01T00:00:00Z",
            "flavor": {"vcpus": 2},
            "addresses": {"net": [{"addr": address, "version": 4, "OS-EXT-IPS:type": "fixed"}]},
            "metadata": {self.role: group},
            "tags": [],
        }
        with self.lock:
            self.servers[name] = server

    def delete(self, name):
        with self.lock:
            del self.servers[name]

    def members(self, pool):
        with self.lock:
            return {one["name"]: dict(one) for one in self.pools.get(pool, {}).values()}

    def answer(self, method, url, body):
        """Return status and document."""
        parts = urlsplit(url)
        words = parts.path.strip("/").split("/")
        with self.lock:
            self.calls.append((method, parts.path))
            if words[0] == "nova":
                return self._nova(words[2:])
            if words[1:] == []:
                return 200, {"versions": [{"id": "v2.27"}]}
            query = parse_qs(parts.query)
            status, document = self._octavia(method, words[3:], body, query)
        if method != "GET" and status < 300:
            self.effects(method, parts.path)
        return status, document

    def _nova(self, words):
        if words == ["servers", "detail"]:
            return 200, {"servers": list(self.servers.values())}
        found = self.servers.get(words[1])
        return (200, {"server": found}) if found else (404, {"itemNotFound": {"code": 404, "message": "no server"}})

    def _octavia(self, method, words, body, query):
        kind, name, *more = words
        if kind == "loadbalancers":
            state = "PENDING_UPDATE" if self._is_pending(name) else "ACTIVE"
            if more == ["stats"]:
                return 200, {"stats": {"active_connections": 0, "total_connections": 1}}
            return 200, {"loadbalancer": {"id": name, "provisioning_status": state, "tags": []}}
        if kind == "listeners":
            return 200, {"stats": {"active_connections": 0, "total_connections": 1}}
        pool = self.pools.setdefault(name, {})
        if not more:
            return 200, {"pool": {"id": name, "healthmonitor_id": "hm", "listeners": [{"id": "li"}]}}
        if method == "GET":
            return 200, {"members": [self._shown(one) for one in pool.values()]}
        balancer = name.replace("pool", "lb")
        if self._is_pending(balancer):
            return 409, {"faultstring": f"Load Balancer {balancer} is immutable and cannot be updated."}
        self.pending[balancer] = time.monotonic() + PENDING_SECONDS
        if method == "DELETE":
            return (204, None) if pool.pop(more[1], None) else (404, {"faultstring": "no member"})
        assert query["additive_only"] == ["true"]
        for one in body["members"]:
            self._put(pool, one)
        return 202, None

    def _put(self, pool, one):
        key = one["address"], one["protocol_port"]
        same = [known for known in pool.values() if (known["address"], known["protocol_port"]) == key]
        self.made += 1
        made = same[0] if same else {"id": f"m{self.made}", "provisioning_status": "ACTIVE"}
        pool[made["id"]] = made | one

    def _shown(self, one):
        alive = {each["addr"] for server in self.servers.values() for each in server["addresses"]["net"]}
        status = "ERROR" if one["address"] not in alive else "ONLINE" if one["weight"] else "DRAINING"
        return {**one, "operating_status": status}

    def _is_pending(self, balancer):
        return self.pending.get(balancer, 0.0) > time.monotonic()

    @contextmanager
    def served(self):
        """Serve the APIs; yield the URL."""
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Header and body are two writes; Nagle's algorithm would delay the second one by 40 ms.
            disable_nagle_algorithm = True

            def _handle(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, document = cloud.answer(self.command, self.path, body)
                content = b"" if document is None else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_DELETE = do_POST = _handle  # noqa: N815 - names of the base class

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(20)
            server.server_close()


def options(url):
    """The options of the cloud with this URL, for a configuration file."""
    return (
        "[amp_cluster_cloud]\nwithout_keystone = true\n"
        f"octavia_endpoint_override = {url}/octavia\nnova_endpoint_override = {url}/nova/v2.1\n"
        "server_list_age = 0\n"
    )
