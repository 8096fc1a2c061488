# SPDX-License-Identifier: Apache-2.0
"""A member of UDP pools: `datagram_echo.py PORT` returns each datagram to its sender."""

import socket
import sys
from contextlib import suppress

with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as server:
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", int(sys.argv[1])))
    while True:
        # An ICMP error of an earlier answer.
        with suppress(OSError):
            server.sendto(*server.recvfrom(65535))
