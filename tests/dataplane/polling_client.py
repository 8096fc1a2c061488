# SPDX-License-Identifier: Apache-2.0
"""A client process that sends requests every few milliseconds.

    polling_client.py ADDRESS PORT INTERVAL TIME_LIMIT [tls | datagram | flow]

A request has a new connection; with `datagram`, it is a datagram from a new socket, and with `flow`, all datagrams come
from one socket. A member must return each datagram unchanged.

A request does not wait for earlier ones. The process prints "ready" after the first answer. When its input ends, it
prints every request as JSON: start (monotonic clock of the machine), duration, and result. The result is the status
code, `echo` for a returned datagram, or the name of an error.
"""

import asyncio
import itertools
import json
import socket
import ssl
import sys
import time


def trusting_context():
    """TLS without a check of the certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def ask(address, port, time_limit, context):
    """Send one request; return its result."""
    writer = None
    try:
        async with asyncio.timeout(time_limit):
            reader, writer = await asyncio.open_connection(address, port, ssl=context)
            writer.write(b"GET / HTTP/1.1\r\nHost: www.example.com\r\nConnection: close\r\n\r\n")
            line = await reader.readline()
            return line.split()[1].decode() if line else "closed"
    except (OSError, IndexError) as error:
        return type(error).__name__
    finally:
        if writer is not None:
            writer.transport.abort()


async def send_datagram(address, port, time_limit):
    """Send a datagram from a new socket; return the result."""
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.connect((address, port))
            async with asyncio.timeout(time_limit):
                client.send(b"0")
                await loop.sock_recv(client, 100)
                return "echo"
    except OSError as error:
        return type(error).__name__


class Flow(asyncio.DatagramProtocol):
    """Numbered datagrams from one socket, with their answers."""

    def __init__(self, time_limit):
        self._time_limit = time_limit
        self._numbers = itertools.count()
        self._waiting = {}

    def connection_made(self, transport):
        self._transport = transport

    def datagram_received(self, data, _address):
        answered = self._waiting.pop(int(data), None)
        if answered is not None:
            answered.set()

    def error_received(self, _error):
        """An ICMP error does not name the datagram, which runs into its time limit."""

    async def send(self):
        """Send a datagram; return the result."""
        number, answered = next(self._numbers), asyncio.Event()
        self._waiting[number] = answered
        self._transport.sendto(str(number).encode())
        try:
            async with asyncio.timeout(self._time_limit):
                await answered.wait()
                return "echo"
        except TimeoutError as error:
            self._waiting.pop(number, None)
            return type(error).__name__


async def requester(address, port, time_limit, mode):
    """Return a function that sends one request and returns its result."""
    if mode == "datagram":
        return lambda: send_datagram(address, port, time_limit)
    if mode == "flow":
        connected = asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Flow(time_limit), remote_addr=(address, port)
        )
        _, flow = await connected
        return flow.send
    context = trusting_context() if mode == "tls" else None
    return lambda: ask(address, port, time_limit, context)


async def main(address, port, interval, time_limit, mode):
    """Send requests until the input ends."""
    send = await requester(address, port, time_limit, mode)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    found, running, said = [], set(), False

    async def one():
        nonlocal said
        began = time.monotonic()
        outcome = await send()
        found.append((began, time.monotonic() - began, outcome))
        if not said and (outcome.isdigit() or outcome == "echo"):
            said = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()

    due = loop.time()
    while not ended.is_set():
        task = loop.create_task(one())
        running.add(task)
        task.add_done_callback(running.discard)
        # A late client skips intervals: a burst of requests would not measure the time between.
        due = max(due + interval, loop.time())
        await asyncio.sleep(due - loop.time())
    await asyncio.gather(*running)
    sys.stdout.write(json.dumps(sorted(found)) + "\n")


mode = sys.argv[5] if len(sys.argv) > 5 else ""
asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), mode))
