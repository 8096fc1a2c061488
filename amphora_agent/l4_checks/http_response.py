# SPDX-License-Identifier: Apache-2.0
"""The request of an HTTP/1 check, and the status line of the answer.

Invariant: pure. The parser reads only the first line of an answer, and at most `MAX_LINE_BYTES` of it.
"""

from __future__ import annotations

import re

from amphora_agent.l4.model import Monitor

MAX_LINE_BYTES = 1024
# RFC 9112, section 4: the reason phrase may be missing, and the space before it too.
_FIRST_LINE = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")


def build_request(monitor: Monitor, address: str, port: int) -> bytes:
    """Return the request. HTTP/1.1 requires a host; the default is the member's address."""
    host = monitor.host
    if host is None and monitor.version == "1.1":
        host = (f"[{address}]" if ":" in address else address) + ("" if port == 80 else f":{port}")
    lines = [f"{monitor.method} {monitor.path} HTTP/{monitor.version}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += ["Content-Length: 0"] if monitor.method in ("POST", "PUT", "PATCH") else []
    lines += ["User-Agent: amphora-checker", "Connection: close"]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii")


def parse_status(received: bytes) -> int | None:
    """Return the status of an answer; None if more bytes are needed.

    Raises ValueError if the bytes are not an HTTP/1 answer.
    """
    line = received[:MAX_LINE_BYTES]
    if (found := _FIRST_LINE.match(line)) is not None:
        return int(found[1])
    if b"\n" in line or len(received) >= MAX_LINE_BYTES or not _is_prefix(line):
        raise ValueError("not an HTTP/1 answer")
    return None


def _is_prefix(line: bytes) -> bool:
    return line.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(line)


def matches_codes(status: int, codes: tuple[str, ...]) -> bool:
    """Return whether a status is one of these codes; a code may be a range like 200-204."""
    ranges = (code.partition("-") for code in codes)
    return any(int(least) <= status <= int(most or least) for least, _, most in ranges)
