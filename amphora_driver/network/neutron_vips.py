# SPDX-License-Identifier: Apache-2.0
"""VIP ports in Neutron.

Invariant: a VIP port reserves the addresses of one load balancer in the project of its user, and carries no traffic. It
is found by device id and mark, and is in a security group that no user can give to a port. Octavia may delete it first.

A port that a user provides gets a tag and the device id, and loses both at the release. The tag prevents that two load
balancers use the port. Each of them first adds its tag and then reads the port, so at least one of them sees the tag of
the other. A condition on the revision number would not prevent it: Neutron 29 accepts several concurrent updates of one
revision, in spite of `If-Match`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from amphora_driver.errors import Conflict, NetworkError, UnsupportedOption
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import VipRequest
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.neutron_client import Json, Neutron
from amphora_driver.network.neutron_groups import Groups
from amphora_driver.network.neutron_references import References
from amphora_driver.network.neutron_rules import Group
from amphora_driver.openstack.errors import ApiError

_ATTEMPTS = 3


class VipPorts:
    """Allocates and releases VIPs.

    Args:
        neutron: the client.
        references: checks networks and subnets.
        groups: has the group of VIP ports.
        deployment_id: the owner of the ports.
    """

    def __init__(self, neutron: Neutron, references: References, groups: Groups, *, deployment_id: str) -> None:
        self._neutron = neutron
        self._references = references
        self._groups = groups
        self._deployment_id = deployment_id
        self._mark = objects.mark(deployment_id)

    def allocate(
        self, load_balancer_id: str, project_id: str, requests: Sequence[VipRequest], wanted: str
    ) -> tuple[Vip, ...]:
        """Return the VIPs of a load balancer; allocated on one port if missing."""
        port_ids = {one.port_id for one in requests if one.port_id}
        port = self._find(load_balancer_id, project_id, port_ids)
        if port is None and port_ids:
            port = self._use_own_port(load_balancer_id, project_id, port_ids, wanted)
        if port is None:
            port = self._find_or_create(load_balancer_id, project_id, requests, wanted)
        vips = objects.to_vips(port, requests)
        if vips is None:
            have = ", ".join(one["ip_address"] for one in port["fixed_ips"])
            raise Conflict(wanted, f"port {port['id']} has the addresses {have} only", "Add the addresses to the port.")
        return vips

    def _find_or_create(
        self, load_balancer_id: str, project_id: str, requests: Sequence[VipRequest], wanted: str
    ) -> Json:
        for left in reversed(range(_ATTEMPTS)):
            try:
                return self._create(load_balancer_id, project_id, requests, wanted)
            except ApiError as error:
                if error.kind == "SecurityGroupNotFound" or (error.status == 500 and left):
                    # The cached group no longer exists, so the groups are read again. If a group is deleted during the
                    # creation of the port, Neutron answers 500 instead of SecurityGroupNotFound.
                    self._groups.forget()
                    continue
                # Neutron answers 409 if the port exists: another process created it, or the answer to an earlier
                # request was lost.
                port = self._find(load_balancer_id, project_id) if error.status == 409 else None
                if port is not None:
                    return port
                # Neutron refused the MAC address because of another process's port, which may be gone now. So the
                # creation is tried again.
                if error.kind != "MacAddressInUse":
                    raise
        raise NetworkError(wanted, f"other processes changed it {_ATTEMPTS} times")

    def release(self, load_balancer_id: str) -> None:
        """Delete the VIP port of a load balancer, and give a port of the user back."""
        device_id = objects.vip_device_id(load_balancer_id)
        found = self._neutron.find("ports", device_id=device_id)
        ours = self._select_ours(found, load_balancer_id)
        for port in ours:
            self._neutron.delete("ports", port["id"])
        for port in found:
            if port not in ours and objects.is_users_port(port):
                self._give_back(port)
        tag = objects.claim_tag(load_balancer_id)
        for port in self._neutron.find("ports", fields=("id", "device_owner"), tags=tag):
            if objects.is_users_port(port):
                self._neutron.remove_tag(port["id"], tag)

    def _find(self, load_balancer_id: str, project_id: str, port_ids: Collection[str] = ()) -> Json | None:
        """Return the port with the VIPs: one of this provider, or one of these ports of the user.

        A user can write the device id to other ports too, so a port that the request does not name never matches.
        """
        device_id = objects.vip_device_id(load_balancer_id)
        found = self._neutron.find("ports", device_id=device_id, project_id=project_id)
        ours = self._select_ours(found, load_balancer_id)
        return objects.oldest(ours or [one for one in found if one["id"] in port_ids and objects.is_users_port(one)])

    def _select_ours(self, found: Sequence[Json], load_balancer_id: str) -> list[Json]:
        """Return the ports that this deployment has created as the VIP port of this load balancer."""
        similar = [one for one in found if objects.claims_vip_port(one, self._mark, load_balancer_id)]
        groups = self._groups.ids_of_vip_ports() if similar else frozenset()
        return [one for one in similar if groups.intersection(one["security_groups"])]

    def _create(self, load_balancer_id: str, project_id: str, requests: Sequence[VipRequest], wanted: str) -> Json:
        fixed = []
        networks = set()
        for one in requests:
            subnet = self._choose_subnet(one, project_id, wanted)
            networks.add(subnet["network_id"])
            fixed.append({"subnet_id": subnet["id"], **({"ip_address": one.address} if one.address else {})})
        if len(networks) != 1:
            raise UnsupportedOption(wanted, "the subnets are on different networks", "Use subnets of one network.")
        (network_id,) = networks
        mac = objects.derive_mac(self._deployment_id, load_balancer_id, network_id)
        body = objects.vip_port_body(load_balancer_id, project_id, self._mark, mac, network_id, fixed)
        if self._neutron.has_extension("port-security"):
            # Some networks disable port security for new ports, and Neutron refuses a security group on such a port. So
            # the driver enables port security.
            body["port_security_enabled"] = True
        tags = objects.tags(self._deployment_id, load_balancer_id)
        return self._neutron.create_tagged("ports", {**body, **self._evidence()}, tags)

    def _evidence(self) -> dict[str, list[str]]:
        """Return the attribute that shows that this deployment has created a VIP port."""
        return {"security_groups": [self._groups.of_deployment(Group.VIPS)]}

    def _choose_subnet(self, request: VipRequest, project_id: str, wanted: str) -> Json:
        if request.subnet_id:
            subnet = self._references.subnet(request.subnet_id, project_id, wanted)
            if request.network_id not in (None, "", subnet["network_id"]):
                raise UnsupportedOption(wanted, f"subnet {subnet['id']} is not on network {request.network_id}")
            return subnet
        if not request.network_id:
            raise UnsupportedOption(wanted, "the request has no subnet, network or port")
        return self._references.subnet_of_network(request.network_id, request.address, project_id, wanted)

    def _use_own_port(self, load_balancer_id: str, project_id: str, port_ids: set[str], wanted: str) -> Json:
        """Return the port that the user provided, with the device id of the load balancer."""
        if len(port_ids) > 1:
            raise UnsupportedOption(wanted, "the request names several ports", "Use one port with all addresses.")
        (port_id,) = port_ids
        port = self._neutron.get("ports", port_id)
        if port is None or port["project_id"] != project_id:
            reason = f"port {port_id} does not exist, or project {project_id} must not use it"
            raise UnsupportedOption(wanted, reason)
        if port["device_id"] or not objects.is_users_port(port):
            used_by = port["device_id"] or port["device_owner"]
            raise Conflict(wanted, f"port {port_id} is in use by {used_by}", "Use another port.")
        tag = objects.claim_tag(load_balancer_id)
        self._neutron.add_tag(port_id, tag)
        port = self._neutron.get("ports", port_id) or port
        if objects.other_claims(port, load_balancer_id) or port["device_id"]:
            self._neutron.remove_tag(port_id, tag)
            raise Conflict(wanted, f"port {port_id} is in use by another load balancer", "Use another port.")
        return self._neutron.update("ports", port_id, {"device_id": objects.vip_device_id(load_balancer_id)})

    def _give_back(self, port: Json) -> None:
        try:
            self._neutron.update("ports", port["id"], {"device_id": ""})
        except ApiError as error:
            if error.status != 404:
                raise
