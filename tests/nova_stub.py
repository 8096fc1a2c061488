# SPDX-License-Identifier: Apache-2.0
"""A stub of Nova's API for tests without a Nova: servers, server groups and interfaces, over HTTP.

It has the properties of Nova on which cluster membership depends: pages with links, the filter by tag only, servers of
a cell that does not answer (missing in pages, UNKNOWN by id), 404 for a deleted server, and 400 for a page after one.
"""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class NovaStub:
    """The state of the stub.

    Attributes:
        url: the endpoint.
        calls: number of requests by the first two parts of the path.
        fails: the HTTP status of all answers; None to serve.
        most: the longest page of Nova.
        down: ids of servers in a cell that does not answer.
        after_page: called with the ids of the servers of a page before its answer.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.servers, self.groups, self.subnets = {}, {}, {}
        self.calls, self.fails, self.most, self.down = Counter(), None, 1000, set()
        self.after_page = lambda ids: None
        self.url = ""

    def add(self, server_id, *addresses, name="", subnet_id="", project_id="sandbox", **more):
        """Add an ACTIVE server with these fixed addresses, or change it."""
        nets = {
            "net": [{"addr": one, "version": 6 if ":" in one else 4, "OS-EXT-IPS:type": "fixed"} for one in addresses]
        }
        values = {
            "id": server_id, "name": name or server_id, "status": "ACTIVE", "tenant_id": project_id,
            "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "flavor": {"vcpus": 1, "ram": 64},
            "metadata": {}, "tags": [], "addresses": nets if addresses else {}, "links": [],
        }  # fmt: skip
        with self.lock:
            self.servers[server_id] = {**self.servers.get(server_id, {}), **values, **more}
            self.subnets |= dict.fromkeys(addresses, subnet_id)

    def remove(self, *server_ids):
        with self.lock:
            for one in server_ids:
                self.servers.pop(one)

    def answer(self, path, query, project_id):
        """Return status and document of a request."""
        parts = [one for one in path.split("/") if one]
        self.calls[
            "/".join([parts[0], *(["ID"] if parts[1:] and parts[1] != "detail" else parts[1:]), *parts[2:]])
        ] += 1
        if self.fails:
            return self.fails, {"error": {"code": self.fails, "message": "the stub fails"}}
        mine = {one: it for one, it in self.servers.items() if project_id in (None, it["tenant_id"])}
        match parts:
            case ["servers", "detail"]:
                return self._list([one for key, one in sorted(mine.items()) if key not in self.down], query)
            case ["servers", server_id] if server_id in mine:
                one = mine[server_id]
                return 200, {"server": {"id": server_id, "status": "UNKNOWN"} if server_id in self.down else one}
            case ["servers", server_id, "os-interface"] if server_id in mine:
                ips = [ip["addr"] for net in mine[server_id]["addresses"].values() for ip in net]
                fixed = [{"ip_address": ip, "subnet_id": self.subnets[ip]} for ip in ips]
                return 200, {"interfaceAttachments": [{"port_id": "p", "fixed_ips": fixed}]}
            case ["os-server-groups", group_id] if group_id in self.groups:
                return 200, {
                    "server_group": {"id": group_id, "members": [one for one in self.groups[group_id] if one in mine]}
                }
            case _:
                return 404, {"itemNotFound": {"code": 404, "message": f"{'/'.join(parts)} could not be found."}}

    def _list(self, found, query):
        if "tags" in query:
            found = [one for one in found if set(query["tags"][0].split(",")) <= set(one["tags"])]
        if "marker" in query:
            if query["marker"][0] not in self.servers:
                message = f"marker [{query['marker'][0]}] not found"
                return 400, {"badRequest": {"code": 400, "message": message}}
            found = [one for one in found if one["id"] > query["marker"][0]]
        size = min(int(query.get("limit", [self.most])[0]), self.most)
        links = {"servers_links": [{"rel": "next", "href": "unused"}]} if len(found) > size else {}
        self.after_page([one["id"] for one in found[:size]])
        return 200, {"servers": found[:size], **links}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        url = urlsplit(self.path)
        stub = self.server.stub
        with stub.lock:
            status, document = stub.answer(url.path, parse_qs(url.query), self.headers.get("X-Project-Id"))
            body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def running():
    """Serve a stub on a free port of loopback inside the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.stub = NovaStub()
    server.stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
