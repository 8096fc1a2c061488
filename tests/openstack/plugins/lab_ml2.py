# SPDX-License-Identifier: Apache-2.0
"""ML2 mechanism driver for tests: binds each port on each host, without an agent.

On hosts with Nova's libvirt driver, Nova makes a tap for each port (`tap_agent.py`).

If the variable LAB_HYPERVISOR names the socket of the hypervisor of the tests, the driver sends each state of a port
there, as Neutron notifies an agent. A request to Neutron ends after the hypervisor enforces the state.
"""

import os

import lab_socket
from neutron_lib import constants
from neutron_lib.api.definitions import portbindings
from neutron_lib.plugins.ml2 import api
from neutron_lib.services.qos import base as qos_base
from neutron_lib.services.qos import constants as qos

_ANY_NUMBER = {"type:range": [0, 2**31 - 1]}
_VIF_TYPES = {portbindings.VNIC_NORMAL: portbindings.VIF_TYPE_OVS, portbindings.VNIC_DIRECT: "hw_veb"}
# The beginning of the names of hosts whose ports are taps.
_TAP_HOSTS = "libvirt"


class LabMechanismDriver(api.MechanismDriver):
    """Binds a port as soon as it has a host, and reports it as ACTIVE."""

    def initialize(self):
        # Without a QoS driver, Neutron refuses a policy with rules on a bound port.
        self.qos = qos_base.DriverBase(
            "lab",
            [*_VIF_TYPES.values(), portbindings.VIF_TYPE_TAP],
            list(_VIF_TYPES),
            {
                qos.RULE_TYPE_BANDWIDTH_LIMIT: {
                    qos.MAX_KBPS: _ANY_NUMBER,
                    qos.MAX_BURST: _ANY_NUMBER,
                    qos.DIRECTION: {"type:values": constants.VALID_DIRECTIONS},
                }
            },
            requires_rpc_notifications=False,
        )

    @property
    def connectivity(self):
        return portbindings.CONNECTIVITY_L2

    def bind_port(self, context):
        vif_type = _VIF_TYPES.get(context.current[portbindings.VNIC_TYPE])
        if vif_type == portbindings.VIF_TYPE_OVS and context.host.startswith(_TAP_HOSTS):
            vif_type = portbindings.VIF_TYPE_TAP
        if vif_type and context.segments_to_bind:
            context.set_binding(
                context.segments_to_bind[0][api.ID],
                vif_type,
                {portbindings.CAP_PORT_FILTER: True},
                status=constants.PORT_STATUS_ACTIVE,
            )

    def create_port_postcommit(self, context):
        _send(context, context.current)

    def update_port_postcommit(self, context):
        _send(context, context.current)

    def delete_port_postcommit(self, context):
        _send(context, {"id": context.current["id"], "revision_number": None})


def _send(context, port):
    """Send the state of a port to the hypervisor."""
    path = os.environ.get("LAB_HYPERVISOR")
    if path:
        names = ("id", "revision_number", "admin_state_up", "mac_address", "fixed_ips", "allowed_address_pairs")
        names += ("device_id", "network_id", "port_security_enabled", portbindings.HOST_ID, portbindings.VIF_TYPE)
        found = {name: port[name] for name in names if name in port}
        lab_socket.ask(path, "port", port=found, mtu=context.network.current.get("mtu"))
