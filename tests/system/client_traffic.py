# SPDX-License-Identifier: Apache-2.0
"""A client that sends requests during a test, and the amphorae that may answer it.

Invariant: the longest time between two answers is measured at the client. No other measurement proves a fail-over.
"""

import http.client
import threading
import time
from collections import Counter

from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import amphorae
from sandbox import topology


def of(cloud, balancer):
    """Return the load balancer's amphorae by role."""
    found = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
    return {one.role: one for one in found if one.state is not AmphoraState.RETIRING}


def holder(cloud, balancer, *, but=()):
    """Return the VIP holder according to heartbeats."""

    def ask():
        says = [one for one in of(cloud, balancer).values() if one.holds_vip and one.id not in but]
        return says[0] if len(says) == 1 else None

    return cloud.until(ask, "one amphora holds the VIPs", 30)


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


class Traffic:
    """A sandbox client that sends sequential requests, each over a new connection.

    Args:
        cloud: the sandbox.
        address: the VIP.
        path: the path of the requests.
        pause: seconds between two requests.
        timeout: seconds after which a request without an answer has failed.

    Attributes:
        answers: number of requests by result.
        gap: the longest time without an answer, in seconds.
    """

    def __init__(self, cloud, address, *, path="/", pause=0.01, timeout=1.0):
        self.cloud = cloud
        self.address = address
        self.answers = Counter()
        self.gap = 0.0
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
        self.cloud.until(lambda: self.answers["200"] >= wanted, f"the client gets {number} more answers")

    @property
    def failed(self):
        return sum(self.answers.values()) - self.answers["200"]

    def _run(self):
        namespaces.run_inside(namespaces.path(self.cloud.settings.host(topology.CLIENT)), self._ask)

    def _ask(self):
        last = time.monotonic()
        while not self._stopping.wait(self._pause):
            outcome = request(self.address, self._timeout, self._path)
            self.answers[outcome] += 1
            if outcome == "200":
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now
