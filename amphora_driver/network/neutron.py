# SPDX-License-Identifier: Apache-2.0
"""The network backend of OpenStack: ports and security groups of Neutron.

Invariant: each object has the mark of the deployment from its creation on. The backend changes and deletes only objects
with this mark, except for the device id and the tag of a VIP port that a user provides. A mark counts only with
evidence that users cannot forge: the project of the service account, or one of its groups. A call can be repeated after
a crash at any point. The constructor connects to no service. `docs/reference/neutron.md` describes the objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from amphora_driver.deadline import apply_deadline, part_of_current
from amphora_driver.errors import ConfigurationError, DeadlinePassed
from amphora_driver.model.loadbalancer import Vip
from amphora_driver.model.network import Port, Subnet, VipOptions, VipRequest
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.interface import NotYet, Owners, PortPurpose, PortRequest
from amphora_driver.network.neutron_client import Neutron
from amphora_driver.network.neutron_groups import Groups
from amphora_driver.network.neutron_ports import AmphoraPorts
from amphora_driver.network.neutron_references import References
from amphora_driver.network.neutron_vips import VipPorts
from amphora_driver.openstack.errors import TimedOut, translated
from amphora_driver.openstack.session import Service

if TYPE_CHECKING:
    from oslo_config import cfg

    from amphora_driver.database.engine import Database


class NeutronNetwork:
    """The networks of an OpenStack cloud.

    Args:
        conf: the options of the driver.
        database: not used; all state is in Neutron.

    Raises:
        ConfigurationError: the deployment has no id.
    """

    supports: ClassVar[frozenset[str]] = frozenset(
        {"sriov_vip", "allow_member_sriov", "vip_qos_policy_id", "vip_sg_ids"}
    )
    wiring: ClassVar[str] = "nova"

    def __init__(self, conf: cfg.ConfigOpts, database: Database) -> None:  # noqa: ARG002 - the interface of backends
        options, deployment_id = conf.amp_network_neutron, conf.amp_openstack.deployment_id
        if not deployment_id:
            raise ConfigurationError(
                "use the network backend neutron",
                "[amp_openstack] deployment_id is not set, so the backend cannot recognize its objects",
                "Choose a name that no other deployment of this cloud has, for example the output of uuidgen, and set "
                "it in the configuration of all processes.",
            )
        self.listener_rules: bool = options.listener_rules
        self.listing_interval: float = options.listing_interval
        self._allocation_timeout: float = options.allocation_timeout
        self._mark = objects.mark(deployment_id)
        service = Service(conf, "network", "neutron", options.request_timeout)
        self._neutron = Neutron(service, options.page_size, options.cache_time)
        self._references = References(self._neutron)
        self._groups = Groups(
            self._neutron,
            self._references,
            deployment_id=deployment_id,
            name=options.security_group_name,
            agent_port=conf.amp_agent.port,
            listener_rules=self.listener_rules,
        )
        self._ports = AmphoraPorts(
            self._neutron,
            self._references,
            self._groups,
            deployment_id=deployment_id,
            management_groups=options.management_security_groups,
        )
        self._vips = VipPorts(self._neutron, self._references, self._groups, deployment_id=deployment_id)

    def allocate_vip(
        self,
        load_balancer_id: str,
        project_id: str,
        wanted: Sequence[VipRequest],
        machines: Sequence[str] = (),  # noqa: ARG002 - every address suits every machine
    ) -> tuple[Vip, ...] | NotYet:
        """Allocate the requested VIPs on one port. A repeated call with the same id returns the same VIPs."""
        attempt = f"allocate a VIP for load balancer {load_balancer_id}"
        mine = part_of_current(self._allocation_timeout, attempt)
        try:
            with apply_deadline(mine), translated(attempt):
                return self._vips.allocate(load_balancer_id, project_id, wanted, attempt)
        except (DeadlinePassed, TimedOut) as error:
            # Neutron may have created the port although its answer is late. The next call finds this port.
            return NotYet(reason=f"Neutron did not answer in {self._allocation_timeout:g} s: {error.happened}")

    def release_load_balancer(self, load_balancer_id: str) -> None:
        """Release the VIPs and the security group of a load balancer; a port of the user stays."""
        with translated(f"release load balancer {load_balancer_id}"):
            self._vips.release(load_balancer_id)
            self._groups.remove(load_balancer_id)

    def apply_vip_options(
        self, load_balancer_id: str, project_id: str, options: VipOptions, port_ids: Sequence[str]
    ) -> None:
        """Apply exactly these options to the VIPs."""
        attempt = f"apply the options of the VIPs of load balancer {load_balancer_id}"
        with translated(attempt):
            self._ports.apply_options(load_balancer_id, project_id, options, port_ids, attempt)

    def direct_answers_allowed(self, port_ids: Sequence[str]) -> bool:
        """Whether these ports pass the answers to redirected packets: no stateful group guards them."""
        with translated(f"read the security groups of ports {', '.join(port_ids)}"):
            ports = self._ports.read(port_ids)
            return len(ports) == len(set(port_ids)) and self._groups.pass_one_direction(ports)

    def ensure_port(self, request: PortRequest) -> Port:
        """The port of this amphora on this network; created if missing, completed if incomplete."""
        return self._ports.ensure(request)

    def ports(self, amphora_id: str) -> tuple[Port, ...]:
        """All ports of this amphora."""
        return self._ports.of_amphora(amphora_id)

    def management_ports(self, amphora_id: str) -> tuple[Port, ...]:
        """The ports of this amphora on its management networks. The compute backend `nova` owns them."""
        return self._ports.of_amphora(amphora_id, PortPurpose.MANAGEMENT)

    def delete_port(self, port_id: str) -> None:
        """Delete a port of this deployment; no error if it does not exist."""
        self._ports.delete(port_id)

    def owners(self) -> Owners:
        """The owners of all objects that `ensure_port` or `allocate_vip` created and that still exist."""
        with translated("list the objects of this deployment"):
            fields = ("id", "name", "project_id", "device_id", "security_groups")
            ports = self._neutron.find_paged("ports", fields=fields, description=self._mark)
            vip_groups = self._groups.ids_of_vip_ports()
            return objects.to_owners(ports, self._groups.all(), vip_groups, self._neutron.project_id())

    def subnet(self, subnet_id: str, project_id: str | None = None) -> Subnet:
        """The subnet with this id."""
        attempt = f"read subnet {subnet_id}"
        with translated(attempt):
            return objects.to_subnet(self._references.subnet(subnet_id, project_id, attempt))

    def require_network(self, network_id: str) -> None:
        """Check a network that the operator names.

        Raises:
            UnsupportedOption: it does not exist.
        """
        attempt = f"read network {network_id}"
        with translated(attempt):
            self._references.require_network(network_id, None, attempt)
