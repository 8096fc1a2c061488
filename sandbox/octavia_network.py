# SPDX-License-Identifier: Apache-2.0
"""The network driver for Octavia's API.

Invariant: all data come from the tables of the local network backend, so that Octavia, the clients and the provider see
the same networks. The driver is read-only: the provider allocates addresses and ports.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from typing import Any, NoReturn

from octavia.network import base
from octavia.network import data_models as shown

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.model.network import Port
from amphora_driver.network.ip_allocation import AddressRange, Segment
from amphora_driver.network.local import LocalNetwork


@functools.lru_cache(maxsize=1)
def local_network() -> LocalNetwork:
    """The local network backend, cached: Octavia creates a new driver for each request."""
    conf = config.shared()
    return LocalNetwork(conf, Database(conf.amp_database.connection))


class SandboxNetworkDriver(base.AbstractNetworkDriver):
    """Reads networks, subnets, ports, security groups and QoS policies for Octavia."""

    def get_network(self, network_id: str, **_context: Any) -> Any:
        return _network(_find(local_network().networks(), network_id, base.NetworkNotFound, "id"))

    def get_network_by_name(self, network_name: str) -> Any:
        return _network(_find(local_network().networks(), network_name, base.NetworkNotFound, "name"))

    def get_subnet(self, subnet_id: str, **_context: Any) -> Any:
        return _subnet(_find(local_network().subnets(), subnet_id, base.SubnetNotFound, "id"))

    def get_subnet_by_name(self, subnet_name: str) -> Any:
        return _subnet(_find(local_network().subnets(), subnet_name, base.SubnetNotFound, "name"))

    def get_port(self, port_id: str, **_context: Any) -> Any:
        return _port(_first([local_network().port(port_id)], base.PortNotFound(f"port {port_id} does not exist")))

    def get_port_by_name(self, port_name: str) -> Any:
        return _port(_first(local_network().ports(port_name), base.PortNotFound(f"port {port_name} does not exist")))

    def get_port_by_net_id_device_id(self, network_id: str, device_id: str) -> Any:
        ports = [port for port in local_network().ports(device_id) if port.network_id == network_id]
        return _port(_first(ports, base.PortNotFound(f"{device_id} has no port on network {network_id}")))

    def get_network_ip_availability(self, network: Any) -> Any:
        have = [_availability(subnet) for subnet in local_network().subnets(network.id)]
        return shown.Network_IP_Availability(network_id=network.id, subnet_ip_availability=have)

    def get_security_group(self, _sg_name: str) -> Any:
        return None

    def get_security_group_by_id(self, sg_id: str, **_context: Any) -> Any:
        group = _find(local_network().port_security.groups(), sg_id, base.SecurityGroupNotFound, "id")
        return shown.SecurityGroup(id=group.id, name=group.name)

    def get_qos_policy(self, qos_policy_id: str, **_context: Any) -> Any:
        policy = _find(local_network().port_security.policies(), qos_policy_id, base.QosPolicyNotFound, "id")
        return shown.QosPolicy(id=policy.id)

    def qos_enabled(self) -> bool:
        return True

    def _unsupported(self, *_: Any, **__: Any) -> NoReturn:
        raise base.NetworkException(
            "The sandbox's network driver is read-only; the provider driver allocates ports and addresses."
        )

    allocate_vip = deallocate_vip = create_port = delete_port = unplug_vip = unplug_network = _unsupported
    plug_fixed_ip = unplug_fixed_ip = get_plugged_networks = failover_preparation = plug_port = _unsupported
    get_network_configs = update_vip_sg = update_aap_port_sg = plug_aap_port = unplug_aap_port = _unsupported
    set_port_admin_state_up = _unsupported


def _find(candidates: Any, wanted: str, missing: type[Exception], attribute: str) -> Any:
    found = [one for one in candidates if getattr(one, attribute) == wanted]
    return _first(found, missing(f"{wanted} does not exist"))


def _first(found: Iterable[Any], error: Exception) -> Any:
    chosen = next(iter(found), None)
    if chosen is None:
        raise error
    return chosen


def _network(segment: Segment) -> Any:
    subnets = [subnet.id for subnet in local_network().subnets(segment.id)]
    state = {"admin_state_up": True, "port_security_enabled": False}
    return shown.Network(id=segment.id, name=segment.name, subnets=subnets, mtu=segment.mtu, **state)


def _subnet(subnet: AddressRange) -> Any:
    same = {name: getattr(subnet, name) for name in ("id", "name", "network_id", "cidr")}
    return shown.Subnet(**same, gateway_ip=subnet.gateway, ip_version=subnet.version, host_routes=[])


def _port(port: Port) -> Any:
    owner = local_network().owner(port.id) or ""
    # Octavia refuses a VIP port with a device id. So a port that a user created is shown without a device id.
    use = {"name": owner, "device_id": "" if owner == f"user-{port.id}" else owner}
    addresses = [shown.FixedIP(subnet_id=one.subnet_id, ip_address=one.address) for one in port.addresses]
    state = {"status": "ACTIVE", "admin_state_up": True, "fixed_ips": addresses}
    return shown.Port(id=port.id, network_id=port.network_id, mac_address=port.mac, **use, **state)


def _availability(subnet: AddressRange) -> dict[str, Any]:
    total = int(ipaddress.ip_address(subnet.last)) - int(ipaddress.ip_address(subnet.first)) + 1
    return {"subnet_id": subnet.id, "total_ips": total, "used_ips": local_network().taken(subnet.id)}
