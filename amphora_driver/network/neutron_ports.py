# SPDX-License-Identifier: Apache-2.0
"""Ports of amphorae in Neutron.

Invariant: a port is created in one request with addresses, address pairs, groups and mark. The MAC address derives from
amphora, network, type, and whether it is a management port. Neutron accepts a MAC address only once on a network, so
two processes never create two ports. An amphora has at most one management port, one ordinary port and one SR-IOV port
on a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amphora_driver.errors import NetworkError, UnsupportedOption
from amphora_driver.model.network import DIRECT, Port, VipOptions
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.interface import PortPurpose, PortRequest
from amphora_driver.network.neutron_client import Json, Neutron
from amphora_driver.network.neutron_groups import Groups, families
from amphora_driver.network.neutron_references import References
from amphora_driver.openstack.errors import ApiError, translated

# Maximum number of attempts to create or complete a port. Changes by other processes make an attempt fail.
_ATTEMPTS = 3


class AmphoraPorts:
    """Creates, completes and removes the ports of amphorae.

    Args:
        neutron: the client.
        references: checks what the options of the VIPs name.
        groups: the security groups of the ports.
        tags: sets the tags of new objects.
        deployment_id: the owner of the ports.
        management_groups: groups of management ports; empty for the group of the deployment.
    """

    def __init__(
        self,
        neutron: Neutron,
        references: References,
        groups: Groups,
        *,
        deployment_id: str,
        management_groups: Sequence[str],
    ) -> None:
        self._neutron = neutron
        self._references = references
        self._groups = groups
        self._deployment_id = deployment_id
        self._mark = objects.mark(deployment_id)
        self._management_groups = tuple(management_groups)

    def ensure(self, request: PortRequest) -> Port:
        """Return the port of an amphora on a network; created if missing, completed if it lacks something."""
        wanted = f"create the {request.purpose.value} port of amphora {request.amphora_id} on {request.network_id}"
        with translated(wanted):
            for _ in range(_ATTEMPTS):
                try:
                    found = self._find(request)
                    port = self._create(request, wanted) if found is None else self._complete(found, request, wanted)
                except ApiError as error:
                    if not self._may_repeat(error):
                        raise
                    continue
                return self._with_mtu(port, wanted)
        raise NetworkError(wanted, f"other processes changed it {_ATTEMPTS} times")

    def of_amphora(self, amphora_id: str, purpose: PortPurpose | None = None) -> tuple[Port, ...]:
        """Return all ports of an amphora, or those with one purpose."""
        wanted = f"list the ports of amphora {amphora_id}"
        names = objects.port_names(amphora_id) if purpose is None else (objects.port_name(amphora_id, purpose),)
        with translated(wanted):
            return tuple(self._with_mtu(one, wanted) for one in self._list(names))

    def delete(self, port_id: str) -> None:
        """Delete a port of this deployment; no error if it does not exist."""
        with translated(f"delete port {port_id}"):
            port = self._neutron.get("ports", port_id)
            if port is not None and objects.is_amphora_port(port, self._mark, self._neutron.project_id()):
                self._neutron.delete("ports", port_id)

    def apply_options(
        self, load_balancer_id: str, project_id: str, options: VipOptions, port_ids: Sequence[str], wanted: str
    ) -> None:
        """Give QoS policy and security groups to ports."""
        try:
            self._apply_options(load_balancer_id, project_id, options, port_ids, wanted)
        except ApiError as error:
            if error.kind != "SecurityGroupNotFound":
                raise
            # The cached group no longer exists in Neutron, so the driver reads the groups again.
            self._groups.forget()
            self._apply_options(load_balancer_id, project_id, options, port_ids, wanted)

    def _apply_options(
        self, load_balancer_id: str, project_id: str, options: VipOptions, port_ids: Sequence[str], wanted: str
    ) -> None:
        if options.qos_policy_id:
            self._references.require_policy(options.qos_policy_id, project_id, wanted)
        ports = self.read(port_ids)
        guarded = [one for one in ports if one["binding:vnic_type"] != DIRECT]
        if options.security_group_ids and len(guarded) < len(ports):
            raise UnsupportedOption(wanted, "security groups do not apply to SR-IOV ports", "Use another flavor.")
        addresses = {
            one["ip_address"] for port in ports for one in (*port["fixed_ips"], *port["allowed_address_pairs"])
        }
        chosen = self._groups.for_vips(load_balancer_id, project_id, options, families(addresses), wanted)
        for port in ports:
            changes: dict[str, object] = {}
            if port.get("qos_policy_id") != options.qos_policy_id:
                changes["qos_policy_id"] = options.qos_policy_id
            if port in guarded and set(port["security_groups"]) != set(chosen):
                changes["security_groups"] = chosen
            if changes:
                self._neutron.update("ports", port["id"], changes)

    def read(self, port_ids: Sequence[str]) -> list[Json]:
        """Return the ports with these ids that belong to this deployment."""
        found = self._neutron.find("ports", id=port_ids) if port_ids else []
        project_id = self._neutron.project_id()
        return [one for one in found if objects.is_amphora_port(one, self._mark, project_id)]

    def _find(self, request: PortRequest) -> Json | None:
        found = self._list(objects.similar_names(request), network_id=request.network_id)
        # Neutron refuses to change the type (`vnic_type`) of a port that is bound to a hypervisor. So only a port of
        # the requested type is usable.
        return objects.oldest([one for one in found if one["binding:vnic_type"] == request.vnic_type])

    def _list(self, names: Sequence[str], **more: str) -> list[Json]:
        filters: dict[str, str | Sequence[str]] = {"name": names, **more}
        return self._neutron.find("ports", description=self._mark, project_id=self._neutron.project_id(), **filters)

    def _create(self, request: PortRequest, wanted: str) -> Json:
        body = objects.amphora_port_body(
            request,
            self._neutron.project_id(),
            self._mark,
            objects.amphora_mac(self._deployment_id, request),
            self._groups_of(request, wanted),
        )
        return self._neutron.create_tagged(
            "ports", body, objects.tags(self._deployment_id, request.load_balancer_id, request.amphora_id)
        )

    def _groups_of(self, request: PortRequest, wanted: str) -> list[str]:
        if request.options.qos_policy_id:
            self._references.require_policy(request.options.qos_policy_id, request.project_id, wanted)
        if request.vnic_type == DIRECT:
            return []
        if request.purpose is PortPurpose.MANAGEMENT:
            return list(self._management_groups) or self._groups.for_management()
        if request.purpose is PortPurpose.MEMBER or request.load_balancer_id is None:
            return self._groups.for_members()
        used = families(request.vips)
        return self._groups.for_vips(request.load_balancer_id, request.project_id, request.options, used, wanted)

    def _complete(self, port: Json, request: PortRequest, wanted: str) -> Json:
        changes = objects.completion(port, request)
        if objects.lost_groups(port):
            changes["security_groups"] = self._groups_of(request, wanted)
        if not changes:
            return port
        return self._neutron.update("ports", port["id"], changes, port.get("revision_number"))

    def _may_repeat(self, error: ApiError) -> bool:
        """Whether to read the port again, because another process created or changed it, or removed a group."""
        if error.kind == "SecurityGroupNotFound":
            self._groups.forget()
            return True
        return error.kind == "MacAddressInUse" or error.status == 412

    def _with_mtu(self, port: Json, wanted: str) -> Port:
        network: dict[str, Any] = self._references.network(port["network_id"], wanted)
        return objects.to_port(port, network["mtu"])
