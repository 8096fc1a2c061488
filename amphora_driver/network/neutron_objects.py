# SPDX-License-Identifier: Apache-2.0
"""Names, marks and request bodies of Neutron's objects. Pure.

Invariant: an object of the service project belongs to this deployment if its description is the mark of the deployment,
and its name is one of those below. The mark is part of the creating request, and Nova keeps it. Names, device owner and
device id of VIP ports are those of Octavia's amphora provider, so that they never show the owner.

A VIP port is in the user's project, and its user can write each of these values to another port too. The evidence is
therefore a security group of the service project: Neutron refuses this group in each request of a user.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import DIRECT, FixedAddress, Port, Route, Subnet, VipRequest
from amphora_driver.network.interface import Owners, PortPurpose, PortRequest

Json = dict[str, Any]
DEVICE_OWNER = "Octavia"
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_AMPHORA_PORT = re.compile(rf"amphora-(?:{'|'.join(one.value for one in PortPurpose)})-({_ID})")
_LOAD_BALANCER = re.compile(rf"octavia-lb-({_ID})")
_MARK = "octavia-amphora-driver deployment "
_CLAIM = "octavia-load-balancer="
_VIP_DEVICE = re.compile(rf"lb-({_ID})")


def mark(deployment_id: str) -> str:
    """Return the description of all objects of a deployment. Neutron filters by it."""
    return f"{_MARK}{deployment_id}"


def load_balancer_name(load_balancer_id: str) -> str:
    """Return the name of the VIP port and of the security group of a load balancer."""
    return f"octavia-lb-{load_balancer_id}"


def vip_device_id(load_balancer_id: str) -> str:
    """Return the device id of a VIP port."""
    return f"lb-{load_balancer_id}"


def port_name(amphora_id: str, purpose: PortPurpose) -> str:
    """Return the name of a port of an amphora."""
    return f"amphora-{purpose.value}-{amphora_id}"


def port_names(amphora_id: str) -> tuple[str, ...]:
    """Return the possible names of the ports of an amphora."""
    return tuple(port_name(amphora_id, purpose) for purpose in PortPurpose)


def similar_names(request: PortRequest) -> tuple[str, ...]:
    """Return the possible names of the port of a request. A management port carries no traffic of VIPs."""
    is_management = request.purpose is PortPurpose.MANAGEMENT
    chosen = (one for one in PortPurpose if (one is PortPurpose.MANAGEMENT) is is_management)
    return tuple(port_name(request.amphora_id, one) for one in chosen)


def amphora_mac(deployment_id: str, request: PortRequest) -> str:
    """Return the MAC address of a port of an amphora. The ports on one network have different ones."""
    kind: tuple[str, ...] = ()
    if request.vnic_type == DIRECT:
        kind = (DIRECT,)
    elif request.purpose is not PortPurpose.MANAGEMENT:
        # This word gives a traffic port another MAC address than the management port, whose MAC address must stay as in
        # earlier versions.
        kind = ("traffic",)
    return derive_mac(deployment_id, request.amphora_id, request.network_id, *kind)


def derive_mac(*parts: str) -> str:
    """Return the MAC address of a port, the same for the same parts.

    A MAC address is unique on a network of Neutron. A port that exists already is therefore never created again, also
    not by two processes at the same time. The first byte is that of OpenStack's usual addresses: local and unicast.
    """
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return ":".join(f"{one:02x}" for one in (0xFA, *digest[:5]))


def tags(deployment_id: str, load_balancer_id: str | None, amphora_id: str | None = None) -> tuple[str, ...]:
    """Return the tags of an object, each of at most 60 characters; they are for operators only."""
    amphora = (f"octavia-amphora={amphora_id}",) if amphora_id else ()
    load_balancer = (claim_tag(load_balancer_id),) if load_balancer_id else ()
    return (f"octavia-deployment={deployment_id}", *load_balancer, *amphora)


def claim_tag(load_balancer_id: str) -> str:
    """Return the tag of a load balancer's objects, and of a user's port that it uses as VIP port."""
    return f"{_CLAIM}{load_balancer_id}"


def other_claims(port: Json, load_balancer_id: str) -> list[str]:
    """Return the tags of other load balancers that use, or try to use, a port of a user."""
    return [one for one in port["tags"] if one.startswith(_CLAIM) and one != claim_tag(load_balancer_id)]


def amphora_port_body(
    request: PortRequest, project_id: str, description: str, mac: str, groups: Sequence[str]
) -> dict[str, object]:
    """Return the body that creates a port of an amphora with everything that the VIPs need."""
    body: dict[str, object] = {
        "name": port_name(request.amphora_id, request.purpose),
        "description": description,
        "project_id": project_id,
        "network_id": request.network_id,
        "mac_address": mac,
        "admin_state_up": True,
        "binding:vnic_type": request.vnic_type,
    }
    if request.subnet_ids:
        # Without `fixed_ips`, Neutron chooses the addresses; with an empty list, the port gets no address. So the key
        # is set only if the request names subnets.
        body["fixed_ips"] = [{"subnet_id": subnet_id} for subnet_id in request.subnet_ids]
    if request.vnic_type == DIRECT:
        body |= {"port_security_enabled": False, "security_groups": []}
    else:
        body |= {
            "security_groups": list(groups),
            "allowed_address_pairs": [{"ip_address": one} for one in request.vips],
        }
    if request.options.qos_policy_id:
        body["qos_policy_id"] = request.options.qos_policy_id
    return body


def vip_port_body(
    load_balancer_id: str, project_id: str, description: str, mac: str, network_id: str, fixed: Sequence[dict[str, str]]
) -> dict[str, object]:
    """Return the body that creates a VIP port: it reserves the addresses and carries no traffic."""
    return {
        "name": load_balancer_name(load_balancer_id),
        "description": description,
        "project_id": project_id,
        "network_id": network_id,
        "mac_address": mac,
        "admin_state_up": False,
        "device_id": vip_device_id(load_balancer_id),
        "device_owner": DEVICE_OWNER,
        "fixed_ips": list(fixed),
    }


def completion(port: Json, request: PortRequest) -> dict[str, object]:
    """Return the changes that an existing port needs for a request; empty if it is complete."""
    have = {one["subnet_id"] for one in port["fixed_ips"]}
    missing = [{"subnet_id": one} for one in request.subnet_ids if one not in have]
    changes: dict[str, object] = {}
    if missing:
        changes["fixed_ips"] = [*port["fixed_ips"], *missing]
    if request.vnic_type != DIRECT:
        pairs = port.get("allowed_address_pairs") or []
        lacking = missing_addresses((one["ip_address"] for one in pairs), request.vips)
        if lacking:
            changes["allowed_address_pairs"] = [*pairs, *({"ip_address": one} for one in lacking)]
    return changes


def lost_groups(port: Json) -> bool:
    """Return whether Neutron blocks all traffic of a port, because it has no security group.

    An operator can delete a group at the moment at which Neutron creates the first port with it. Neutron then removes
    the group from the new port.
    """
    is_guarded = port["binding:vnic_type"] != DIRECT and port.get("port_security_enabled", True)
    return bool(is_guarded and not port["security_groups"])


def missing_addresses(have: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the wanted addresses that are not there; an address can have several spellings."""
    known = {_address(one) for one in have}
    return [one for one in wanted if _address(one) not in known]


def _address(text: str) -> str:
    return str(ipaddress.ip_interface(text).ip)


def is_amphora_port(port: Json, description: str, project_id: str) -> bool:
    """Whether a port is an amphora's port of this deployment."""
    return (
        port["description"] == description
        and port["project_id"] == project_id
        and _AMPHORA_PORT.fullmatch(port["name"]) is not None
    )


def claims_vip_port(port: Json, description: str, load_balancer_id: str) -> bool:
    """Whether a port has the values of this load balancer's VIP port. Its user can forge them."""
    return (port["description"], port["device_id"]) == (description, vip_device_id(load_balancer_id))


def is_users_port(port: Json) -> bool:
    """Whether a port with the device id of a load balancer is one that the user provided.

    The VIP ports that a provider of Octavia creates, also that of another deployment, have Octavia's device owner.
    """
    return bool(port["device_owner"] != DEVICE_OWNER)


def to_port(port: Json, mtu: int) -> Port:
    """Return a port of Neutron as this provider's."""
    return Port(
        id=port["id"],
        network_id=port["network_id"],
        mac=port["mac_address"],
        mtu=mtu,
        addresses=tuple(
            FixedAddress(subnet_id=one["subnet_id"], address=one["ip_address"]) for one in port["fixed_ips"]
        ),
    )


def to_subnet(subnet: Json) -> Subnet:
    """Return a subnet of Neutron as this provider's."""
    return Subnet(
        id=subnet["id"],
        network_id=subnet["network_id"],
        cidr=subnet["cidr"],
        gateway=subnet["gateway_ip"],
        routes=tuple(Route(destination=one["destination"], gateway=one["nexthop"]) for one in subnet["host_routes"]),
    )


def to_vips(port: Json, wanted: Sequence[VipRequest]) -> tuple[Vip, ...] | None:
    """Return the VIPs in the order of the request; None if the port has no address for one of them."""
    left = [(one["subnet_id"], one["ip_address"]) for one in port["fixed_ips"]]
    chosen: dict[int, tuple[str, str]] = {}
    # The most specific requests get their addresses first. Otherwise, a request without an address could get an address
    # that another request names.
    for exact in (3, 2, 1, 0):
        for number, request in enumerate(wanted):
            score = 2 * bool(request.address) + bool(request.subnet_id)
            if score != exact or number in chosen:
                continue
            fit = next((one for one in left if _fits(request, *one)), None)
            if fit is None:
                return None
            left.remove(fit)
            chosen[number] = fit
    return tuple(
        Vip(address=chosen[number][1], subnet_id=chosen[number][0], network_id=port["network_id"], port_id=port["id"])
        for number in range(len(wanted))
    )


def _fits(request: VipRequest, subnet_id: str, address: str) -> bool:
    return (not request.subnet_id or request.subnet_id == subnet_id) and (
        not request.address or _address(request.address) == _address(address)
    )


def to_owners(ports: Iterable[Json], groups: Iterable[Json], vip_groups: frozenset[str], project_id: str) -> Owners:
    """Return the owners of marked objects.

    Args:
        ports: ports with the mark of the deployment; users may have forged it.
        groups: the groups of the deployment.
        vip_groups: the ids of the groups that only VIP ports of the deployment have.
        project_id: the project of the service account.
    """
    amphorae, load_balancers = set(), set()
    for port in ports:
        if (found := _AMPHORA_PORT.fullmatch(port["name"])) and port["project_id"] == project_id:
            amphorae.add(found[1])
        elif (found := _VIP_DEVICE.fullmatch(port["device_id"])) and vip_groups.intersection(port["security_groups"]):
            load_balancers.add(found[1])
    load_balancers |= {found[1] for group in groups if (found := _LOAD_BALANCER.fullmatch(group["name"]))}
    return Owners(amphorae=frozenset(amphorae), load_balancers=frozenset(load_balancers))


def choose_subnet(subnets: Sequence[Json], address: str | None) -> Json | None:
    """Return the subnet of a VIP on a network: one that contains the address, IPv4 first."""
    ordered = sorted(subnets, key=lambda one: (one["ip_version"], one["cidr"], one["id"]))
    if address:
        ordered = [one for one in ordered if _contains(one["cidr"], address)]
    return next(iter(ordered), None)


def _contains(cidr: str, address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(cidr, strict=False)


def oldest(objects: Sequence[Json]) -> Json | None:
    """Return the object to keep of several equal objects: each process chooses the same object."""
    return min(objects, key=lambda one: (one["created_at"], one["id"]), default=None)


def created_at(one: Json) -> float:
    """Return the creation time of an object in seconds since the epoch."""
    return dt.datetime.fromisoformat(one["created_at"].replace("Z", "+00:00")).timestamp()
