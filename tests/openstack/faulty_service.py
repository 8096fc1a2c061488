# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy in front of an API of the cloud that lets chosen requests fail.

Invariant: a request reaches the service at most once, and a request without a fault is passed unchanged. Each fault
that kills the client ends one process: if another fault has ended this process, the next request of the kind has the
fault instead.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import Counter
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from amphora_driver.host import namespaces

_SECONDS = 120.0
_VERSION = re.compile(r"v\d+(\.\d+)?")
_HOP_BY_HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


class Fault(Enum):
    """A failure of one request."""

    # The request does not reach the service, and the client gets the status 503.
    REFUSED = "refused"
    # The service executes the request, and the client gets no answer.
    LOST = "lost"
    # The client is killed, before the request reaches the service or after the service has executed the request.
    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"


class FaultyService:
    """The proxy inside a with block.

    Args:
        port: the port of the service on loopback.
        place: the path of the network namespace of the clients.
        faults: the fault of a request by its kind and its number, from 1. A kind is the method and the collection, for
            example `POST servers`.
        kill: kills the client; returns False if another fault has killed it, and it has not been started again.

    Attributes:
        received: number of requests by kind.
        answered: number of answers of the service by kind and status.
        injected: the faults that have occurred, in the form of `faults`.
        times: (kind, time of the monotonic clock) of each request.
    """

    def __init__(self, port, place, faults, kill):
        self.received, self.answered, self.injected, self.times = Counter(), Counter(), {}, []
        self._port = port
        self._due = dict(faults)
        self._kill = kill
        self._lock = threading.Lock()
        self._server = namespaces.run_inside(place, lambda: _Server(("127.0.0.1", 0), self._handler()))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def handle(self, request, body):
        """Return status, headers and body of the answer to a request; None if the client gets no answer."""
        kind = f"{request.command} {_collection(request.path)}"
        with self._lock:
            self.received[kind] += 1
            self.times.append((kind, time.monotonic()))
            number, fault = self._take(kind)
        if fault is Fault.REFUSED:
            return 503, [("Content-Type", "application/json")], b'{"error": {"message": "the test refuses it"}}'
        if fault is Fault.KILLED_BEFORE and self._killed(kind, number):
            return None
        status, headers, content = self._pass(request, body)
        with self._lock:
            self.answered[kind, status] += 1
        if fault is Fault.KILLED_AFTER:
            self._killed(kind, number)
        return None if fault else (status, headers, content)

    def _take(self, kind):
        """Return the fault of a request and its number in `faults`; two times None for a request without a fault."""
        numbers = (number for one, number in self._due if one == kind and number <= self.received[kind])
        number = min(numbers, default=None)
        if number is None:
            return None, None
        self.injected[kind, number] = fault = self._due.pop((kind, number))
        return number, fault

    def _killed(self, kind, number):
        """Kill the client; otherwise, let the next request of this kind have the fault."""
        if self._kill():
            return True
        with self._lock:
            self._due[kind, number] = self.injected.pop((kind, number))
        return False

    def _pass(self, request, body):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_SECONDS)
        try:
            # The services write links with the value of the header Host, so the links name the proxy.
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(request.command, request.path, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            return answer.status, kept, content
        finally:
            connection.close()

    def _handler(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # One packet for each answer: otherwise the kernel delays the body until the client confirms the headers.
            wbufsize = -1

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = service.handle(self, body)
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if status not in (204, 304):
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        for method in ("GET", "POST", "PUT", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A killed client reads no answer."""


def _collection(path):
    """The collections of a path, without the ids of objects: `servers/os-interface`."""
    parts = [part for part in path.partition("?")[0].split("/") if part and not _VERSION.fullmatch(part)]
    return "/".join(parts[::2])
