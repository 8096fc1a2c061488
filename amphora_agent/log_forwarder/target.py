# SPDX-License-Identifier: Apache-2.0
"""One target: its queue, its thread and its counters.

Invariant: only the thread of the target waits for the target. A target that is dead or slow affects no other target and
no sender of lines; its queue is full, and it loses lines.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from amphora_agent.log_forwarder.line_queue import LineQueue
from amphora_agent.log_forwarder.transports import LinesRefused, Transport, create_transport
from amphora_agent.log_settings import LogTarget, parse_endpoint

_MOST_BYTES = 64 << 10
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


class Target:
    """Sends lines to one target until it is closed.

    Lines for an https target are JSON objects; other targets get syslog messages.
    """

    def __init__(self, target: LogTarget, authorities: str, queue_bytes: int) -> None:
        self.endpoint = parse_endpoint(target.url)
        self.queue = LineQueue(queue_bytes)
        self._sent = self._refused = 0
        # Number of lines that are taken from the queue and not yet sent or lost.
        self._sending = 0
        self._error = ""
        self._stopping = threading.Event()
        self._transport: Transport = create_transport(target, authorities, self._stopping)
        self._thread = threading.Thread(target=self._run, name=self.endpoint.scheme, daemon=True)
        self._thread.start()

    @property
    def is_json(self) -> bool:
        return self.endpoint.scheme == "https"

    def counters(self) -> dict[str, Any]:
        """Return the numbers of lines since the first use of the target, and the present error."""
        return {
            "url": str(self.endpoint),
            "sent": self._sent,
            "dropped": self.queue.dropped + self._refused + self._transport.lost,
            "uncertain": self._transport.uncertain + (self._sending if self._stopping.is_set() else 0),
            "waiting_bytes": self.queue.bytes,
            "connected": self._transport.is_connected,
            "error": self._error,
        }

    def close(self) -> None:
        """Discard waiting lines. The thread ends within seconds."""
        self._stopping.set()
        self.queue.close()

    def _run(self) -> None:
        while lines := self.queue.take(_MOST_BYTES):
            self._sending, retry = len(lines), _FIRST_RETRY
            while not self._stopping.is_set():
                if self._try(lines):
                    self._sending = 0
                    break
                self._stopping.wait(retry)
                retry = min(_LAST_RETRY, 2 * retry)
        self._transport.close()

    def _try(self, lines: list[bytes]) -> bool:
        """Send lines; return whether they are done."""
        try:
            self._transport.send(lines)
        except LinesRefused as error:
            self._refused += len(lines)
            self._report(str(error), "drops them")
            return True
        except (OSError, ValueError) as error:
            self._report(f"{type(error).__name__}: {error}", "tries again")
            return False
        self._sent += len(lines)
        self._report("")
        return True

    def _report(self, error: str, reaction: str = "") -> None:
        """Write a line if the target begins or ends to fail."""
        if bool(error) != bool(self._error) and not self._stopping.is_set():
            begins = f"cannot send log lines to {self.endpoint}, and {reaction}: {error}"
            sys.stderr.write(f"log forwarder: {begins if error else f'sends log lines to {self.endpoint} again'}\n")
            sys.stderr.flush()
        self._error = error
