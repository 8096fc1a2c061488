# SPDX-License-Identifier: Apache-2.0
"""UDP members and clients.

Invariant: inside the with block, a member listens in its namespace for IPv4 and IPv6. Its answer contains its name and
the client's address. Each request of a client has its own socket, and is a flow.
"""

import itertools
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager

from amphora_driver.host import namespaces
from sandbox import topology

PORT = 5353
_LARGEST = 2048
# A flow stays with its member for as long as the kernel tracks it. A random source port could be the port of an earlier
# flow, so each new flow gets the next port below the ephemeral range.
_SOURCE_PORTS = itertools.cycle(range(20_000, 32_000))
# Seconds a client waits for an answer.
TIME_LIMIT = 2.0


@contextmanager
def answering(settings, host, port=PORT):
    """Run a member that answers each datagram with its name and the datagram's source address."""
    place = namespaces.path(settings.host(host))
    server = namespaces.run_inside(place, lambda: _bound(port))
    stop, told = socket.socketpair()
    thread = threading.Thread(target=_answer, args=(server, told, host))
    thread.start()
    try:
        yield
    finally:
        stop.close()
        thread.join()
        server.close()
        told.close()


def _bound(port):
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind(("::", port))
    return made


def _answer(server, told, name):
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(told, selectors.EVENT_READ)
        while True:
            if any(key.fileobj is told for key, _ in selector.select()):
                return
            try:
                _, client = server.recvfrom(_LARGEST)
                server.sendto(f"{name} {client[0].removeprefix('::ffff:')}".encode(), client)
            except OSError:
                # An ICMP error of an earlier answer.
                continue


def answers(settings, address, number=12, port=53, *, source=None):
    """Count answers by member; a missing answer counts as `nothing`, an ICMP error as `refused`."""
    return Counter(one.split()[0] for one in said(settings, address, number, port, source=source))


def said(settings, address, number=1, port=53, *, source=None):
    """Return the answers to a number of datagrams, in order.

    Args:
        settings: the sandbox's.
        address: the VIP.
        number: how many.
        port: the listener's.
        source: the client's source port; by default, another one for each datagram.
    """
    place = namespaces.path(settings.host(topology.CLIENT))
    ports = [next(_SOURCE_PORTS) if source is None else source for _ in range(number)]
    return namespaces.run_inside(place, lambda: [_ask(address, port, one) for one in ports])


def _ask(address, port, source):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(TIME_LIMIT)
        client.bind(("", source))
        client.connect((address, port))
        try:
            client.send(b"name?")
            return client.recv(_LARGEST).decode()
        except TimeoutError:
            return "nothing"
        except ConnectionRefusedError:
            return "refused"


class Flow:
    """A client that sends a datagram every 20 ms from one source port inside a with block.

    Attributes:
        answers: number of answers by member.
        gap: the longest time without an answer, in seconds.
    """

    def __init__(self, cloud, address, port=53):
        self.answers = Counter()
        self.gap = 0.0
        self._cloud = cloud
        self._to = address, port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.goes_on()
        self.gap = 0.0
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()

    def goes_on(self, number=20):
        """Wait for this number of further answers."""
        wanted = self.answers.total() + number
        self._cloud.until(lambda: self.answers.total() >= wanted, f"the flow gets {number} more answers", 30)

    def _run(self):
        namespaces.run_inside(namespaces.path(self._cloud.settings.host(topology.CLIENT)), self._send)

    def _send(self):
        last = time.monotonic()
        with socket.socket(socket.AF_INET6 if ":" in self._to[0] else socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.bind(("", next(_SOURCE_PORTS)))
            client.connect(self._to)
            client.settimeout(0.02)
            while not self._stopping.wait(0.02):
                try:
                    client.send(b"name?")
                    member = client.recv(_LARGEST).decode().split()[0]
                except OSError:
                    # No answer in time, or an ICMP error.
                    continue
                now = time.monotonic()
                self.answers[member] += 1
                self.gap, last = max(self.gap, now - last), now
