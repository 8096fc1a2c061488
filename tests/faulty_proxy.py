# SPDX-License-Identifier: Apache-2.0
"""A proxy for connections to a server that can freeze, disconnect, or disconnect during a COMMIT."""

import contextlib
import socket
import tempfile
import threading
from pathlib import Path

# The query COMMIT of MariaDB's protocol. "SET AUTOCOMMIT" is another query.
_COMMIT = b"\x03COMMIT"


class FaultyProxy:
    """Forwards connections from its own Unix socket to another one; a context manager.

    Args:
        target: path of the server's socket.

    `at_commit` is the action at the next COMMIT: None, "before" (the connection ends and the server never receives
    it) or "after" (the server commits, and its answer is lost). It happens once.
    """

    def __init__(self, target):
        self._target = target
        self._folder = tempfile.mkdtemp(prefix="adb-")
        self.path = f"{self._folder}/line"
        self.at_commit = None
        self._open = threading.Event()
        self._open.set()
        self._ending = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._threads = []
        self._sockets = set()
        self._lock = threading.Lock()

    def __enter__(self):
        self._begin(self._accept)
        return self

    def __exit__(self, *_):
        self._ending = True
        self.thaw()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        Path(self.path).unlink()
        Path(self._folder).rmdir()

    def freeze(self):
        """Stop all data without an error."""
        self._open.clear()

    def thaw(self):
        self._open.set()

    def cut(self):
        """End every connection."""
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _begin(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while not self._ending:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            pair = _Pair(near, far)
            self._begin(self._carry, pair, near, far, True)
            self._begin(self._carry, pair, far, near, False)

    def _carry(self, pair, source, target, forth):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                if forth and self.at_commit and _COMMIT in data:
                    if self.at_commit == "before":
                        self.at_commit = None
                        break
                    self.at_commit, pair.deaf = None, True
                if not forth and pair.deaf:
                    break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if pair.done():
            with self._lock:
                self._sockets -= {source, target}
            source.close()
            target.close()


class _Pair:
    """Two directions of one connection; the second end closes it."""

    def __init__(self, near, far):
        self.deaf = False
        self._left = 2
        self._lock = threading.Lock()

    def done(self):
        with self._lock:
            self._left -= 1
            return self._left == 0
