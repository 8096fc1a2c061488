# SPDX-License-Identifier: Apache-2.0
"""Fake sockets of octavia-driver-agent, for answers and failures that the real agent cannot be made to give. The tests
in tests/system use the real agent.
"""

import json
import socketserver
import threading
from pathlib import Path


class OctaviaSockets:
    """Serves status.sock, stats.sock and get.sock in a folder and records the requests."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.statuses, self.statistics, self.asked = [], [], []
        self.trees = {}
        self.refuse = lambda document: None
        self._servers = []

    def start(self):
        for name, answer in (("status", self._status), ("stats", self._stats), ("get", self._get)):
            server = socketserver.ThreadingUnixStreamServer(str(self.folder / f"{name}.sock"), _handler(answer))
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            self._servers.append(server)

    def stop(self):
        for server in self._servers:
            server.shutdown()
            server.server_close()
            Path(server.server_address).unlink()
        self._servers.clear()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def _status(self, document):
        refused = self.refuse(document)
        if refused is not None:
            kind, object_id, *fault = refused
            return {
                "status_code": 500,
                "fault_string": fault[0] if fault else "no",
                "status_object": kind,
                "status_object_id": object_id,
            }
        self.statuses.append(document)
        return {"status_code": 200}

    def _stats(self, document):
        self.statistics.append(document)
        return {"status_code": 200}

    def _get(self, document):
        self.asked.append(document)
        return self.trees.get(document["id"], {})


def _handler(answer):
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            size = int(self.rfile.readline())
            body = json.dumps(answer(json.loads(self.rfile.read(size)))).encode()
            self.wfile.write(b"%d\n" % len(body) + body)

    return Handler
