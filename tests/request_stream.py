# SPDX-License-Identifier: Apache-2.0
"""A client that sends requests during a test.

Invariant: the longest time between two answers is measured at the client. No other measurement proves a fail-over.
"""

import http.client
import threading
import time
from collections import Counter

from amphora_driver.host import namespaces


def request(address, timeout, path="/"):
    """Send a request over a new connection; return the status, or the name of the error."""
    connection = http.client.HTTPConnection(address, 80, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    else:
        return str(answer.status)
    finally:
        connection.close()


class RequestStream:
    """Sequential requests, each over a new connection, while the block runs.

    Args:
        client: the name of the client's network namespace.
        address: the VIP.
        until: polls a question until the answer is true; its second argument describes the answer.
        path: the path of the requests.
        pause: seconds between two requests.
        timeout: seconds after which a request without an answer has failed.

    Attributes:
        answers: number of requests by result.
        gap: the longest time without an answer, in seconds.
    """

    def __init__(self, client, address, until, *, path="/", pause=0.01, timeout=1.0):
        self.answers = Counter()
        self.gap = 0.0
        self._client, self._address, self._until = client, address, until
        self._path, self._pause, self._timeout = path, pause, timeout
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

    def more(self, number=20):
        """Wait for this number of further answers."""
        wanted = self.answers["200"] + number
        self._until(lambda: self.answers["200"] >= wanted, f"the client gets {number} more answers")

    @property
    def failed(self):
        return sum(self.answers.values()) - self.answers["200"]

    def _run(self):
        namespaces.run_inside(namespaces.path(self._client), self._ask)

    def _ask(self):
        last = time.monotonic()
        while not self._stopping.wait(self._pause):
            outcome = request(self._address, self._timeout, self._path)
            self.answers[outcome] += 1
            if outcome == "200":
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now
