# SPDX-License-Identifier: Apache-2.0
"""Writer of flow lines to the log forwarder: one datagram for each line, as HAProxy sends them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from amphora_agent.log_settings import LOG_ADDRESS, LOG_PORT

# Syslog priority of a line: facility local1, severity info (RFC 5424, 6.2.1). HAProxy uses local0, which distinguishes
# the two senders.
_PRIORITY = b"<142>"


class DatagramWriter:
    """A socket that never waits and needs no receiver.

    The kernel counts the lines that the receiver does not read in time.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def write(self, lines: Sequence[str]) -> None:
        """Send lines; a line that the kernel refuses is lost."""
        for line in lines:
            with suppress(OSError):
                self._socket.sendto(_PRIORITY + line.encode(errors="replace"), (LOG_ADDRESS, LOG_PORT))

    def close(self) -> None:
        self._socket.close()
