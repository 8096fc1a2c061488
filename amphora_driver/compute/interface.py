# SPDX-License-Identifier: Apache-2.0
"""Where amphorae run: what every compute backend does.

Invariant: every call is idempotent and addressed by the amphora's id, which the store wrote down *before* the
first call. Repeating a call after a crash finds what is there instead of making a second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Protocol

import msgspec

from amphora_driver.model.network import Port
from amphora_driver.secret import Secret


class MachineState(str, Enum):
    """What the backend says of an amphora's machine."""

    BUILDING = "building"
    RUNNING = "running"
    FAILED = "failed"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora's machine. The management address is None until the backend knows it.

    Attributes:
        image: what it was booted from; None where the backend does not say.
    """

    compute_id: str
    state: MachineState
    management_address: str | None = None
    reason: str = ""
    image: str | None = None


class BootRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to boot an amphora.

    Args:
        files: what lies in ``/etc/amphora-agent`` when the agent starts, by file name. The placeholder
            ``{management_address}`` in ``agent.conf`` is for the backend to fill in when it decides the address.
        flavor: the compute flavor, where the backend knows flavors; the like for what follows.
        zone: the compute availability zone.
        image_tag: the tag of the image it is booted from.
        volume_zone: the availability zone of its volume.
        management_network: the network its agent is reached on.
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
    """A backend, made with the options and the network backend it takes ports from; that talks to nobody yet.

    Every method raises `ComputeError` when it cannot do its work.

    Attributes:
        supports: the keys of flavors and availability zones it can fulfil; all others are refused by name.
        wiring: how a port becomes an interface. It works with network backends that name the same, and no other.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]

    def boot(self, request: BootRequest) -> Machine:
        """Boot the amphora, or find the one already booted under this id. Need not wait for the agent."""

    def image(self, tag: str | None) -> str | None:
        """What a machine with this image tag that is booted now would have as `Machine.image`; None if nobody can say.

        Asked often: what takes time is kept by the backend for a while.
        """

    def machines(self) -> frozenset[str]:
        """The amphora ids of all that `boot` ever made of this deployment's and `destroy` has not quite removed."""

    def get(self, amphora_id: str) -> Machine | None:
        """The amphora's machine, or None if there is none."""

    def attach(self, amphora_id: str, port: Port) -> None:
        """Give the machine an interface with the port's MAC address, joined to the port's network."""

    def detach(self, amphora_id: str, port: Port) -> None:
        """Take that interface away again; no error if it is not there."""

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove all that `boot` made; no error if nothing is there."""
