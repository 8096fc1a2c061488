# SPDX-License-Identifier: Apache-2.0
"""A program (see `program`) with all fast members, which record times of requests.

Invariant: a member is a port. For each request it records the time of sending (from the client) and of arrival, on the
monotonic clock that all processes of the machine share.

    GET /            a short answer that names the member
    GET /download    a body that continues until `finish`, and ends with the SHA-256 digest of its content
    an upgrade       a WebSocket echo (RFC 6455)
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import sys
import time
from functools import partial

from program import obey

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CLOSE, _PING, _PONG = 0x8, 0x9, 0xA
CHUNK_SECONDS = 0.05
CHUNK_BYTES = 4096
FILLING = b"x" * 200


class MemberSet:
    """All members, their recorded requests, and the running downloads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.heard: dict[int, list[tuple[float, float]]] = {}
        self.downloads: set[Connection] = set()
        self.websockets = 0
        self._servers: set[asyncio.Task] = set()

    def orders(self):
        return {"listen": self._listen, "heard": self._heard, "requests": self._requests, "finish": self._finish}

    def _listen(self, address: str, ports: list[int]) -> None:
        for port in ports:
            self.heard[port] = []
            listening = socket.create_server((address, port), backlog=512)
            serving = self.loop.create_server(partial(Connection, self, port), sock=listening, backlog=512)
            self._servers.add(self.loop.create_task(serving))

    def _heard(self, port: int) -> list[tuple[float, float]]:
        return self.heard[port]

    def _requests(self) -> dict[str, int]:
        return {str(port): len(heard) for port, heard in self.heard.items()}

    def _finish(self) -> int:
        finished = list(self.downloads)
        for connection in finished:
            connection.finish()
        return len(finished)


class Connection(asyncio.Protocol):
    """One connection to one member."""

    def __init__(self, members: MemberSet, port: int) -> None:
        self._members = members
        self._port = port
        self._buffer = bytearray()
        self._upgraded = False
        self._digest = hashlib.sha256()
        self._chunks = 0
        self._next: asyncio.TimerHandle | None = None
        body = str(port).encode() + b" " + FILLING
        self._answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def connection_made(self, transport) -> None:
        self._transport = transport

    def connection_lost(self, error) -> None:
        self._members.downloads.discard(self)
        self._members.websockets -= self._upgraded
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._upgraded and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._request(head)
        if self._upgraded:
            self._frames()

    # -- requests -----------------------------------------------------------------------------------------------

    def _request(self, head: bytes) -> None:
        first, *rest = head.split(b"\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(b": ") for line in rest)}
        path = first.split(b" ")[1]
        if path == b"/check":
            self._transport.write(self._answer)
            return
        self._members.heard[self._port].append((float(fields.get(b"x-sent", b"0")), time.monotonic()))
        if b"sec-websocket-key" in fields:
            self._upgrade(fields[b"sec-websocket-key"])
        elif path == b"/download":
            self._transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._members.downloads.add(self)
            self._chunk()
        else:
            self._transport.write(self._answer)

    # -- downloads ----------------------------------------------------------------------------------------------

    def _chunk(self) -> None:
        self._chunks += 1
        data = hashlib.sha256(b"%d %d" % (self._port, self._chunks)).digest() * (CHUNK_BYTES // 32)
        self._digest.update(data)
        self._write_chunk(data)
        self._next = self._members.loop.call_later(CHUNK_SECONDS, self._chunk)

    def finish(self) -> None:
        self._next.cancel()
        self._members.downloads.discard(self)
        self._write_chunk(self._digest.hexdigest().encode())
        self._write_chunk(b"")

    def _write_chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # -- WebSockets ---------------------------------------------------------------------------------------------

    def _upgrade(self, key: bytes) -> None:
        accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        self._upgraded = True
        self._members.websockets += 1

    def _frames(self) -> None:
        """Echo a client's short frames; each has a head of two bytes and a mask of four bytes."""
        while len(self._buffer) >= 6 and len(self._buffer) >= 6 + (length := self._buffer[1] & 0x7F):
            kind, mask = self._buffer[0] & 0xF, bytes(self._buffer[2:6])
            said = bytes(each ^ mask[n % 4] for n, each in enumerate(self._buffer[6 : 6 + length]))
            del self._buffer[: 6 + length]
            self._transport.write(bytes((0x80 | (_PONG if kind == _PING else kind), length)) + said)
            if kind == _CLOSE:
                self._transport.close()
                return


def main() -> None:
    loop = asyncio.new_event_loop()
    members = MemberSet(loop)

    def order() -> None:
        line = sys.stdin.readline()
        if not line:
            loop.stop()
            return
        obey(line, members.orders())

    loop.add_reader(sys.stdin.fileno(), order)
    loop.run_forever()


if __name__ == "__main__":
    main()
