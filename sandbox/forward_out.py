# SPDX-License-Identifier: Apache-2.0
"""A way out of the sandbox's control namespace, to servers on the machine's own loopback: a database, a broker.

Invariant: it listens in that namespace on the very address and port it forwards to outside, so that one configuration
serves the programs on both sides. It keeps nothing: who is cut off here connects again.

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
    """The ports on the machine's loopback that these URLs name.

    Raises:
        SandboxError: one names another machine, which the control namespace has no way to.
    """
    found: dict[int, None] = {}
    for one in urls:
        for url in (one or "").split(";"):
            parts = urlsplit(url)
            if not parts.hostname or "unix_socket=" in parts.query:
                continue
            if parts.hostname not in _LOOPBACK_NAMES:
                raise SandboxError(
                    f"use a server on {parts.hostname}",
                    "the sandbox's controller lives in a network namespace that reaches no other machine",
                    f"Name one on {_LOOPBACK_ADDRESS}, or a unix socket.",
                )
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme.partition("+")[0])
            if port is not None:
                found[port] = None
    return tuple(found)


def is_listening(namespace: str, wanted: tuple[int, ...]) -> bool:
    """Whether it does, as the kernel has it (proc(5), /proc/net/tcp)."""
    text = namespaces.run_inside(namespaces.path(namespace), Path("/proc/thread-self/net/tcp").read_text)
    return all(f":{port:04X} 00000000:0000 0A" in text for port in wanted)


def main(arguments: list[str]) -> int:
    """Forward until killed."""
    namespace, *numbers = arguments
    place = namespaces.path(namespace)
    listeners = {int(port): namespaces.run_inside(place, functools.partial(_listener, int(port))) for port in numbers}
    asyncio.run(_serve(listeners))
    return 0


def _listener(port: int) -> socket.socket:
    # A socket stays in the namespace it was made in, whoever uses it.
    return socket.create_server((_LOOPBACK_ADDRESS, port), backlog=128)


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
    """Hand on what comes, until no more does."""
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
    except OSError:
        # One side is gone; the other one is told by our closing.
        pass
    finally:
        target.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
