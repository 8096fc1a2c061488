# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a load balancer through Octavia's own API, and requests through the load balancer.

Invariant: what is there already is used: a second run makes nothing new. Requests come from the client's namespace,
over the same networks as any other machine's.
"""

from __future__ import annotations

import http.client
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import openstack

from amphora_driver.host import namespaces
from sandbox import config_files, topology
from sandbox.demo_hosts import MEMBER_PORT
from sandbox.settings import SandboxError

if TYPE_CHECKING:
    from sandbox.settings import Settings

Report = Callable[[str], None]
NAME = "demo"
_POLL_INTERVAL = 0.1
# An emulated machine boots; whoever looks at it all the time takes the processor from it.
_SLOW_POLL_INTERVAL = 1.0
_NOTE_INTERVAL = 30.0


def connect(settings: Settings) -> Any:
    """An openstacksdk connection to this sandbox."""
    return openstack.connection.Connection(
        auth_type="none",
        auth={"endpoint": settings.endpoint},
        load_balancer_endpoint_override=settings.endpoint,
        network_endpoint_override=settings.network_endpoint,
    )


def wait_active(settings: Settings, connection: Any, load_balancer_id: str, note: Report) -> Any:
    """The load balancer, when it is ACTIVE.

    Args:
        note: told now and then that it is waited for, where that takes long.

    Raises:
        SandboxError: it becomes ERROR, or takes longer than it may.
    """
    began = time.monotonic()
    emulated = config_files.uses_emulation(settings)
    said = began
    while True:
        found = connection.load_balancer.get_load_balancer(load_balancer_id)
        if found.provisioning_status == "ACTIVE":
            return found
        now = time.monotonic()
        if found.provisioning_status == "ERROR" or now > began + settings.wait_timeout:
            raise SandboxError(
                f"wait for load balancer {found.name}",
                f"it is {found.provisioning_status}",
                "See `amphoractl loadbalancer show` and the controller's log.",
            )
        if emulated and now - said > _NOTE_INTERVAL:
            said = now
            note(f"still waiting: it is {found.provisioning_status}, its amphora boots ({now - began:.0f} s)")
        time.sleep(_SLOW_POLL_INTERVAL if emulated else _POLL_INTERVAL)


def ensure_load_balancer(settings: Settings, report: Report, note: Report) -> Any:
    """The demonstration's load balancer, ACTIVE; created in one request with all below it if it is not there.

    Args:
        report: told of every step.
        note: told what is waited for, and for how long.
    """
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
    if found.provisioning_status != "ACTIVE" and settings.compute == "qemu":
        how = "emulated, because KVM does not work here: this takes some minutes"
        how = how if config_files.uses_emulation(settings) else "by KVM"
        console = f"{os.path.relpath(settings.machines)}/*/console.log"
        note(f"its amphora is a virtual machine, {how}. Its console: {console}")
    found = wait_active(settings, connection, found.id, note)
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

    return namespaces.run_inside(namespaces.path(settings.host(host)), request)


def wait_for_response(settings: Settings, address: str, note: Report) -> None:
    """Wait until the load balancer answers at all.

    One that is ACTIVE does so at once, unless its amphorae were only now powered on again: Octavia hears nothing of
    that, and a virtual machine takes its time to boot and be given what it had.
    """
    if settings.compute != "qemu":
        return
    began = said = time.monotonic()
    while True:
        with suppress(OSError, http.client.HTTPException):
            if get(settings, address)[0] < http.client.INTERNAL_SERVER_ERROR:
                return
        now = time.monotonic()
        if now > began + settings.wait_timeout:
            return
        if now - said > _NOTE_INTERVAL:
            said = now
            note(f"still waiting: http://{address}/ does not answer, its amphora boots ({now - began:.0f} s)")
        time.sleep(_SLOW_POLL_INTERVAL)


def count_responses(settings: Settings, address: str, number: int) -> Counter[str]:
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
