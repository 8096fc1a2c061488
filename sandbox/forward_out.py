# SPDX-License-Identifier: Apache-2.0
"""Forwards ports of the control namespace to servers on the loopback: a database, a broker.

Invariant: the process listens in the namespace on the same address and port as the server outside, so that programs on
both sides use the same configuration. The process has no state: clients reconnect after a restart.

``python -m sandbox.forward_out NAMESPACE PORT…``
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from amphora_driver.host import namespaces
from sandbox.settings import SandboxError

_LOOPBACK_ADDRESS = "127.0.0.1"
_LOOPBACK_NAMES = {_LOOPBACK_ADDRESS, "localhost"}
_CHUNK = 65536
_DEFAULT_PORTS = {"amqp": 5672, "mysql": 3306, "mariadb": 3306, "postgresql": 5432}


def loopback_ports(*urls: str | None) -> tuple[int, ...]:
    """The loopback ports in these URLs; raises SandboxError for a URL with another machine."""
    found: dict[int, None] = {}
    for one in urls:
        for url in (one or "").split(";"):
            parts = urlsplit(url)
            if not parts.hostname or "unix_socket=" in parts.query:
                continue
            if parts.hostname not in _LOOPBACK_NAMES:
                raise SandboxError(
                    f"use a server on {parts.hostname}",
                    "the controller of the sandbox runs in a network namespace without a route to other machines",
                    f"Use a server on {_LOOPBACK_ADDRESS} or a unix socket.",
                )
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme.partition("+")[0])
            if port is not None:
                found[port] = None
    return tuple(found)


def is_listening(namespace: str, wanted: tuple[int, ...]) -> bool:
    """Whether all ports have a listening socket in the namespace (proc(5), /proc/net/tcp)."""
    text = namespaces.run_inside(namespaces.path(namespace), Path("/proc/thread-self/net/tcp").read_text)
    return all(f":{port:04X} 00000000:0000 0A" in text for port in wanted)


def main(arguments: list[str]) -> int:
    """Forward until killed."""
    namespace, *numbers = arguments
    place = namespaces.path(namespace)
    listeners = {}
    for port in map(int, numbers):
        # A socket belongs to the network namespace in which it was created, so it is created inside the namespace.
        listen = functools.partial(socket.create_server, (_LOOPBACK_ADDRESS, port), backlog=128)
        listeners[port] = namespaces.run_inside(place, listen)
    asyncio.run(_serve(listeners))
    return 0


async def _serve(listeners: dict[int, socket.socket]) -> None:
    servers = [
        await asyncio.start_server(functools.partial(_forward, port), sock=listener)
        for port, listener in listeners.items()
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _forward(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_connection(_LOOPBACK_ADDRESS, port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy_stream(reader, back), copy_stream(there, writer))


async def copy_stream(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy data until the end of the source, then close the target."""
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
    except OSError:
        # One side has closed the forwarded connection, so the other side is closed too.
        pass
    finally:
        target.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
