# SPDX-License-Identifier: Apache-2.0
"""VIPs and ports: what every network backend does.

Invariant: ports are found again by the thing they belong to (`owner`) and their network, so that repeating a call
after a crash never makes a second port. `release_*` and `delete_*` touch only what this provider made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import Port, Subnet, VipOptions, VipRequest


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses are not known yet: ask again.

    Attributes:
        reason: what is waited for, for an operator to read.
        again_in: seconds after which to ask; None where the backend cannot say, then the pauses grow.
    """

    reason: str
    again_in: float | None = None


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """Who this deployment has made something for.

    Attributes:
        amphorae: amphora ids that have ports.
        load_balancers: load balancer ids that have VIPs.
    """

    amphorae: frozenset[str]
    load_balancers: frozenset[str]


class Network(Protocol):
    """A backend, made with the options and the database; that talks to nobody yet.

    Methods raise `NetworkError`; what a user got wrong raises `Conflict` or `UnsupportedOption`.

    Attributes:
        supports: the keys of flavors and availability zones it can fulfil, and `vip_qos_policy_id` and `vip_sg_ids`
            where `apply_vip_options` knows them; all others are refused by name.
        wiring: how a port becomes an interface; see `Compute.wiring`.
    """

    supports: ClassVar[frozenset[str]]
    wiring: ClassVar[str]

    def allocate_vip(
        self, load_balancer_id: str, project_id: str, wanted: Sequence[VipRequest], machines: Sequence[str] = ()
    ) -> tuple[Vip, ...] | NotYet:
        """Take the addresses wanted, the primary VIP first, all on one port. Again with the same id: the same VIPs.

        The first time it is asked in a user's request, which waits for the answer: what takes longer than that is
        `NotYet`, and the controller asks on.

        Args:
            load_balancer_id: whose they are.
            project_id: who pays for them.
            wanted: one for each VIP; the answer has the same order.
            machines: what the compute backend calls the amphorae's machines (`Machine.compute_id`), as far as they
                are booted: an address may depend on where they are.

        Raises:
            Conflict: an address or port is in use, or none is left.
            UnsupportedOption: an address lies outside its subnet, a subnet or network does not exist.
        """

    def release_vip(self, load_balancer_id: str) -> None:
        """Give back what `allocate_vip` took for this load balancer, or was asked to take.

        A port the user brought stays. No error if there is nothing.
        """

    def apply_vip_options(self, load_balancer_id: str, options: VipOptions, port_ids: Sequence[str]) -> None:
        """Have the VIPs obey exactly these options from now on. Again with the same: nothing changes.

        Asked only where there are options or were some before, and again when an amphora has come.

        Args:
            load_balancer_id: whose VIPs.
            options: all of them; what is not in them is taken away.
            port_ids: the amphorae's ports on the VIPs' network, which carry what is sent to the VIPs and from them.

        Raises:
            UnsupportedOption: there is no such policy or group, or the backend knows nothing of the kind.
        """

    def ensure_port(self, owner: str, network_id: str, subnet_ids: Sequence[str]) -> Port:
        """The port of this owner (an amphora id) on this network with an address on each subnet; made if missing."""

    def ports(self, owner: str) -> tuple[Port, ...]:
        """Every port of this owner."""

    def delete_port(self, port_id: str) -> None:
        """Remove a port; no error if it is not there."""

    def owners(self) -> Owners:
        """Everybody for whom `ensure_port` or `allocate_vip` has made something that is still there.

        What somebody else made is not among it, and what cannot be told from that neither.
        """

    def subnet(self, subnet_id: str) -> Subnet:
        """What is known of a subnet.

        Raises:
            UnsupportedOption: it does not exist.
        """
