# SPDX-License-Identifier: Apache-2.0
"""A client process that sends requests on new connections every few milliseconds.

    polling_client.py ADDRESS PORT INTERVAL TIME_LIMIT [tls]

A request does not wait for earlier ones. The process prints "ready" after the first answer. When its input ends, it
prints every request as JSON: start (monotonic clock of the machine), duration, and result (status code or error name).
"""

import asyncio
import json
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


async def main(address, port, interval, time_limit, context):
    """Send requests until the input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    found, running, said = [], set(), False

    async def one():
        nonlocal said
        began = time.monotonic()
        outcome = await ask(address, port, time_limit, context)
        found.append((began, time.monotonic() - began, outcome))
        if not said and outcome.isdigit():
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


chosen = trusting_context() if sys.argv[5:] == ["tls"] else None
asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), chosen))
