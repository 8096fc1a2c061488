# SPDX-License-Identifier: Apache-2.0
"""Boots of amphorae by the backend `nova`, and what they leave in the cloud."""

import time
import uuid

from amphora_driver.compute.interface import BootPartner, BootRequest, MachineState
from amphora_driver.secret import Secret

SECONDS = 120.0


def new_id():
    return str(uuid.uuid4())


def until(question, what):
    """Poll until the result is true; return it."""
    deadline = time.monotonic() + SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not in {SECONDS:.0f} s: {what}"
        time.sleep(0.2)
    return answer


def request(**values):
    conf = b"[agent]\nbind_address = {management_address}\n"
    files = {"agent.conf": Secret(conf), "server.pem": Secret(b"the private key\n")}
    return BootRequest(**{"amphora_id": new_id(), "load_balancer_id": new_id(), "files": files, **values})


def settled(nova, amphora_id):
    """The machine when Nova has finished its boot."""
    return until(
        lambda: one if (one := nova.get(amphora_id)).state is not MachineState.BUILDING else None,
        f"amphora {amphora_id} is built",
    )


def running(nova, wanted):
    nova.boot(wanted)
    found = settled(nova, wanted.amphora_id)
    assert found.state is MachineState.RUNNING, found.reason
    return found


def partner(wanted, machine):
    return BootPartner(amphora_id=wanted.amphora_id, compute_id=machine.compute_id, location=machine.location)


def tagged(nova_admin, deployment):
    return list(nova_admin.compute.servers(tags=f"amphora-deployment:{deployment}"))


def ports_of(nova_admin, amphora_id):
    return list(nova_admin.network.ports(name=f"amphora-management-{amphora_id}"))


class Requests:
    """Records the requests of a backend to Nova."""

    def __init__(self, nova):
        self.made = []
        self._service = nova._nova._service
        self._send = self._service.request
        self._service.request = self._record

    def _record(self, method, path, **more):
        self.made.append(f"{method} {path.split('/')[1]}")
        return self._send(method, path, **more)
