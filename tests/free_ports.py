# SPDX-License-Identifier: Apache-2.0
"""Free ports of loopback for servers that need their port before they start."""

import socket
from contextlib import ExitStack


def free_ports(number):
    """Return this number of different ports without a listener."""
    with ExitStack() as stack:
        found = []
        for _ in range(number):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
        return found
