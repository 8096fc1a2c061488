# SPDX-License-Identifier: Apache-2.0
"""The load balancers of a simulated fleet: sizes, topologies, ids and addresses, all computed from a number.

Equal numbers give equal fleets, so runs with different databases and revisions compare the same rows.
"""

from __future__ import annotations

import ipaddress
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from amphora_driver.model.enums import (
    Algorithm,
    ClientAuthentication,
    ListenerProtocol,
    MonitorType,
    PoolProtocol,
    Topology,
)
from amphora_driver.model.loadbalancer import HealthMonitor, Listener, LoadBalancer, Member, Pool, Profile, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.topology import ActiveStandbyTopology, SingleTopology

PROJECTS = 100
VIP_NETWORK, VIP_SUBNET = str(uuid.UUID(int=0xA1 << 100)), str(uuid.UUID(int=0xA2 << 100))
MEMBER_NETWORK, MEMBER_SUBNET = str(uuid.UUID(int=0xB1 << 100)), str(uuid.UUID(int=0xB2 << 100))
SUBNETS = {
    VIP_SUBNET: Subnet(id=VIP_SUBNET, network_id=VIP_NETWORK, cidr="10.0.0.0/9", gateway="10.0.0.1"),
    MEMBER_SUBNET: Subnet(id=MEMBER_SUBNET, network_id=MEMBER_NETWORK, cidr="10.128.0.0/9", gateway="10.128.0.1"),
}
# One of these load balancers in a hundred is large, nineteen are medium, and ten are SINGLE.
_PERIOD, _LARGE, _MEDIUM, _SINGLE = 100, 1, 20, 10
# The amphorae have loopback addresses from here on; 127.0.0.1 and its neighbours stay free for other programs.
_FIRST_AMPHORA = int(ipaddress.IPv4Address("127.16.0.0"))
_FIRST_VIP, _FIRST_PORT = (int(ipaddress.IPv4Address(one)) for one in ("10.1.0.0", "10.64.0.0"))
_PORTS = 1 << 22


@dataclass(frozen=True)
class Size:
    """The number of objects in a load balancer: listeners with a pool each, and members of each pool."""

    name: str
    pools: int
    members: int


SMALL, MEDIUM, LARGE = Size("small", 1, 2), Size("medium", 2, 10), Size("large", 5, 20)


def size_of(number: int) -> Size:
    place = number % _PERIOD
    return LARGE if place < _LARGE else MEDIUM if place < _MEDIUM else SMALL


def topology_of(number: int) -> Topology:
    return Topology.SINGLE if number % _PERIOD >= _PERIOD - _SINGLE else Topology.ACTIVE_STANDBY


def identifier(kind: str, *numbers: int) -> str:
    """The id of an object. The first group of digits is spread evenly, as in random ids."""
    return str(uuid.uuid5(uuid.UUID(int=0xF1EE7), f"{kind}:{':'.join(map(str, numbers))}"))


def amphora_address(number: int) -> str:
    return str(ipaddress.IPv4Address(_FIRST_AMPHORA + 1 + number))


def port_of(amphora_id: str) -> Port:
    """The port of an amphora on the network of the VIPs. Every process computes the same port from the id."""
    place = zlib.crc32(amphora_id.encode()) % _PORTS
    return Port(
        id=identifier("vip-port", place),
        network_id=VIP_NETWORK,
        mac=":".join(f"{byte:02x}" for byte in (0x02, 0xF1, *place.to_bytes(4, "big"))),
        mtu=1500,
        addresses=(FixedAddress(subnet_id=VIP_SUBNET, address=str(ipaddress.IPv4Address(_FIRST_PORT + place))),),
    )


def load_balancer(number: int, members: int | None = None, size: Size | None = None) -> LoadBalancer:
    """The load balancer with this number. `members` replaces the number of members of the first pool."""
    size, own = size or size_of(number), identifier("lb", number)
    pools = tuple(
        _pool(number, place, members if members is not None and not place else size.members)
        for place in range(size.pools)
    )
    return LoadBalancer(
        id=own,
        project_id=f"{number % PROJECTS:032x}",
        name=f"fleet-{number}",
        vip=Vip(
            address=str(ipaddress.IPv4Address(_FIRST_VIP + number)),
            subnet_id=VIP_SUBNET,
            network_id=VIP_NETWORK,
            port_id=identifier("port", number),
        ),
        profile=Profile(topology=topology_of(number), compute="fleet", network="fleet"),
        listeners=tuple(
            Listener(
                id=identifier("listener", number, place),
                loadbalancer_id=own,
                protocol=ListenerProtocol.HTTP,
                protocol_port=80 + place,
                name=f"listener-{place}",
                default_pool_id=pool.id,
                client_authentication=ClientAuthentication.NONE,
            )
            for place, pool in enumerate(pools)
        ),
        pools=pools,
    )


def _pool(number: int, place: int, members: int) -> Pool:
    own = identifier("pool", number, place)
    return Pool(
        id=own,
        loadbalancer_id=identifier("lb", number),
        protocol=PoolProtocol.HTTP,
        lb_algorithm=Algorithm.ROUND_ROBIN,
        name=f"pool-{place}",
        members=tuple(member(number, place, index) for index in range(members)),
        healthmonitor=HealthMonitor(
            id=identifier("monitor", number, place),
            pool_id=own,
            type=MonitorType.HTTP,
            delay=5,
            timeout=3,
            max_retries=3,
            http_method="GET",
            url_path="/",
            expected_codes="200",
        ),
    )


def member(number: int, pool: int, index: int) -> Member:
    return Member(
        id=identifier("member", number, pool, index),
        pool_id=identifier("pool", number, pool),
        address=str(ipaddress.IPv4Address(f"10.128.{index >> 8 & 255}.{index & 255}") + (1 << 16) * (1 + pool)),
        protocol_port=8080,
        name=f"member-{index}",
    )


def amphora_roles(number: int) -> tuple[str, ...]:
    topology = SingleTopology if topology_of(number) is Topology.SINGLE else ActiveStandbyTopology
    return topology.roles


def amphorae(load_balancers: int) -> Iterator[tuple[int, int, str, str]]:
    """Yield number, load balancer, id and role of each amphora."""
    count = 0
    for balancer in range(load_balancers):
        for place, role in enumerate(amphora_roles(balancer)):
            yield count, balancer, identifier("amphora", balancer, place), role
            count += 1
