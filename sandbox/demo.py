# SPDX-License-Identifier: Apache-2.0
"""The demonstration: create a load balancer through Octavia's API and send requests through it.

Invariant: a second run uses the existing objects. Requests come from the client's namespace over the VIP network.
"""

from __future__ import annotations

import http.client
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import openstack

from amphora_driver.host import namespaces
from sandbox import config_files, topology, vm_wait
from sandbox.demo_hosts import MEMBER_PORT
from sandbox.settings import SandboxError

if TYPE_CHECKING:
    from sandbox.settings import Settings

Report = Callable[[str], None]
NAME = "demo"
_POLL_INTERVAL = 0.1


def connect(settings: Settings) -> Any:
    """Open an openstacksdk connection to this sandbox."""
    return openstack.connection.Connection(
        auth_type="none",
        auth={"endpoint": settings.endpoint},
        load_balancer_endpoint_override=settings.endpoint,
        network_endpoint_override=settings.network_endpoint,
    )


def wait_active(settings: Settings, connection: Any, load_balancer_id: str, note: Report) -> Any:
    """Wait until the load balancer is ACTIVE; raises SandboxError for ERROR and after the time-out."""
    emulated = config_files.uses_emulation(settings)
    found: Any = None

    def note_progress(seconds: float) -> None:
        if emulated:
            note(f"still waiting: load balancer is {found.provisioning_status}, amphora boots ({seconds:.0f} s)")

    # An emulated amphora is polled less often, because frequent polling would slow its boot down.
    for _ in vm_wait.poll(settings.wait_timeout, note_progress, None if emulated else _POLL_INTERVAL):
        found = connection.load_balancer.get_load_balancer(load_balancer_id)
        if found.provisioning_status == "ACTIVE":
            return found
        if found.provisioning_status == "ERROR":
            break
    raise SandboxError(
        f"wait for load balancer {found.name}",
        f"it is {found.provisioning_status}",
        "See `amphoractl loadbalancer show` and the log of the controller.",
    )


def ensure_load_balancer(settings: Settings, report: Report, note: Report) -> Any:
    """The ACTIVE load balancer of the demonstration; one request creates it with its children."""
    connection = connect(settings)
    found = connection.load_balancer.find_load_balancer(NAME)
    if found is None:
        common = {"protocol_port": MEMBER_PORT, "subnet_id": topology.MEMBER_SUBNET}
        members = [
            {"name": name, "address": f"192.0.2.{number}", **common} for name, number in topology.MEMBERS.items()
        ]
        pool = {"name": f"{NAME}-pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": members}
        listener = {"name": f"{NAME}-http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        report("POST /v2.0/lbaas/loadbalancers: a listener, a pool, three members")
        found = connection.load_balancer.create_load_balancer(
            name=NAME, vip_subnet_id=topology.VIP_SUBNET, listeners=[listener]
        )
    started = time.monotonic()
    if found.provisioning_status != "ACTIVE" and settings.compute == "qemu":
        how = "emulated, because KVM does not work here: the boot takes some minutes"
        how = how if config_files.uses_emulation(settings) else "with KVM"
        console = f"{os.path.relpath(settings.machines)}/*/console.log"
        note(f"the amphora is a virtual machine, {how}. Console: {console}")
    found = wait_active(settings, connection, found.id, note)
    report(f"load balancer {NAME} is ACTIVE on {found.vip_address} (waited {time.monotonic() - started:.1f} s)")
    return found


def get(
    settings: Settings, address: str, path: str = "/", port: int = 80, host: str = topology.CLIENT
) -> tuple[int, str]:
    """Send one request from a host's namespace over a new connection; returns status and body."""

    def request() -> tuple[int, str]:
        with closing(http.client.HTTPConnection(address, port, timeout=10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return namespaces.run_inside(namespaces.path(settings.host(host)), request)


def wait_for_response(settings: Settings, address: str, note: Report) -> None:
    """Wait until the load balancer answers.

    An ACTIVE load balancer answers at once unless its virtual machines have just been powered on. Octavia does not know
    of the power-on, and a machine needs time to boot and to get a configuration.
    """
    if settings.compute != "qemu":
        return

    def note_progress(seconds: float) -> None:
        note(f"still waiting: http://{address}/ does not answer, amphora boots ({seconds:.0f} s)")

    for _ in vm_wait.poll(settings.wait_timeout, note_progress):
        with suppress(OSError, http.client.HTTPException):
            if get(settings, address)[0] < http.client.INTERNAL_SERVER_ERROR:
                return


def count_responses(settings: Settings, address: str, number: int) -> Counter[str]:
    """Send requests; returns the number of responses by member. Raises SandboxError without a response."""
    try:
        return Counter(get(settings, address)[1].strip() for _ in range(number))
    except (OSError, http.client.HTTPException) as error:
        raise SandboxError(
            f"reach http://{address}/ from the client",
            f"{type(error).__name__}: {error}",
            "See `amphoractl amphora list`; `openstack loadbalancer failover demo` makes a new amphora.",
        ) from error
