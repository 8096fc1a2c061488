# SPDX-License-Identifier: Apache-2.0
"""A client that sends requests continuously, and measures the longest time without an answer.

Invariant: the longest time between two answers is measured at the client. No other measurement proves a fail-over.
"""

import http.client
import threading
import time
from collections import Counter

from amphora_driver.host import namespaces
from sandbox import topology

# Seconds between two requests, and the time-out of one.
PAUSE, TIME_LIMIT = 0.02, 0.3


class Clients:
    """A sandbox client that sends sequential requests, each over a new connection.

    Attributes:
        answers: number of requests by result.
        gap: the longest time without an answer, in seconds.
        answered_at: time of the first answer after that gap (seconds since 1970).
    """

    def __init__(self, cloud, address):
        self.cloud = cloud
        self.address = address
        self.answers = Counter()
        self.gap = self.answered_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.more(10)
        self.gap = 0.0
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()

    def more(self, number=20, seconds=60.0):
        """Wait for this number of further answers."""
        wanted = self.answers["200"] + number
        self.cloud.until(lambda: self.answers["200"] >= wanted, f"the client gets {number} more answers", seconds)

    @property
    def failed(self):
        return sum(self.answers.values()) - self.answers["200"]

    def _run(self):
        namespaces.run_inside(namespaces.path(self.cloud.settings.host(topology.CLIENT)), self._ask)

    def _ask(self):
        last = time.monotonic()
        while not self._stopping.wait(PAUSE):
            outcome = self._one()
            self.answers[outcome] += 1
            if outcome == "200":
                now = time.monotonic()
                if now - last > self.gap:
                    self.gap, self.answered_at = now - last, time.time()
                last = now

    def _one(self):
        connection = http.client.HTTPConnection(self.address, 80, timeout=TIME_LIMIT)
        try:
            connection.request("GET", "/")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        else:
            return str(answer.status)
        finally:
            connection.close()
