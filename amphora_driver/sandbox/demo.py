# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a load balancer through Octavia's own API, and requests through the load balancer.

Invariant: what is there already is used: a second run makes nothing new. Requests come from the client's namespace,
over the same networks as any other machine's.
"""

from __future__ import annotations

import http.client
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openstack

from amphora_driver.network import namespaces
from amphora_driver.sandbox import topology
from amphora_driver.sandbox.demo_hosts import MEMBER_PORT
from amphora_driver.sandbox.settings import SandboxError

if TYPE_CHECKING:
    from amphora_driver.sandbox.settings import Settings

NAME = "demo"
_ACTIVE_SECONDS = 120.0
_LOOK_AGAIN = 0.1


def connect(settings: Settings) -> Any:
    """An openstacksdk connection to this sandbox."""
    return openstack.connection.Connection(
        auth_type="none",
        auth={"endpoint": settings.endpoint},
        load_balancer_endpoint_override=settings.endpoint,
        network_endpoint_override=settings.network_endpoint,
    )


def wait_active(connection: Any, load_balancer_id: str, seconds: float = _ACTIVE_SECONDS) -> Any:
    """The load balancer, when it is ACTIVE.

    Raises:
        SandboxError: it becomes ERROR, or takes longer.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = connection.load_balancer.get_load_balancer(load_balancer_id)
        if found.provisioning_status == "ACTIVE":
            return found
        if found.provisioning_status == "ERROR" or time.monotonic() > deadline:
            raise SandboxError(
                f"wait for load balancer {found.name}",
                f"it is {found.provisioning_status}",
                "See `amphoractl loadbalancer show` and the controller's log.",
            )
        time.sleep(_LOOK_AGAIN)


def ensure_load_balancer(settings: Settings, report: Callable[[str], None]) -> Any:
    """The demonstration's load balancer, ACTIVE; created in one request with all below it if it is not there."""
    connection = connect(settings)
    found = connection.load_balancer.find_load_balancer(NAME)
    if found is None:
        members = [
            {
                "name": name,
                "address": f"192.0.2.{number}",
                "protocol_port": MEMBER_PORT,
                "subnet_id": topology.MEMBER_SUBNET,
            }
            for name, number in topology.MEMBERS.items()
        ]
        pool = {"name": f"{NAME}-pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": members}
        listener = {"name": f"{NAME}-http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        report("POST /v2.0/lbaas/loadbalancers: a listener, a pool, three members")
        found = connection.load_balancer.create_load_balancer(
            name=NAME, vip_subnet_id=topology.VIP_SUBNET, listeners=[listener]
        )
    started = time.monotonic()
    found = wait_active(connection, found.id)
    report(f"load balancer {NAME} is ACTIVE on {found.vip_address} (waited {time.monotonic() - started:.1f} s)")
    return found


def get(
    settings: Settings, address: str, path: str = "/", port: int = 80, host: str = topology.CLIENT
) -> tuple[int, str]:
    """Status and body of one request, sent from a host's namespace over a connection of its own."""

    def request() -> tuple[int, str]:
        connection = http.client.HTTPConnection(address, port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return namespaces.inside(namespaces.path(settings.host(host)), request)


def count_answers(settings: Settings, address: str, number: int) -> Counter[str]:
    """Who answered how many of so many requests.

    Raises:
        SandboxError: one of them was not answered.
    """
    try:
        return Counter(get(settings, address)[1].strip() for _ in range(number))
    except (OSError, http.client.HTTPException) as error:
        raise SandboxError(
            f"reach http://{address}/ from the client",
            f"{type(error).__name__}: {error}",
            "See `amphoractl amphora list`; `openstack loadbalancer failover demo` makes a new amphora.",
        ) from error
