# SPDX-License-Identifier: Apache-2.0
"""The local network backend: networks, subnets and ports of one machine are database rows.

Invariant: an address belongs to one port; the primary key of `local_address` guarantees this. Every method is one
transaction: after a crash, a port has all its addresses or does not exist. The methods do not change the kernel, so
that octavia-api can use this class. The exception is `port_security`, which only the controller uses; `bridges` changes
the kernel where amphorae run.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import sqlalchemy as sa

from amphora_driver.database.tables import local_address, local_network, local_port, local_subnet
from amphora_driver.errors import Conflict, NetworkError, UnsupportedOption
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet, VipOptions, VipRequest
from amphora_driver.network import ip_allocation, local_db
from amphora_driver.network.interface import NotYet, Owners, PortRequest
from amphora_driver.network.ip_allocation import AddressRange, Segment
from amphora_driver.network.port_security import PortSecurity

if TYPE_CHECKING:
    from oslo_config import cfg

    from amphora_driver.database.engine import Database


_VIP_OWNER = "lb-"
_AMPHORA = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def vip_owner(load_balancer_id: str) -> str:
    """The value of `owner` for the VIP port of a load balancer."""
    return f"{_VIP_OWNER}{load_balancer_id}"


class LocalNetwork:
    """The networks of one machine.

    Args:
        conf: the options of the driver; VIPs and members on `[amp_compute_netns] management_network` are refused.
        database: the driver's database.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"vip_qos_policy_id", "vip_sg_ids", "client_address"})
    wiring: ClassVar[str] = "bridge"
    # A bridge passes all traffic, so listeners need no rules. A call of `owners` takes only a millisecond, so two calls
    # need no minimum interval.
    listener_rules = False
    listing_interval = 0.0

    def __init__(self, conf: cfg.ConfigOpts, database: Database) -> None:
        self._database = database
        self._management: str = conf.amp_compute_netns.management_network
        self.port_security = PortSecurity(database, conf.amp_network_local.switch)

    def allocate_vip(
        self,
        load_balancer_id: str,
        project_id: str,  # noqa: ARG002 - one machine has no projects
        wanted: Sequence[VipRequest],
        machines: Sequence[str] = (),  # noqa: ARG002 - every address suits every machine
    ) -> tuple[Vip, ...] | NotYet:
        attempt = f"allocate a VIP for load balancer {load_balancer_id}"

        def work(connection: sa.Connection) -> tuple[Vip, ...]:
            row = local_db.port_row(connection, local_port.c.owner == vip_owner(load_balancer_id))
            if row is not None and row.ours:
                return local_db.to_vips(local_db.read_port(connection, row))
            if row is not None or any(request.port_id for request in wanted):
                return self._use_own_port(connection, load_balancer_id, wanted, attempt)
            return self._allocate(connection, load_balancer_id, wanted, attempt)

        return self._database.write(work)

    def release_load_balancer(self, load_balancer_id: str) -> None:

        def work(connection: sa.Connection) -> None:
            row = local_db.port_row(connection, local_port.c.owner == vip_owner(load_balancer_id))
            if row is None:
                return
            if row.ours:
                local_db.drop_port(connection, row.id)
            else:
                local_db.set_owner(connection, row.id, local_db.user_owner(row.id))

        # The packet rules are removed before the addresses are released. Otherwise, the next owner of an address would
        # inherit the rules.
        self.port_security.remove_options(load_balancer_id)
        self._database.write(work)

    def apply_vip_options(
        self,
        load_balancer_id: str,
        project_id: str,  # noqa: ARG002 - one machine has no projects
        options: VipOptions,
        port_ids: Sequence[str],
    ) -> None:
        self.port_security.apply_options(load_balancer_id, options, port_ids)

    def direct_answers_allowed(self, port_ids: Sequence[str]) -> bool:  # noqa: ARG002 - bridges track no connections
        return True

    def ensure_port(self, request: PortRequest) -> Port:
        owner, network_id, subnet_ids = request.amphora_id, request.network_id, request.subnet_ids
        attempt = f"create a port for {owner} on network {network_id}"

        def find(connection: sa.Connection) -> Port | None:
            row = local_db.port_row(connection, local_port.c.owner == owner, local_port.c.network_id == network_id)
            return None if row is None else local_db.read_port(connection, row)

        def work(connection: sa.Connection) -> Port:
            segment = local_db.lock_network(connection, network_id, attempt)
            port = find(connection)
            have = set() if port is None else {fixed.subnet_id for fixed in port.addresses}
            missing = [
                local_db.subnet_range(connection, subnet_id, attempt)
                for subnet_id in subnet_ids
                if subnet_id not in have
            ]
            for subnet in missing:
                local_db.require_same_network(subnet, network_id, attempt)
            fixed = [
                FixedAddress(subnet_id=s.id, address=local_db.free_address(connection, s, attempt)) for s in missing
            ]
            if port is None:
                return local_db.make_port(connection, segment, owner, fixed)
            local_db.add_addresses(connection, port.id, fixed, len(have))
            return find(connection) or port

        # The port usually exists, so a read without a write lock comes first.
        port = self._database.read(find)
        if port is not None and set(subnet_ids) <= {fixed.subnet_id for fixed in port.addresses}:
            return port
        return self._database.write(work)

    def ports(self, amphora_id: str) -> tuple[Port, ...]:
        return self._ports(local_port.c.owner == amphora_id)

    def delete_port(self, port_id: str) -> None:

        def work(connection: sa.Connection) -> None:
            if local_db.port_row(connection, local_port.c.id == port_id, local_port.c.ours.is_(True)) is not None:
                local_db.drop_port(connection, port_id)

        self._database.write(work)

    def owners(self) -> Owners:
        query = sa.select(local_port.c.owner, local_port.c.ours).distinct()
        found = self._database.read(lambda c: c.execute(query).all())
        # `amphorae` contains only owners in the form of an amphora id, because hosts of the sandbox also own ports.
        # `load_balancers` includes the ports of users, which the driver releases and never deletes.
        return Owners(
            amphorae=frozenset(row.owner for row in found if row.ours and _AMPHORA.fullmatch(row.owner)),
            load_balancers=frozenset(
                row.owner.removeprefix(_VIP_OWNER) for row in found if row.owner.startswith(_VIP_OWNER)
            ),
        )

    def subnet(self, subnet_id: str, project_id: str | None = None) -> Subnet:
        attempt = f"look up subnet {subnet_id}"
        found = self._database.read(lambda c: local_db.subnet_range(c, subnet_id, attempt))
        if project_id is not None:
            self._refuse_management({found.network_id}, attempt)
        return Subnet(id=found.id, network_id=found.network_id, cidr=found.cidr, gateway=found.gateway)

    def define_network(self, network_id: str, name: str, bridge: str, mtu: int = 1500) -> Segment:
        """Create or update a network."""
        values = {"name": name, "bridge": bridge, "mtu": mtu}
        self._database.write(lambda c: local_db.upsert(c, local_network, network_id, values))
        return Segment(id=network_id, name=name, bridge=bridge, mtu=mtu)

    def define_subnet(self, subnet: AddressRange) -> None:
        """Create or update a subnet.

        Raises:
            NetworkError: the allocation pool or the gateway is outside the subnet.
        """
        wanted = f"define {subnet}"
        for text in (subnet.first, subnet.last, *([subnet.gateway] if subnet.gateway else [])):
            if ip_allocation.parse_address(text, wanted) not in subnet:
                raise NetworkError(wanted, f"the address {text} is outside the subnet")
        values = {
            "network_id": subnet.network_id,
            "name": subnet.name,
            "cidr": subnet.cidr,
            "gateway": subnet.gateway,
            "first_address": subnet.first,
            "last_address": subnet.last,
        }

        def work(connection: sa.Connection) -> None:
            local_db.lock_network(connection, subnet.network_id, wanted)
            local_db.upsert(connection, local_subnet, subnet.id, values)

        self._database.write(work)

    def networks(self) -> tuple[Segment, ...]:
        """All networks."""
        query = sa.select(local_network).order_by(local_network.c.name)
        return self._database.read(lambda c: tuple(local_db.to_segment(row) for row in c.execute(query)))

    def subnets(self, network_id: str | None = None) -> tuple[AddressRange, ...]:
        """All subnets, or those of one network; IPv4 first."""
        return self._database.read(lambda c: local_db.subnet_ranges(c, network_id))

    def all_ports(self) -> tuple[Port, ...]:
        """All ports of all owners."""
        return self._ports(sa.true())

    def port(self, port_id: str) -> Port | None:
        """The port with this id; None if it does not exist."""
        return next(iter(self._ports(local_port.c.id == port_id)), None)

    def owner(self, port_id: str) -> str | None:
        """The owner of a port; None if the port does not exist."""
        query = sa.select(local_port.c.owner).where(local_port.c.id == port_id)
        return self._database.read(lambda c: c.execute(query).scalar())

    def taken(self, subnet_id: str) -> int:
        """The number of addresses of a subnet that are in use."""
        query = sa.select(sa.func.count()).where(local_address.c.subnet_id == subnet_id)
        return int(self._database.read(lambda c: c.execute(query).scalar_one()))

    def fixed_port(self, owner: str, network_id: str, wanted: Sequence[FixedAddress]) -> Port:
        """The port of this owner on this network; created with exactly these addresses if missing."""
        attempt = f"create a port for {owner} on network {network_id}"

        def work(connection: sa.Connection) -> Port:
            row = local_db.port_row(connection, local_port.c.owner == owner, local_port.c.network_id == network_id)
            if row is not None:
                return local_db.read_port(connection, row)
            segment = local_db.lock_network(connection, network_id, attempt)
            return local_db.make_port(
                connection, segment, owner, local_db.checked_addresses(connection, network_id, wanted, attempt)
            )

        return self._database.write(work)

    def create_port(self, network_id: str, wanted: Sequence[FixedAddress] = ()) -> Port:
        """Create a user's port, for use as a VIP port. Without addresses, it gets one on each subnet."""
        attempt = f"create a port on network {network_id}"
        port_id = str(uuid.uuid4())

        def work(connection: sa.Connection) -> Port:
            segment = local_db.lock_network(connection, network_id, attempt)
            fixed = local_db.checked_addresses(connection, network_id, wanted, attempt) or [
                FixedAddress(subnet_id=s.id, address=local_db.free_address(connection, s, attempt))
                for s in local_db.subnet_ranges(connection, network_id)
            ]
            return local_db.make_port(
                connection, segment, local_db.user_owner(port_id), fixed, port_id=port_id, ours=False
            )

        return self._database.write(work)

    def remove_user_port(self, port_id: str) -> None:
        """Delete a user's port; no error if it does not exist.

        Raises:
            Conflict: a load balancer uses it.
        """

        def work(connection: sa.Connection) -> None:
            row = local_db.port_row(connection, local_port.c.id == port_id)
            if row is None:
                return
            if row.owner != local_db.user_owner(port_id):
                raise Conflict(f"delete port {port_id}", f"the port is in use by {row.owner}")
            local_db.drop_port(connection, port_id)

        self._database.write(work)

    def _ports(self, condition: Any) -> tuple[Port, ...]:
        query = local_db.PORTS.where(condition).order_by(local_port.c.network_id, local_port.c.id)
        return self._database.read(lambda c: tuple(local_db.read_port(c, row) for row in c.execute(query).all()))

    def _allocate(
        self, connection: sa.Connection, load_balancer_id: str, wanted: Sequence[VipRequest], attempt: str
    ) -> tuple[Vip, ...]:
        subnets = [local_db.choose_subnet(connection, request, attempt) for request in wanted]
        networks = {subnet.network_id for subnet in subnets}
        if len(networks) != 1:
            names = ", ".join(str(subnet) for subnet in subnets) or "none"
            raise UnsupportedOption(attempt, f"its VIPs must be on one network, and these subnets are not: {names}")
        self._refuse_management(networks, attempt)
        segment = local_db.lock_network(connection, networks.pop(), attempt)
        fixed: list[FixedAddress] = []
        for request, subnet in zip(wanted, subnets, strict=True):
            mine = [have.address for have in fixed]
            try:
                fixed.append(local_db.choose_address(connection, subnet, request.address, attempt, mine))
            except NetworkError as error:
                # Only the user can solve this error, with another address. So the driver raises a `Conflict`, which
                # Octavia shows to the user.
                raise Conflict(error.wanted, error.happened, error.remedy) from error
        return local_db.to_vips(local_db.make_port(connection, segment, vip_owner(load_balancer_id), fixed))

    def _use_own_port(
        self, connection: sa.Connection, load_balancer_id: str, wanted: Sequence[VipRequest], attempt: str
    ) -> tuple[Vip, ...]:
        """Use the port of a user without changes to its addresses."""
        port_ids = {request.port_id for request in wanted if request.port_id}
        if len(port_ids) > 1:
            raise UnsupportedOption(attempt, f"its VIPs must be on one port, not on {len(port_ids)}")
        row = local_db.port_row(connection, local_port.c.id == next(iter(port_ids), None))
        if row is None:
            raise UnsupportedOption(attempt, f"port {next(iter(port_ids), None)} does not exist")
        owner = vip_owner(load_balancer_id)
        if row.ours or row.owner not in {owner, local_db.user_owner(row.id)}:
            raise Conflict(attempt, f"port {row.id} is in use by {row.owner}")
        self._refuse_management({row.network_id}, attempt)
        port = local_db.read_port(connection, row)
        vips: dict[int, Vip] = {}
        # The most specific requests get their addresses first. Otherwise, a request without an address could get an
        # address that another request names.
        for number in sorted(range(len(wanted)), key=lambda one: (not wanted[one].address, not wanted[one].subnet_id)):
            taken = [vip.address for vip in vips.values()]
            vips[number] = local_db.match_vip(connection, port, wanted[number], attempt, taken)
        local_db.set_owner(connection, row.id, owner)
        return tuple(vips[number] for number in range(len(wanted)))

    def _refuse_management(self, networks: set[str], attempt: str) -> None:
        if self._management in networks:
            raise UnsupportedOption(
                attempt,
                "the management network is for the amphorae's agents only",
                "Choose a subnet of another network.",
            )
