# SPDX-License-Identifier: Apache-2.0
"""Long connections with the times of their progress: echoes, downloads and uploads.

Invariant: every byte is compared. The receiver records the times of new data, so that a gap is the time in which an
application waits for data. The rate is below that of the virtual switch, so that its queues stay short.

    client ── VIP ── HAProxy (TCP) ── StreamServer
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import suppress

from peers import Peer

_ECHO, _DOWNLOAD, _UPLOAD = b"echo", b"down", b"upup"
_HEAD = struct.Struct("!4sQ")
_NUMBER = struct.Struct("!Q")
_LINE = 64
# 1.6 MB/s.
_CHUNK, _PAUSE = 16384, 0.01
_SECONDS = 30.0


class Progress:
    """Records the times at which a receiver has received more data."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.times: list[float] = []
        self.received = 0
        self.error: Exception | None = None
        self.ended: float | None = None
        """The monotonic time of the first report of an end, in order or by an error."""

    def add(self, count: int) -> None:
        with self._changed:
            self.received += count
            self.times.append(time.monotonic())
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        with self._changed:
            if self.ended is None:
                self.error, self.ended = error, time.monotonic()
            self._changed.notify_all()

    def await_more(self, count: int, seconds: float = _SECONDS) -> None:
        """Wait until this number of further bytes has been received.

        Raises:
            AssertionError: the connection ended, or the time-out expired.
        """
        with self._changed:
            wanted = self.received + count
            self._changed.wait_for(lambda: self.received >= wanted or self.ended is not None, seconds)
            assert self.received >= wanted, f"{self.received} of {wanted} bytes after {seconds} s, error {self.error!r}"

    def await_end(self, seconds: float) -> float:
        """Wait for the end of the connection; return its time."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended is not None, seconds), "the connection has not ended"
            return self.ended

    def await_stall(self, silent: float, seconds: float = _SECONDS) -> float:
        """Wait until no data have arrived for some seconds; return the time of the last progress."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (left := self.times[-1] + silent - time.monotonic()) > 0:
                assert self.ended is None, f"the connection has ended: {self.error!r}"
                assert time.monotonic() < deadline, "data continue to arrive"
                self._changed.wait(left)
            assert self.ended is None, f"the connection has ended: {self.error!r}"
            return self.times[-1]

    def gap(self, since: float) -> float:
        """Return the longest time without progress that ended after `since`."""
        with self._changed:
            return max((b - a for a, b in itertools.pairwise(self.times) if b > since), default=float("inf"))


def _pattern(number: int) -> bytes:
    """Return the bytes of a chunk, which differ in each chunk."""
    return _NUMBER.pack(number) * (_CHUNK // _NUMBER.size)


class _Reader:
    """Compares received bytes with the pattern."""

    def __init__(self) -> None:
        self._number, self._rest = 0, b""

    def take(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= _CHUNK:
            assert self._rest[:_CHUNK] == _pattern(self._number), f"chunk {self._number} differs"
            self._rest, self._number = self._rest[_CHUNK:], self._number + 1


class StreamServer(Peer):
    """The member; it identifies uploads by the numbers that clients send."""

    def __init__(self, *arguments, **more) -> None:
        self.uploads: dict[int, Progress] = {}
        self.downloads: dict[int, int] = {}
        """Sent bytes of the downloads that have ended."""
        self._ending = threading.Event()
        super().__init__(*arguments, **more)

    def finish(self) -> None:
        """End the downloads."""
        self._ending.set()

    def again(self) -> None:
        """Let later downloads last until the next `finish`."""
        self._ending.clear()

    def serve(self, connection, peer, number, proxied) -> None:
        kind, which = _HEAD.unpack(connection.recv(_HEAD.size, socket.MSG_WAITALL))
        if kind == _ECHO:
            while data := connection.recv(65536):
                connection.sendall(data)
        elif kind == _DOWNLOAD:
            for sent in itertools.count():
                if self._ending.wait(_PAUSE):
                    self.downloads[which] = sent * _CHUNK
                    return
                connection.sendall(_pattern(sent))
        else:
            self._receive(connection, which)

    def _receive(self, connection, which: int) -> None:
        reader, progress = _Reader(), self.uploads[which]
        try:
            while data := connection.recv(65536):
                reader.take(data)
                progress.add(len(data))
        except (OSError, AssertionError) as error:
            progress.end(error)
        else:
            progress.end()


class Stream:
    """One connection of a client, with a thread of its own."""

    kind = b""
    flowing = 4 * _CHUNK
    _numbers = itertools.count()

    def __init__(self, sockets, address: str, port: int, server: StreamServer) -> None:
        self.which = next(self._numbers)
        self.server = server
        self.address = address
        self.progress = self._make_progress()
        self.ending = threading.Event()
        self.socket = sockets.socket(address)
        self.socket.settimeout(_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect((address, port))
        self.socket.sendall(_HEAD.pack(self.kind, self.which))
        self._thread = threading.Thread(target=self._run, daemon=True, name=str(self))
        self._thread.start()

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.address}"

    def _make_progress(self) -> Progress:
        return Progress()

    def await_flow(self) -> None:
        """Wait until more data have arrived than fit into the socket's first window."""
        self.progress.await_more(self.flowing)

    def _run(self) -> None:
        try:
            self.talk()
        except (OSError, AssertionError, EOFError) as error:
            self.fail(error)
        else:
            self.succeed()

    def fail(self, error: Exception) -> None:
        self.progress.end(error)

    def succeed(self) -> None:
        self.progress.end()

    def talk(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """End the connection in order, and assert that no data are lost."""
        self.ending.set()
        self._thread.join(_SECONDS)
        assert self.progress.error is None, f"{self}: {self.progress.error!r}"
        self.close()

    def close(self) -> None:
        self.ending.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)
        self.socket.close()


class Echo(Stream):
    """Sends a line each 10 ms, after the echo of the previous line."""

    kind = _ECHO
    flowing = 10 * _LINE

    def talk(self) -> None:
        for number in itertools.count():
            line = _NUMBER.pack(number).ljust(_LINE, b".")
            self.socket.sendall(line)
            heard = self.socket.recv(_LINE, socket.MSG_WAITALL)
            if not heard:
                raise EOFError("the connection ended")
            assert heard == line
            self.progress.add(_LINE)
            if self.ending.wait(_PAUSE):
                return


class Download(Stream):
    """Receives data from the member until the member ends the connection."""

    kind = _DOWNLOAD

    def talk(self) -> None:
        reader = _Reader()
        while data := self.socket.recv(65536):
            reader.take(data)
            self.progress.add(len(data))

    def finish(self) -> None:
        self.server.finish()
        super().finish()
        sent = self.server.downloads[self.which]
        assert self.progress.received == sent, f"{self.progress.received} of {sent} bytes received"


class Upload(Stream):
    """Sends data to the member, whose progress is measured."""

    kind = _UPLOAD

    def _make_progress(self) -> Progress:
        self._sent = 0
        return self.server.uploads.setdefault(self.which, Progress())

    def talk(self) -> None:
        for number in itertools.count():
            if self.ending.wait(_PAUSE):
                self.socket.shutdown(socket.SHUT_WR)
                return
            self.socket.sendall(_pattern(number))
            self._sent += _CHUNK

    def succeed(self) -> None:
        """The member reports the end."""

    def finish(self) -> None:
        self.ending.set()
        self.progress.await_end(_SECONDS)
        super().finish()
        assert self.progress.received == self._sent, f"{self.progress.received} of {self._sent} bytes received"


KINDS = (Echo, Download, Upload)
