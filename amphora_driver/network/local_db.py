# SPDX-License-Identifier: Apache-2.0
"""Queries of the local network backend, for use inside a transaction.

Invariant: no function begins or ends a transaction. A function that allocates addresses requires the lock of the
network row (`lock_network`), so that two processes never choose the same address.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from amphora_driver.database.tables import local_address, local_network, local_port, local_subnet
from amphora_driver.errors import Conflict, UnsupportedOption
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import FixedAddress, Port, VipRequest
from amphora_driver.network import ip_allocation
from amphora_driver.network.ip_allocation import AddressRange, Segment

PORTS = sa.select(local_port, local_network.c.mtu).join(local_network, local_network.c.id == local_port.c.network_id)


def user_owner(port_id: str) -> str:
    """The value of `owner` for a user's port that no load balancer uses."""
    return f"user-{port_id}"


def to_segment(row: Any) -> Segment:
    """Convert a row to a network."""
    return Segment(id=row.id, name=row.name, bridge=row.bridge, mtu=row.mtu)


def to_range(row: Any) -> AddressRange:
    """Convert a row to a subnet."""
    return AddressRange(
        id=row.id,
        network_id=row.network_id,
        name=row.name,
        cidr=row.cidr,
        gateway=row.gateway,
        first=row.first_address,
        last=row.last_address,
    )


def lock_network(connection: sa.Connection, network_id: str, attempt: str) -> Segment:
    """Lock and read a network. Concurrent allocations on this network wait for the end of the transaction."""
    row = connection.execute(sa.select(local_network).where(local_network.c.id == network_id).with_for_update()).first()
    if row is None:
        raise UnsupportedOption(attempt, f"network {network_id} does not exist")
    return to_segment(row)


def subnet_range(connection: sa.Connection, subnet_id: str, attempt: str) -> AddressRange:
    """The subnet with this id."""
    row = connection.execute(sa.select(local_subnet).where(local_subnet.c.id == subnet_id)).first()
    if row is None:
        raise UnsupportedOption(attempt, f"subnet {subnet_id} does not exist")
    return to_range(row)


def subnet_ranges(connection: sa.Connection, network_id: str | None) -> tuple[AddressRange, ...]:
    """All subnets, or those of one network; IPv4 first."""
    query = sa.select(local_subnet).order_by(local_subnet.c.name)
    if network_id is not None:
        query = query.where(local_subnet.c.network_id == network_id)
    return tuple(sorted((to_range(row) for row in connection.execute(query)), key=lambda found: found.version))


def require_same_network(subnet: AddressRange, network_id: str, attempt: str) -> None:
    """Raise `UnsupportedOption` for a subnet of another network."""
    if subnet.network_id != network_id:
        raise UnsupportedOption(attempt, f"{subnet} is not a subnet of network {network_id}")


def choose_subnet(connection: sa.Connection, request: VipRequest, attempt: str) -> AddressRange:
    """The subnet for a requested VIP."""
    if request.subnet_id:
        subnet = subnet_range(connection, request.subnet_id, attempt)
        if request.network_id:
            require_same_network(subnet, request.network_id, attempt)
        return subnet
    if not request.network_id:
        raise UnsupportedOption(attempt, "the request has no subnet, network or port")
    segment = lock_network(connection, request.network_id, attempt)
    subnets = subnet_ranges(connection, request.network_id)
    if request.address:
        address = ip_allocation.parse_address(request.address, attempt)
        subnets = tuple(subnet for subnet in subnets if address in subnet)
    if not subnets:
        suited = f" that contains {request.address}" if request.address else ""
        raise UnsupportedOption(attempt, f"network {segment.name} has no subnet{suited}")
    return subnets[0]


def choose_address(
    connection: sa.Connection, subnet: AddressRange, address: str | None, attempt: str, also_taken: Sequence[str] = ()
) -> FixedAddress:
    """The requested address if it is free; without a request, the lowest free address."""
    if not address:
        return FixedAddress(subnet_id=subnet.id, address=free_address(connection, subnet, attempt, also_taken))
    text = ip_allocation.validate_address(ip_allocation.parse_address(address, attempt), subnet, attempt)
    if text in {*taken_addresses(connection, subnet), *also_taken}:
        raise Conflict(attempt, f"{text} of {subnet} is in use", "Choose another address, or omit the address.")
    return FixedAddress(subnet_id=subnet.id, address=text)


def checked_addresses(
    connection: sa.Connection, network_id: str, wanted: Sequence[FixedAddress], attempt: str
) -> list[FixedAddress]:
    """The requested addresses after validation. An empty address is replaced by a free one."""
    fixed: list[FixedAddress] = []
    for one in wanted:
        subnet = subnet_range(connection, one.subnet_id, attempt)
        require_same_network(subnet, network_id, attempt)
        fixed.append(choose_address(connection, subnet, one.address, attempt, [have.address for have in fixed]))
    return fixed


def taken_addresses(connection: sa.Connection, subnet: AddressRange) -> set[str]:
    """The addresses in use on a subnet."""
    query = sa.select(local_address.c.address).where(local_address.c.subnet_id == subnet.id)
    return set(connection.execute(query).scalars())


def free_address(connection: sa.Connection, subnet: AddressRange, attempt: str, also_taken: Sequence[str] = ()) -> str:
    """The lowest free address of a subnet."""
    return ip_allocation.find_free_address(subnet, {*taken_addresses(connection, subnet), *also_taken}, attempt)


def port_row(connection: sa.Connection, *conditions: Any) -> Any:
    """The row of the port that meets the conditions; None if there is none."""
    return connection.execute(PORTS.where(*conditions)).first()


def read_port(connection: sa.Connection, row: Any) -> Port:
    """Convert a row and its addresses to a port."""
    query = (
        sa.select(local_address.c.subnet_id, local_address.c.address)
        .where(local_address.c.port_id == row.id)
        .order_by(local_address.c.ordinal)
    )
    fixed = tuple(FixedAddress(subnet_id=found.subnet_id, address=found.address) for found in connection.execute(query))
    return Port(id=row.id, network_id=row.network_id, mac=row.mac, mtu=row.mtu, addresses=fixed)


def make_port(
    connection: sa.Connection,
    segment: Segment,
    owner: str,
    fixed: Sequence[FixedAddress],
    *,
    port_id: str | None = None,
    ours: bool = True,
) -> Port:
    """Insert a port and its addresses."""
    made = Port(
        id=port_id or str(uuid.uuid4()),
        network_id=segment.id,
        mac=free_mac(connection, segment.id, fixed),
        mtu=segment.mtu,
        addresses=tuple(fixed),
    )
    connection.execute(
        sa.insert(local_port).values(id=made.id, network_id=segment.id, owner=owner, mac=made.mac, ours=ours)
    )
    add_addresses(connection, made.id, fixed, 0)
    return made


def free_mac(connection: sa.Connection, network_id: str, fixed: Sequence[FixedAddress]) -> str:
    """A MAC address that no port has."""
    stands_for = fixed[0].address if fixed else str(uuid.uuid4())
    attempt = 0
    while True:
        mac = ip_allocation.derive_mac(network_id, stands_for, attempt)
        if connection.execute(sa.select(local_port.c.id).where(local_port.c.mac == mac)).first() is None:
            return mac
        attempt += 1


def add_addresses(connection: sa.Connection, port_id: str, fixed: Sequence[FixedAddress], ordinal: int) -> None:
    """Add addresses to a port; `ordinal` is the position of the first one."""
    if fixed:
        rows = [
            {"subnet_id": one.subnet_id, "address": one.address, "port_id": port_id, "ordinal": ordinal + number}
            for number, one in enumerate(fixed)
        ]
        connection.execute(sa.insert(local_address), rows)


def drop_port(connection: sa.Connection, port_id: str) -> None:
    """Delete a port and its addresses."""
    connection.execute(sa.delete(local_address).where(local_address.c.port_id == port_id))
    connection.execute(sa.delete(local_port).where(local_port.c.id == port_id))


def set_owner(connection: sa.Connection, port_id: str, owner: str) -> None:
    """Set the owner of a port."""
    connection.execute(sa.update(local_port).where(local_port.c.id == port_id).values(owner=owner))


def match_vip(
    connection: sa.Connection, port: Port, request: VipRequest, attempt: str, taken: Sequence[str] = ()
) -> Vip:
    """The address of a user's port that matches the request, and that no other VIP has taken."""
    wanted = str(ip_allocation.parse_address(request.address, attempt)) if request.address else None
    found = [
        fixed
        for fixed in port.addresses
        if request.subnet_id in {None, "", fixed.subnet_id}
        and wanted in {None, fixed.address}
        and fixed.address not in taken
    ]
    if not found:
        have = ", ".join(fixed.address for fixed in port.addresses) or "no address"
        asked = wanted or (f"an address on subnet {request.subnet_id}" if request.subnet_id else "an address")
        raise UnsupportedOption(attempt, f"port {port.id} has {have}, not {asked}")
    found.sort(key=lambda fixed: subnet_range(connection, fixed.subnet_id, attempt).version)
    return to_vip(port, found[0])


def to_vip(port: Port, fixed: FixedAddress) -> Vip:
    """Convert one address of a port to a VIP."""
    return Vip(address=fixed.address, subnet_id=fixed.subnet_id, network_id=port.network_id, port_id=port.id)


def to_vips(port: Port) -> tuple[Vip, ...]:
    """Convert all addresses of a port to VIPs."""
    return tuple(to_vip(port, fixed) for fixed in port.addresses)


def upsert(connection: sa.Connection, table: sa.Table, key: str, values: dict[str, Any]) -> None:
    """Update the row with this id, or insert it."""
    if connection.execute(sa.update(table).where(table.c.id == key).values(**values)).rowcount == 0:
        connection.execute(sa.insert(table).values(id=key, **values))
