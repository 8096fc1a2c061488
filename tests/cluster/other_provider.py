# SPDX-License-Identifier: Apache-2.0
"""The missing half of Octavia's provider `noop_driver`, which accepts requests and never reports a status.

It reports as any provider does: through octavia-lib and the sockets of octavia-driver-agent.
"""

import threading
from contextlib import suppress

from octavia_lib.api.drivers.driver_lib import DriverLibrary
from openstack.exceptions import NotFoundException

NAME = "noop_driver"
_CHILDREN = {
    "listeners": "listeners",
    "pools": "pools",
    "members": "members",
    "healthmonitor": "healthmonitors",
}


class OtherProvider:
    """A thread that ends each request of this provider at once, unless it is held.

    Attributes:
        held: while it is set, load balancers stay pending.
    """

    def __init__(self, settings, balancers):
        self._run_folder, self._balancers = settings.run, balancers
        self._ending, self.held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()

    def remove_all(self):
        """Delete all load balancers of this provider, and wait until they are gone."""
        self.held.clear()
        for one in self._mine():
            with suppress(NotFoundException):
                self._balancers.wait_for_load_balancer(one.id, interval=0.1, wait=30)
                self._balancers.delete_load_balancer(one.id, cascade=True)
        while self._mine():
            self._ending.wait(0.1)

    def _mine(self):
        return list(self._balancers.load_balancers(provider=NAME))

    def _run(self):
        paths = {f"{name}_socket": str(self._run_folder / f"{name}.sock") for name in ("status", "stats", "get")}
        library = DriverLibrary(**paths)
        while not self._ending.wait(0.05):
            if self.held.is_set():
                continue
            for one in self._mine():
                if one.provisioning_status.startswith("PENDING"):
                    library.update_loadbalancer_status(self._finished(one.id))

    def _finished(self, balancer_id):
        tree = self._balancers.get(f"/lbaas/loadbalancers/{balancer_id}/status").json()["statuses"]["loadbalancer"]
        found = {"loadbalancers": [_ended(tree)]}
        # For a deletion with cascade, Octavia keeps the status of the children, and a provider reports each as DELETED.
        # Octavia keeps the row of a child that is not reported.
        deleted = tree["provisioning_status"] == "PENDING_DELETE"

        def walk(parent):
            for key, kind in _CHILDREN.items():
                children = parent.get(key) or []
                for child in [children] if isinstance(children, dict) else children:
                    found.setdefault(kind, []).append(_ended(child, deleted=deleted))
                    walk(child)

        walk(tree)
        return {kind: list({one["id"]: one for one in objects}.values()) for kind, objects in found.items()}


def _ended(one, *, deleted=False):
    if deleted or one["provisioning_status"] == "PENDING_DELETE":
        return {"id": one["id"], "provisioning_status": "DELETED"}
    return {"id": one["id"], "provisioning_status": "ACTIVE", "operating_status": "ONLINE"}
