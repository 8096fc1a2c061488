# SPDX-License-Identifier: Apache-2.0
"""Traffic through ports of the network backend `neutron`; a switch enforces their state."""

import pytest
from neutron_requests import new_id, take, vip_port_request
from port_switch import PortSwitch, answers, serving

pytestmark = pytest.mark.extended


class Node:
    """An amphora with its VIP, and a client, on one network."""

    def __init__(self, backend, tenant, admin, switch):
        self._admin, self._switch = admin, switch
        one = new_id()
        (self.vip,) = take(backend, tenant, load_balancer_id=one)
        port = backend.ensure_port(vip_port_request(tenant, one, vips=(self.vip.address,)))
        client = admin.create_port(network_id=tenant.network.id, fixed_ips=[{"subnet_id": tenant.v4.id}])
        self.ports = (port.id, client.id)
        for port_id in self.ports:
            # Nova writes these fields.
            admin.update_port(port_id, device_id=new_id(), device_owner="compute:nova", binding_host_id="host")
        node, client = self.read()
        self.address = node.fixed_ips[0]["ip_address"]
        self.namespace = switch.attach(node, f"{self.address}/24", f"{self.vip.address}/32")
        self.client = switch.attach(client, f"{client.fixed_ips[0]['ip_address']}/24")

    def read(self):
        return [self._admin.get_port(port_id) for port_id in self.ports]

    def answers(self):
        """Return whether the amphora's own address and the VIP answer."""
        self._switch.apply(self.read())
        return answers(self.client, self.address), answers(self.client, self.vip.address)


@pytest.fixture
def node(backend, tenant, admin):
    with PortSwitch() as switch:
        made = Node(backend, tenant, admin, switch)
        with serving(made.namespace):
            yield made


def test_a_port_needs_its_state_its_machine_and_its_address_pair(node, admin):
    port = node.read()[0]
    assert node.answers() == (True, True)
    admin.update_port(port.id, allowed_address_pairs=[])
    assert node.answers() == (True, False)
    pairs = [{"ip_address": node.vip.address}]
    admin.update_port(port.id, allowed_address_pairs=pairs, is_admin_state_up=False)
    assert node.answers() == (False, False)
    admin.update_port(port.id, is_admin_state_up=True)
    assert node.answers() == (True, True)
    admin.update_port(port.id, device_id="", device_owner="", binding_host_id="")
    assert node.answers() == (False, False)
