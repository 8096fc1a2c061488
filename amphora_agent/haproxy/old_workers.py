# SPDX-License-Identifier: Apache-2.0
"""A worker that was replaced and still has connections.

Invariant: it lives as long as our connection to it is open, and what it has counted can be read to the last byte:
whoever ends it closes its clients' connections first, one by one, so that HAProxy counts them. (HAProxy 2.6 adds a
connection's bytes when that ends; SIGTERM and ``hard-stop-after`` would take them along uncounted.)
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.runtime_socket import ANSWER_SECONDS

_PROMPT = b"\n> "
# Those of clients: not ours, nor the one by which it looks for its peers.
_SESSION = re.compile(r"^(0x[0-9a-f]+): proto=(?!unix_stream|\?)", re.MULTILINE)
_COUNTS = re.compile(r"^(CurrConns|Listeners|Unstoppable Jobs): (\d+)$", re.MULTILINE)
_POLL_SECONDS = 0.01
_LEVEL, _OUR_LEVEL = "show cli level", "admin"


class LeavingWorker:
    """The connection that keeps a worker. Its name says which one it is, and until when it may go on.

    A worker that was replaced ends with its last connection, and takes with it what it counted since anybody
    asked. This connection is the last one, by not being closed. Whoever got it from somebody else has to `recover`.

    Args:
        identity: of the worker: its process, told apart from any other that had or will have its number.
        until: when it has to end, in seconds of the monotonic clock, which is the same for all processes.
    """

    def __init__(self, connection: socket.socket, identity: str, until: float) -> None:
        self.identity = identity
        self.until = until
        self.was_idle = False
        self.read_at = 0.0
        self._socket = connection
        self._socket.settimeout(ANSWER_SECONDS)

    @classmethod
    def hold(cls, path: Path, identity: str, until: float) -> LeavingWorker:
        """Connect to the worker that listens now.

        Raises:
            OSError, HaproxyError: it does not answer.
        """
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
        """From which it can be made again, together with the connection."""
        return f"{self.identity}@{self.until:.3f}"

    @property
    def pid(self) -> int:
        return int(self.identity.partition(":")[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def recover(self) -> None:
        """Get rid of the rest of an answer that somebody else has asked for: ours comes last, and no other is like it.

        Raises:
            HaproxyError: the worker is gone.
        """
        answer = self.ask(_LEVEL)
        while not answer.rstrip().endswith(_OUR_LEVEL):
            answer = self._read(_LEVEL)

    def ask(self, question: str) -> str:
        """Ask and return the answer.

        Raises:
            HaproxyError: the worker is gone.
        """
        try:
            self._socket.sendall(question.encode() + b"\n")
        except OSError as error:
            raise HaproxyError(f"ask a leaving worker '{question}'", str(error)) from error
        return self._read(question)

    def _read(self, question: str) -> str:
        answer = bytearray()
        try:
            while not answer.endswith(_PROMPT):
                data = self._socket.recv(65536)
                if not data:
                    raise HaproxyError(f"ask a leaving worker '{question}'", "it is gone")
                answer += data
        except OSError as error:
            raise HaproxyError(f"ask a leaving worker '{question}'", str(error)) from error
        return answer[: -len(_PROMPT)].decode(errors="replace")

    def close(self) -> None:
        self._socket.close()

    # -- its end ---------------------------------------------------------------------------------------------

    def finish(self, grace: float, patience: float) -> int:
        """Let it finish what it does, and after that close the connections it still has.

        Args:
            grace: seconds for the first; ``patience``: seconds in which the second has to be done.

        Returns:
            How many connections were closed. What it has counted can be read now.

        Raises:
            HaproxyError: it is gone.
        """
        if self._is_idle_before(time.monotonic() + grace):
            return 0
        sessions = _SESSION.findall(self.ask("show sess"))
        for session in sessions:
            self.ask(f"shutdown session {session}")
        self._is_idle_before(time.monotonic() + patience)
        return len(sessions)

    def _is_idle_before(self, deadline: float) -> bool:
        while self.jobs() > 0:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)  # it tells nobody
        return True

    def jobs(self) -> int:
        """Connections of clients, and listeners: as long as it has any, it accepts more.

        Its own word "Jobs" has more: who else asks it something, and, for three seconds if nobody comes after it, the
        peers that it looks for.
        """
        found = {name: int(number) for name, number in _COUNTS.findall(self.ask("show info"))}
        return found.get("CurrConns", 0) + max(0, found.get("Listeners", 0) - found.get("Unstoppable Jobs", 0))
