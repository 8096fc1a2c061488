# SPDX-License-Identifier: Apache-2.0
"""The interface of compute backends, which run the machines of amphorae.

Invariant: every call is idempotent and identifies the machine by the amphora id, which the store recorded *before* the
first call. A call that is repeated after a crash finds the existing machine and does not create a second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Protocol

import msgspec

from amphora_driver.model.network import Port
from amphora_driver.secret import Secret


class MachineState(str, Enum):
    """The state of an amphora's machine as the backend reports it."""

    BUILDING = "building"
    RUNNING = "running"
    FAILED = "failed"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora's machine. The management address is None until the backend knows it.

    Attributes:
        image: the image it was booted from; None if the backend does not report it.
    """

    compute_id: str
    state: MachineState
    management_address: str | None = None
    reason: str = ""
    image: str | None = None


class BootRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a new machine.

    Args:
        files: the files for ``/etc/amphora-agent`` by name. The backend replaces the placeholder
            ``{management_address}`` in ``agent.conf`` with the address that it chooses.
        flavor: the compute flavor. A backend ignores this and the following fields if it does not support them.
    """

    amphora_id: str
    load_balancer_id: str
    files: Mapping[str, Secret]
    flavor: str | None = None
    zone: str | None = None
    image_tag: str | None = None
    volume_zone: str | None = None
    management_network: str | None = None


class Compute(Protocol):
    """A compute backend.

    The constructor takes the options and the network backend, and connects to no service.
    Every method raises `ComputeError` if it fails.

    Attributes:
        supports: the flavor and availability zone keys that the backend implements. The driver refuses all others.
        wiring: how a port becomes an interface. The network backend must have the same value.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]

    def boot(self, request: BootRequest) -> Machine:
        """Boot a machine for the amphora, or return the existing one. Does not wait for the agent."""

    def image(self, tag: str | None) -> str | None:
        """The value of `Machine.image` for a machine that boots now from this image tag; None if unknown.

        The controller calls this often: the backend caches results that are slow to compute.
        """

    def machines(self) -> frozenset[str]:
        """The amphora ids of this deployment that `boot` created and `destroy` has not completely removed."""

    def get(self, amphora_id: str) -> Machine | None:
        """The amphora's machine; None if it does not exist."""

    def attach(self, amphora_id: str, port: Port) -> None:
        """Add an interface with the port's MAC address on the port's network to the machine."""

    def detach(self, amphora_id: str, port: Port) -> None:
        """Remove the interface of a port; no error if it does not exist."""

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove everything that `boot` created; no error if nothing exists."""
