# SPDX-License-Identifier: Apache-2.0
"""The interface of network backends, which provide VIPs and ports.

Invariant: a port is identified by its owner, its network and its type, so that a call that is repeated after a crash
never creates a second port. `release_*` and `delete_*` remove only objects that this provider created.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import ClassVar, Protocol

import msgspec

from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import Port, Subnet, VipOptions, VipRequest


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """The backend has not allocated the addresses yet; the caller must retry.

    Attributes:
        reason: the cause of the delay, for the operator.
        again_in: seconds until the retry; None for an exponential back-off.
    """

    reason: str
    again_in: float | None = None


class PortPurpose(str, Enum):
    """The use of an amphora's port."""

    MANAGEMENT = "management"
    VIP = "vip"
    MEMBER = "member"


class PortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for one port of an amphora.

    Attributes:
        amphora_id: the owner of the port.
        network_id: the network; an amphora has at most one port of each vnic type on a network, and with the backend
            `neutron` its management port beside them.
        subnet_ids: the port gets one address on each of these subnets. Empty: the backend `neutron` lets Neutron
            choose an address of each family.
        purpose: a port for VIPs can also reach members on the same network.
        load_balancer_id: None for a warm spare.
        project_id: the project of the load balancer; empty for a warm spare.
        vips: addresses that the port must be allowed to use in addition to its own.
        vnic_type: Neutron's `binding:vnic_type`: `normal` or `direct`. It is a part of the identity of the port.
        options: options of the VIPs, for a port with the purpose `vip`.
    """

    amphora_id: str
    network_id: str
    subnet_ids: tuple[str, ...]
    purpose: PortPurpose
    load_balancer_id: str | None = None
    project_id: str = ""
    vips: tuple[str, ...] = ()
    vnic_type: str = "normal"
    options: VipOptions = VipOptions()


def management_port(amphora_id: str, network_id: str, subnet_ids: Iterable[str]) -> PortRequest:
    """The request for the port of an amphora's agent, with an address on each subnet of the network."""
    return PortRequest(
        amphora_id=amphora_id, network_id=network_id, subnet_ids=tuple(subnet_ids), purpose=PortPurpose.MANAGEMENT
    )


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """The owners of objects that this deployment created.

    Attributes:
        amphorae: amphora ids that have ports.
        load_balancers: load balancer ids that have VIPs.
    """

    amphorae: frozenset[str]
    load_balancers: frozenset[str]


class Network(Protocol):
    """A network backend. Its constructor takes the options and the database, and connects to no service.

    Methods raise `NetworkError`. A mistake in the user's request raises `Conflict` or `UnsupportedOption`.

    Attributes:
        supports: the flavor and availability zone keys that the backend implements, with `vip_qos_policy_id` and
            `vip_sg_ids` if `apply_vip_options` supports them. The driver refuses all others.
        wiring: how a port becomes an interface; see `Compute.wiring`.
        listener_rules: whether `VipOptions.listener_rules` must contain the listeners' ports. Without it, the firewall
            of the amphora is the only one that knows the listeners.
        listing_interval: seconds between two calls of `owners`, which can be expensive.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]
    listener_rules: bool
    listing_interval: float

    def allocate_vip(
        self, load_balancer_id: str, project_id: str, wanted: Sequence[VipRequest], machines: Sequence[str] = ()
    ) -> tuple[Vip, ...] | NotYet:
        """Allocate the requested VIPs on one port. A repeated call with the same id returns the same VIPs.

        The first call runs inside a user's request and must not block it. A slow backend returns `NotYet`; the
        controller then repeats the call.

        Args:
            load_balancer_id: the owner of the VIPs.
            project_id: the project of the load balancer.
            wanted: one request for each VIP, the primary VIP first; the result has the same order.
            machines: the ids of the booted machines in the compute backend (`Machine.compute_id`). An address may
                depend on their location.

        Raises:
            Conflict: an address or port is in use, or no address is free.
            UnsupportedOption: an address is outside its subnet, or a subnet or network does not exist.
        """

    def release_load_balancer(self, load_balancer_id: str) -> None:
        """Release the VIPs and all other objects of a load balancer, and cancel a pending allocation.

        A port of the user stays. No error if nothing exists. The ports of the amphorae no longer exist.
        """

    def apply_vip_options(
        self, load_balancer_id: str, project_id: str, options: VipOptions, port_ids: Sequence[str]
    ) -> None:
        """Apply exactly these options to the VIPs. The call is idempotent.

        The controller calls this only if options exist or existed before, and again for each new amphora.

        Args:
            load_balancer_id: the owner of the VIPs.
            project_id: the project of the load balancer.
            options: all options; the backend removes any other option.
            port_ids: the ports of the amphorae on the VIP network. They carry the traffic of the VIPs.

        Raises:
            UnsupportedOption: a policy or group does not exist, or the backend does not support it.
        """

    def direct_answers_allowed(self, port_ids: Sequence[str]) -> bool:
        """Whether these ports pass the answers of a former VIP holder that leave it directly.

        In a planned hand-over the new holder redirects packets of open connections to the former holder through a
        tunnel. A stateful security group at the port of the former holder sees the answers only, and drops them.

        Args:
            port_ids: the ports of both amphorae on the VIP network.
        """

    def ensure_port(self, request: PortRequest) -> Port:
        """The port of this type of this amphora on this network; created if missing, completed if incomplete.

        Raises:
            UnsupportedOption: a subnet, policy or group does not exist.
            Conflict: no address is free.
        """

    def ports(self, amphora_id: str) -> tuple[Port, ...]:
        """All ports of this amphora."""

    def delete_port(self, port_id: str) -> None:
        """Delete a port; no error if it does not exist."""

    def owners(self) -> Owners:
        """The owners of all objects that `ensure_port` or `allocate_vip` created and that still exist.

        The result excludes objects of other programs, and objects whose creator is unknown.
        """

    def subnet(self, subnet_id: str, project_id: str | None = None) -> Subnet:
        """The subnet with this id.

        Args:
            subnet_id: the subnet.
            project_id: the project that refers to the subnet; None for a reference of the operator.

        Raises:
            UnsupportedOption: the subnet does not exist, or this project must not use it.
        """
