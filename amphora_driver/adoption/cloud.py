# SPDX-License-Identifier: Apache-2.0
"""The former amphorae in the cloud: their ports, machines and groups.

Invariant: no other module changes objects of another provider in Nova or Neutron. This one acts on the ids in Octavia's
tables, and only if the object has the name that Octavia's provider gives it. Each call can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from amphora_driver.adoption.octavia_state import OctaviaState, OldAmphora
from amphora_driver.compute.nova_client import Nova
from amphora_driver.errors import AmphoraDriverError, NetworkError
from amphora_driver.network.neutron_client import Neutron
from amphora_driver.network.neutron_objects import mark
from amphora_driver.openstack.errors import ApiError, translated
from amphora_driver.openstack.session import Service

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
_VIP_PORT_NAME, _MEMBER_PORT_NAME, _GROUP_NAME = "octavia-lb-vrrp-", "octavia-lb-member-", "lb-"
_SERVER_NAME, _SERVER_GROUP_NAME = "amphora-", "octavia-lb-"


class OldCloud(Protocol):
    """The objects of the former amphorae. Methods raise `AmphoraDriverError`."""

    def enable_old_ports(self, state: OctaviaState, *, enabled: bool) -> None:
        """Enable or disable the former amphorae's ports on the VIP network."""

    def enable_new_ports(self, port_ids: Sequence[str], *, enabled: bool) -> None:
        """Enable or disable ports of this provider."""

    def announce(self, state: OctaviaState) -> None:
        """Let the former amphorae announce the VIPs, after the way back. A failure is not an error."""

    def remove(self, state: OctaviaState) -> bool:
        """Remove the former amphorae with their ports and groups; return False while something is left."""


class FormerServers(Nova):
    """Servers of Octavia's provider."""

    def delete_named(self, server_id: str, name: str) -> bool:
        """Begin the deletion of a server with this name; return whether it exists. Another server stays."""
        try:
            # A server has user data, which must not be logged.
            found = self._send("GET", f"/servers/{server_id}", secret=True)["server"]
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        if found["name"] != name:
            LOG.warning(
                "the controller does not delete server %s, because the server does not have the name %s of the former "
                "amphora. Check the server, and delete it if nothing uses it",
                server_id,
                name,
            )
            return False
        return self.delete_server(server_id)


class OpenStackCloud:
    """Nova and Neutron, with the service account of this provider.

    Args:
        conf: the options of the driver.
    """

    def __init__(self, conf: ConfigOpts) -> None:
        options = conf.amp_network_neutron
        network = Service(conf, "network", "neutron", options.request_timeout)
        compute = Service(conf, "compute", "nova", conf.amp_compute_nova.request_timeout)
        self._neutron = Neutron(network, options.page_size, options.cache_time)
        self._nova = FormerServers(compute, options.page_size)
        self._octavia = Service(conf, "load_balancer", "service_auth", options.request_timeout)
        self._mark = mark(conf.amp_openstack.deployment_id or "")

    def enable_old_ports(self, state: OctaviaState, *, enabled: bool) -> None:
        """Enable or disable the former amphorae's ports on the VIP network."""
        wanted = f"{'enable' if enabled else 'disable'} the ports of the former amphorae of {state.load_balancer_id}"
        with translated(wanted):
            # While one port of a pair is enabled, it is the one of the master, so the VIPs do not move to the backup.
            for one in sorted(state.amphorae, key=lambda one: (one.role == "MASTER") is not enabled):
                port = self._neutron.get("ports", str(one.port_id))
                if port is None or not _is_old_port(port, one):
                    if enabled:
                        # The other ports must still be enabled, so that the load balancer serves.
                        LOG.warning(
                            "the controller does not enable port %s, because the port is missing or is not the VRRP "
                            "port of amphora %s. Check the port, because this amphora serves only through its own port",
                            one.port_id,
                            one.id,
                        )
                        continue
                    happened = f"port {one.port_id} is missing, or is not the VRRP port of amphora {one.id}"
                    raise NetworkError(wanted, happened, final=True)
                self._set_enabled(port, enabled=enabled)

    def enable_new_ports(self, port_ids: Sequence[str], *, enabled: bool) -> None:
        """Enable or disable ports of this provider."""
        with translated("enable or disable the ports of the new amphorae"):
            for port in self._neutron.find("ports", id=tuple(port_ids), description=self._mark) if port_ids else ():
                self._set_enabled(port, enabled=enabled)

    def announce(self, state: OctaviaState) -> None:
        """Let the former amphorae announce the VIPs, after the way back. A failure is not an error.

        The clients' ARP entries still have the MAC addresses of the new amphorae, for up to a minute. keepalived of a
        pair announces the VIPs itself. A single amphora does so only when it gets a configuration. An update without a
        change sends it again.
        """
        if len(state.amphorae) != 1:
            return
        of = state.load_balancer_id
        try:
            self._octavia.request("PUT", f"/lbaas/loadbalancers/{of}", json={"loadbalancer": {}})
        except (ApiError, AmphoraDriverError) as error:
            text = (
                "the controller could not request an update of load balancer %s from Octavia, so its former amphora "
                "does not announce the VIPs: %s. Run: openstack loadbalancer set %s"
            )
            LOG.warning(text, of, error, of)

    def _set_enabled(self, port: dict[str, Any], *, enabled: bool) -> None:
        if bool(port["admin_state_up"]) is not enabled:
            self._neutron.update("ports", port["id"], {"admin_state_up": enabled})

    def remove(self, state: OctaviaState) -> bool:
        """Remove the former amphorae with their ports and groups; return False while something is left."""
        with translated(f"remove the former amphorae of load balancer {state.load_balancer_id}"):
            left = [self._nova.delete_named(str(one.compute_id), f"{_SERVER_NAME}{one.id}") for one in state.amphorae]
            if any(left):
                return False
            for one in state.amphorae:
                self._delete_port(str(one.port_id), one)
            for port_id in state.member_ports:
                self._delete_member_port(port_id, state)
            self._remove_group(state)
            self._remove_server_group(state)
        return True

    def _delete_port(self, port_id: str, amphora: OldAmphora) -> None:
        port = self._neutron.get("ports", port_id)
        if port is not None and _is_old_port(port, amphora):
            self._neutron.delete("ports", port_id)

    def _delete_member_port(self, port_id: str, state: OctaviaState) -> None:
        port = self._neutron.get("ports", port_id)
        names = {f"{_MEMBER_PORT_NAME}{one.id}" for one in state.amphorae}
        if port is not None and port["name"] in names:
            self._neutron.delete("ports", port_id)

    def _remove_group(self, state: OctaviaState) -> None:
        """Remove the security group of the load balancer, which is also a group of the VIP port.

        A user can give the same name to a group, but not create a group in the project of the service account.
        """
        name, project_id = f"{_GROUP_NAME}{state.load_balancer_id}", self._neutron.project_id()
        groups = [one["id"] for one in self._neutron.find("groups", name=name, project_id=project_id)]
        port = self._neutron.get("ports", str(state.vip_port_id)) if groups else None
        if port is not None and set(groups) & set(port["security_groups"]):
            kept = [one for one in port["security_groups"] if one not in groups]
            self._neutron.update("ports", port["id"], {"security_groups": kept})
        for one in groups:
            self._neutron.delete("groups", one)

    def _remove_server_group(self, state: OctaviaState) -> None:
        if not state.server_group_id:
            return
        named = self._nova.server_groups(f"{_SERVER_GROUP_NAME}{state.load_balancer_id}")
        if any(one["id"] == state.server_group_id for one in named):
            self._nova.delete_server_group(state.server_group_id)


def _is_old_port(port: dict[str, Any], amphora: OldAmphora) -> bool:
    return bool(port["id"] == amphora.port_id and port["name"] == f"{_VIP_PORT_NAME}{amphora.id}")
