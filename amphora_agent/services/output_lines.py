# SPDX-License-Identifier: Apache-2.0
"""Lines that daemons write to their output: the administrative ones, and the form of a datagram."""

from __future__ import annotations

import re

HAPROXY, CHECKER = "haproxy", "amphora-checker"
_HAPROXY_LINE = re.compile(r"\[[A-Z]+\] +\(\d+\) : ")
# Syslog priority: facility daemon, severity info, as journald marks the output of services (systemd.exec(5),
# SyslogLevel=).
_PRIORITY = 30


def is_admin(service: str, line: str) -> bool:
    """Return whether a line of a daemon's output is administrative.

    HAProxy and the L4 daemon also write flows to their output. Their own messages have a known beginning. HAProxy
    writes state changes of members twice: as a message and as a log line, which is omitted.
    """
    if service == HAPROXY:
        return _HAPROXY_LINE.match(line) is not None
    return service != CHECKER or line.startswith("checker: ")


def to_datagram(service: str, line: str) -> bytes:
    """Return a line as journald forwards it, without time and process id."""
    return f"<{_PRIORITY}>{service}: {line}".encode(errors="replace")
