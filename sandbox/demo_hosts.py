# SPDX-License-Identifier: Apache-2.0
"""The web server of a member.

Invariant: the server imports only the standard library, so that it starts fast. The path ``/`` returns the name of the
member. ``/slow/SECONDS`` delays the same response, and ``/size/BYTES`` returns a body of this size.

The sandbox runs ``python demo_hosts.py NAME PORT`` in the namespace of each member.
"""

from __future__ import annotations

import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MEMBER_PORT = 8080
_MOST_BYTES = 64 * 1024 * 1024
_MOST_SECONDS = 60.0


class _Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 512
    daemon_threads = True
    name = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # With this buffer, Python sends the headers and a small body together. Without the buffer, the kernel delays the
    # body until the client acknowledges the headers (Nagle's algorithm).
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = f"{self.server.name}\n".encode()  # type: ignore[attr-defined]
        kind, _, amount = self.path.strip("/").partition("/")
        if kind == "slow":
            time.sleep(min(float(amount or 1), _MOST_SECONDS))
        elif kind == "size":
            body = b"x" * min(int(amount or 1), _MOST_BYTES)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Member", self.server.name)  # type: ignore[attr-defined]
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - http.server requires this name

    def log_message(self, *_: object) -> None:
        """Write no log, because the sandbox does not use it."""


def main() -> None:
    """Serve until the process ends."""
    name, port = sys.argv[1], int(sys.argv[2])
    server = _Server(("::", port), _Handler)
    server.name = name
    server.serve_forever()


if __name__ == "__main__":
    main()
