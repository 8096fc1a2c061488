# SPDX-License-Identifier: Apache-2.0
"""A client that sends requests during a test, and the amphorae that may answer it."""

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


class Traffic:
    """A sandbox client that sends sequential requests, each over a new connection."""

    def __init__(self, cloud, address):
        self.cloud = cloud
        self.address = address
        self.answers = Counter()
        # The longest time without an answer, in seconds.
        self.gap = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.cloud.until(lambda: self.answers["200"] > 5, "the client gets answers")
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()

    def more(self, number=20):
        """Wait for this number of further answers."""
        wanted = self.answers["200"] + number
        self.cloud.until(lambda: self.answers["200"] >= wanted, f"the client gets {number} more answers")

    def _run(self):
        namespaces.run_inside(namespaces.path(self.cloud.settings.host(topology.CLIENT)), self._ask)

    def _ask(self):
        last = time.monotonic()
        while not self._stopping.wait(0.01):
            outcome = self._one()
            self.answers[outcome] += 1
            if outcome == "200":
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now

    def _one(self):
        connection = http.client.HTTPConnection(self.address, 80, timeout=1)
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

    @property
    def failed(self):
        return sum(self.answers.values()) - self.answers["200"]
