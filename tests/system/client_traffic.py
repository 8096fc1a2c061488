# SPDX-License-Identifier: Apache-2.0
"""The sandbox's client during a test, and the amphorae that may answer it."""

from request_stream import RequestStream

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


class Traffic(RequestStream):
    """Requests of the sandbox's client to a VIP; `more` are the keyword arguments of `RequestStream`."""

    def __init__(self, cloud, address, **more):
        super().__init__(cloud.settings.host(topology.CLIENT), address, cloud.until, **more)
