# SPDX-License-Identifier: Apache-2.0
"""Clients of a UDP listener: sockets that send as fast as they can and count the answers.

    python udp_clients.py ADDRESS PORT SOCKETS PAUSE

PAUSE is in seconds after each round of all sockets. Each second it prints the numbers of datagrams sent, answered and
refused.
"""

from __future__ import annotations

import socket
import sys
import time

_, address, port, many, pause = sys.argv
sockets = []
for _ in range(int(many)):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.connect((address, int(port)))
    one.setblocking(False)
    sockets.append(one)
sent = got = refused = 0
due = time.monotonic() + 1
while True:
    for one in sockets:
        try:
            one.send(b"x" * 20)
            sent += 1
            one.recv(100)
            got += 1
        except BlockingIOError:
            pass
        except OSError:
            refused += 1
    time.sleep(float(pause))
    if time.monotonic() > due:
        sys.stdout.write(f"{sent} {got} {refused}\n")
        sys.stdout.flush()
        sent = got = refused = 0
        due += 1
