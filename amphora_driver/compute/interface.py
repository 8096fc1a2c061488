# SPDX-License-Identifier: Apache-2.0
"""The interface of compute backends, which run the machines of amphorae.

Invariant: every call is idempotent and identifies the machine by the amphora id, which the store recorded *before* the
first call. A call that is repeated after a crash finds the existing machine and does not create a second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Where a machine runs. The values are None if the backend does not know them.

    Attributes:
        host: name or hash of the hypervisor; equal for two machines on the same hypervisor.
        zone: the availability zone.
    """

    host: str | None = None
    zone: str | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One amphora's machine. The management address is None until the backend knows it.

    Attributes:
        image: the image it was booted from; None if the backend does not report it.
        location: complete once the machine runs.
    """

    compute_id: str
    state: MachineState
    management_address: str | None = None
    reason: str = ""
    image: str | None = None
    location: Location = Location()


class Placement(str, Enum):
    """How strictly the amphorae of one load balancer are kept on different hypervisors."""

    NONE = "none"
    PREFERRED = "preferred"
    REQUIRED = "required"


class BootPartner(msgspec.Struct, frozen=True, kw_only=True):
    """A running machine of the same load balancer, from which the new machine is kept apart."""

    amphora_id: str
    compute_id: str
    location: Location = Location()


class BootRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a new machine.

    Args:
        files: the files for ``/etc/amphora-agent`` by name. The backend replaces the placeholder
            ``{management_address}`` in ``agent.conf`` with the address that it chooses.
        flavor: the compute flavor. A backend ignores this and the following fields if it does not support them.
        zones: permitted availability zones; empty for the default of the backend. The machine gets a zone that no
            partner uses, if there is one.
        image_tag: the tag of the image; None for the default of the backend.
        management_networks: ids of the management networks; empty for the default of the backend. The agent uses the
            first one.
        partners: the machines of the same load balancer.
        placement: the placement relative to the partners.
        spare: the machine belongs to a pool of warm spares, whose id is in `load_balancer_id`. The placement is then a
            preference only.
    """

    amphora_id: str
    load_balancer_id: str
    files: Mapping[str, Secret]
    flavor: str | None = None
    zones: tuple[str, ...] = ()
    image_tag: str | None = None
    volume_zone: str | None = None
    management_networks: tuple[str, ...] = ()
    partners: tuple[BootPartner, ...] = ()
    placement: Placement = Placement.PREFERRED
    spare: bool = False


class Compute(Protocol):
    """A compute backend.

    The constructor takes the options and the network backend, and connects to no service.
    Every method raises `ComputeError` if it fails.

    Attributes:
        supports: the flavor and availability zone keys that the backend implements. The driver refuses all others.
        wiring: how a port becomes an interface. The network backend must have the same value.
        plugs_while_booting: whether `attach` accepts a machine whose operating system has not started yet.
        listing_interval: seconds between two calls of `machines`, which can be expensive.
        default_zones: the permitted availability zones of a machine whose request names none; empty without zones.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]
    plugs_while_booting: ClassVar[bool]
    listing_interval: float
    default_zones: tuple[str, ...]

    def validate_profile(self, metadata: Mapping[str, object]) -> None:
        """Check that flavor, image, zones and networks that the metadata names exist.

        The driver calls this for the metadata of a new flavor or availability zone, within a request of an operator.

        Raises:
            UnsupportedOption: a named object does not exist; the message names the key and the object.
        """

    def can_separate(self, partners: Sequence[BootPartner], zones: Sequence[str]) -> bool:
        """Whether the backend can keep a machine that boots now on another hypervisor than these partners.

        The answer can be False until the backend has built the partners. `zones` as in `BootRequest`.
        """

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

    def locations(self) -> Mapping[str, Location]:
        """The current locations of all machines of this deployment by amphora id, for an evacuation.

        A machine may have moved since its boot.
        """

    def host_names(self, name: str) -> frozenset[str]:
        """The values of `Location.host` that mean the hypervisor with this name."""

    def release_load_balancer(self, load_balancer_id: str) -> None:
        """Remove the objects that all machines of a load balancer share, after its last machine."""

    def attach(self, amphora_id: str, port: Port) -> None:
        """Add an interface with the port's MAC address on the port's network to the machine."""

    def detach(self, amphora_id: str, port: Port) -> None:
        """Remove the interface of a port; no error if it does not exist."""

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove everything that `boot` created; no error if nothing exists."""
