# SPDX-License-Identifier: Apache-2.0
"""Forwards a port of this machine to the status page in the sandbox's control namespace.

Invariant: the process listens only on the loopback of the machine, on the socket that it inherits as descriptor 3. The
process forwards to one port on the loopback of the namespace, and has no state.

``python -m sandbox.forward_in NAMESPACE PORT``
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from pathlib import Path

from amphora_driver.host import namespaces
from sandbox.forward_out import copy_stream

_LOOPBACK_ADDRESS = "127.0.0.1"
_LISTENER = 3


def main(arguments: list[str]) -> int:
    """Forward until killed."""
    namespace, port = arguments
    asyncio.run(_serve(namespaces.path(namespace), int(port)))
    return 0


async def _serve(place: Path, port: int) -> None:
    listener = socket.socket(fileno=_LISTENER)
    listener.setblocking(False)
    server = await asyncio.start_server(functools.partial(_forward, place, port), sock=listener)
    await server.serve_forever()


async def _forward(place: Path, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # A socket belongs to the network namespace in which it was created, so it is created inside the namespace.
    connect = functools.partial(socket.create_connection, (_LOOPBACK_ADDRESS, port))
    try:
        inside = await asyncio.to_thread(namespaces.run_inside, place, connect)
        there, back = await asyncio.open_connection(sock=inside)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy_stream(reader, back), copy_stream(there, writer))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
