# SPDX-License-Identifier: Apache-2.0
"""Workers that were replaced by a reload and still have connections.

Invariant: an old worker lives until the agent has read its final counters. The agent closes the connections of clients
one by one, because HAProxy 2.6 adds the bytes of a connection when the connection ends. SIGTERM and ``hard-stop-after``
would lose these bytes.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.runtime_socket import ANSWER_SECONDS

_PROMPT = b"\n> "
# Sessions of clients in HAProxy's answer to `show sess`, without connections of the agent and of peers.
_SESSION = re.compile(r"^(0x[0-9a-f]+): proto=(?!unix_stream|\?)", re.MULTILINE)
_COUNTS = re.compile(r"^(CurrConns|Listeners|Unstoppable Jobs): (\d+)$", re.MULTILINE)
_POLL_SECONDS = 0.01
_LEVEL, _OUR_LEVEL = "show cli level", "admin"


class OldWorker:
    """A connection that keeps an old worker and its counters alive.

    An agent that receives the connection from the previous agent process calls `recover` first. Questions raise a
    `HaproxyError` if the worker has ended.

    Args:
        identity: the pid and start time of the worker, which the kernel never reuses.
        until: the deadline of the worker, in seconds of the monotonic clock, which is the same for all processes.
    """

    def __init__(self, connection: socket.socket, identity: str, until: float) -> None:
        self.identity = identity
        self.until = until
        self.was_idle = False
        self.read_at = 0.0
        self._socket = connection
        self._socket.settimeout(ANSWER_SECONDS)

    @classmethod
    def hold(cls, path: Path, identity: str, until: float) -> OldWorker:
        """Connect to the present worker. Raises OSError or HaproxyError if the worker does not answer."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held = cls(connection, identity, until)
            connection.connect(str(path))
            held.ask("prompt")
        except (OSError, HaproxyError):
            connection.close()
            raise
        return held

    @property
    def name(self) -> str:
        """The identity and the deadline, from which another agent process can create this object."""
        return f"{self.identity}@{self.until:.3f}"

    @property
    def pid(self) -> int:
        return int(self.identity.partition(":")[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def recover(self) -> None:
        """Discard the rest of an answer to the previous agent process."""
        answer = self.ask(_LEVEL)
        while not answer.rstrip().endswith(_OUR_LEVEL):
            answer = self._read(_LEVEL)

    def ask(self, question: str) -> str:
        try:
            self._socket.sendall(question.encode() + b"\n")
        except OSError as error:
            raise HaproxyError(f"send '{question}' to HAProxy's old worker", str(error)) from error
        return self._read(question)

    def _read(self, question: str) -> str:
        answer = bytearray()
        try:
            while not answer.endswith(_PROMPT):
                data = self._socket.recv(65536)
                if not data:
                    raise HaproxyError(f"send '{question}' to HAProxy's old worker", "the worker has ended")
                answer += data
        except OSError as error:
            raise HaproxyError(f"send '{question}' to HAProxy's old worker", str(error)) from error
        return answer[: -len(_PROMPT)].decode(errors="replace")

    def close(self) -> None:
        self._socket.close()

    def finish(self, grace: float, close_timeout: float) -> int:
        """Wait up to `grace` seconds for the connections, then close the rest; return their number.

        The counters are complete when the closed connections have ended, at the latest after `close_timeout` seconds.
        """
        if self._is_idle_before(time.monotonic() + grace):
            return 0
        sessions = _SESSION.findall(self.ask("show sess"))
        for session in sessions:
            self.ask(f"shutdown session {session}")
        self._is_idle_before(time.monotonic() + close_timeout)
        return len(sessions)

    def _is_idle_before(self, deadline: float) -> bool:
        while self.jobs() > 0:
            if time.monotonic() >= deadline:
                return False
            # HAProxy sends no notification when a connection ends, so its old worker is polled.
            time.sleep(_POLL_SECONDS)
        return True

    def jobs(self) -> int:
        """Return the number of client connections and listeners; a worker with a listener accepts connections.

        HAProxy's own number "Jobs" also has connections to its sockets and, for three seconds, to missing peers.
        """
        found = {name: int(number) for name, number in _COUNTS.findall(self.ask("show info"))}
        return found.get("CurrConns", 0) + max(0, found.get("Listeners", 0) - found.get("Unstoppable Jobs", 0))
