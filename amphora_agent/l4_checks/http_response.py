# SPDX-License-Identifier: Apache-2.0
"""A request of HTTP/1, and the first line of its answer.

Invariant: pure. Of an answer no more is looked at than its first line, and of that no more than `LONGEST` bytes: what
else a member sends can do nothing.
"""

from __future__ import annotations

import re

from amphora_agent.l4.model import Monitor

LONGEST = 1024
# RFC 9112, section 4: the words of the reason may be missing, with the space before them too.
_FIRST_LINE = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")


def request(monitor: Monitor, address: str, port: int) -> bytes:
    """What is sent. HTTP/1.1 wants a name of the host; without one it is the member's address."""
    host = monitor.host
    if host is None and monitor.version == "1.1":
        host = (f"[{address}]" if ":" in address else address) + ("" if port == 80 else f":{port}")
    lines = [f"{monitor.method} {monitor.path} HTTP/{monitor.version}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += ["Content-Length: 0"] if monitor.method in ("POST", "PUT", "PATCH") else []
    lines += ["User-Agent: amphora-checker", "Connection: close"]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii")


def status_of(received: bytes) -> int | None:
    """The status that an answer begins with; None: there is not enough of it yet.

    Raises:
        ValueError: it is no answer of HTTP/1.
    """
    line = received[:LONGEST]
    if (found := _FIRST_LINE.match(line)) is not None:
        return int(found[1])
    if b"\n" in line or len(received) >= LONGEST or not _may_become(line):
        raise ValueError("no answer of HTTP/1")
    return None


def _may_become(line: bytes) -> bool:
    return line.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(line)


def among(status: int, codes: tuple[str, ...]) -> bool:
    """Whether a status is one of these; each is one, or a range as 200-204."""
    for code in codes:
        least, _, most = code.partition("-")
        if int(least) <= status <= int(most or least):
            return True
    return False
