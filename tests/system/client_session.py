# SPDX-License-Identifier: Apache-2.0
"""Sends the JSON bodies of clients of Octavia to the API of a sandbox, with the waits of these clients.

Invariant: a body reaches Octavia unchanged. gophercloud accepts the answers 201 and 202 to a POST, 200 and 202 to a
PUT, and 202 and 204 to a DELETE; another answer is an error of the client.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

# Octavia's answer while the load balancer is PENDING. Terraform and Heat repeat the request then.
CONFLICT = 409
_ACCEPTED = {"POST": (201, 202), "PUT": (200, 202), "DELETE": (202, 204)}
# Statuses of a load balancer at which Terraform looks at the object itself.
_SETTLED = ("ACTIVE", "ERROR")


class ClientSession:
    """Requests of one client for one cloud. Several threads can use it."""

    def __init__(self, cloud):
        self._cloud = cloud
        self.conflicts = 0
        self._lock = threading.Lock()

    def send(self, method, path, body=None):
        """Send one request; return the object in the answer, or None."""
        answer = self._ask(method, path, body)
        assert answer.status_code in _ACCEPTED[method], (method, path, answer.text)
        return _content(answer)

    def repeated(self, method, path, body=None):
        """Send a request until the load balancer is not PENDING; return the object in the answer."""

        def attempt():
            answer = self._ask(method, path, body)
            if answer.status_code == CONFLICT:
                with self._lock:
                    self.conflicts += 1
                return None
            assert answer.status_code in _ACCEPTED[method], (method, path, answer.text)
            return answer

        return _content(self._cloud.until(attempt, f"{method} {path} is accepted"))

    def shown(self, path):
        """Return the object at this path; None if Octavia answers 404."""
        answer = self._ask("GET", path, None)
        assert answer.status_code in (200, 404), answer.text
        return _content(answer) if answer.status_code == 200 else None

    def listed(self, path):
        """Return the list at this path."""
        answer = self._ask("GET", path, None)
        assert answer.status_code == 200, answer.text
        return next(value for name, value in answer.json().items() if not name.endswith("_links"))

    # --- waits --------------------------------------------------------------------------------------------------------

    def await_object(self, path):
        """Wait until the object itself is ACTIVE, as Heat does; return it."""

        def active():
            found = self.shown(path)
            assert found is not None, f"{path} is gone"
            assert found["provisioning_status"] != "ERROR", found
            return found if found["provisioning_status"] == "ACTIVE" else None

        return self._cloud.until(active, f"{path} is ACTIVE")

    def await_settled(self, load_balancer_id, path):
        """Wait for the load balancer and then for the object, as Terraform does; return the object."""
        place = f"loadbalancers/{load_balancer_id}"
        self._cloud.until(
            lambda: self.shown(place)["provisioning_status"] in _SETTLED, "the load balancer is ACTIVE or ERROR"
        )
        return self.await_object(path)

    def await_gone(self, path):
        """Wait until Octavia answers 404 or DELETED."""

        def gone():
            found = self.shown(path)
            return found is None or found["provisioning_status"] == "DELETED"

        self._cloud.until(gone, f"{path} is gone")

    def _ask(self, method, path, body):
        more = {} if body is None else {"json": body}
        return self._cloud.balancers.request(self._cloud.url(path), method, **more)


def _content(answer):
    """Return the object in an answer: the only value of its JSON object."""
    return next(iter(answer.json().values())) if answer.content else None


@contextmanager
def in_parallel(*steps):
    """Run steps in threads, and yield; raise the first error at the end of the with block."""
    failures = []

    def run(step):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            failures.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
