# SPDX-License-Identifier: Apache-2.0
"""The virtual switch of the cloud: a bridge for each Neutron network, and Neutron's port security on each port.

A port passes packets only if it is enabled, bound and plugged. Its packets need its MAC address, and as source one of
its fixed addresses or allowed address pairs, or the link-local address of its MAC address. Security groups are not
enforced. The switch routes nothing.
"""

from __future__ import annotations

import ipaddress
import subprocess

from port_switch import ruleset

from amphora_driver.host import namespaces
from amphora_driver.model.network import Port
from amphora_driver.network.bridges import Switch, switch_interface_name
from amphora_driver.network.ip_allocation import Segment

_UNBOUND = (None, "", "unbound", "binding_failed")
# The number of characters of a port's id in the name of its tap (Nova, NIC_NAME_LEN).
_TAP_CHARACTERS = 11


class CloudSwitch:
    """The switch in a network namespace. `enforce` applies the states of ports after each change."""

    def __init__(self, name):
        self._name = name
        self._switch = Switch(name, "")
        self._states = {}
        self._plugged = {}

    def plug(self, port, owner, place, interface):
        """Connect a port to the interface of a namespace; `port` is a request of the virt driver."""
        segment = self._ensure_bridge(port)
        shown = Port(id=port["id"], network_id=segment.id, mac=port["mac"], mtu=segment.mtu, addresses=())
        self._switch.disconnect(shown.id)
        self._switch.connect(shown, segment, owner, place, interface)
        self._plugged[shown.id] = switch_interface_name(shown.id), port["mac"]
        self.enforce()

    def plug_tap(self, name):
        """Connect a tap that Nova has made in the namespace of the switch to the bridge of its port."""
        [state] = [one for one in self._states.values() if tap_name(one["id"]) == name]
        segment = self._ensure_bridge(state)

        def work(kernel):
            [bridge], [index] = (kernel.link_lookup(ifname=one) for one in (segment.bridge, name))
            kernel.link("set", index=index, master=bridge, state="up")

        namespaces.run_with_netlink(namespaces.path(self._name), work)
        self._plugged[state["id"]] = name, state["mac_address"]
        self.enforce()

    def forget_tap(self, name):
        """Drop the packets of a tap that Nova has removed."""
        self._plugged = {port_id: plugged for port_id, plugged in self._plugged.items() if plugged[0] != name}
        self.enforce()

    def _ensure_bridge(self, port):
        """Make the bridge of the port's network; return the network."""
        network_id = port["network_id"]
        segment = Segment(id=network_id, name=network_id, bridge=f"br-{network_id[:11]}", mtu=port["mtu"])
        self._switch.ensure((segment,), ())
        return segment

    def unplug(self, port_id):
        """Remove the interface of a port; no error if it does not exist."""
        self._switch.disconnect(port_id)
        if self._plugged.pop(port_id, None):
            self.enforce()

    def state(self, port):
        """Take the state of a port in Neutron; without a revision number, the port is deleted."""
        known = self._states.get(port["id"])
        if port["revision_number"] is None:
            self._states.pop(port["id"], None)
        # Several threads of Neutron report: an older state may arrive later.
        elif known is None or known["revision_number"] <= port["revision_number"]:
            self._states[port["id"]] = port
        if port["id"] in self._plugged:
            self.enforce()

    def enforce(self):
        """Apply the present states of all ports to the switch."""
        live = []
        for port_id, (interface, mac) in self._plugged.items():
            state = self._states.get(port_id)
            if state is not None and _passes(state):
                live.append((interface, mac, _sources(state)))
        words = ["nsenter", f"--net={namespaces.path(self._name)}", "--", "nft", "-f", "-"]
        done = subprocess.run(words, input=ruleset(live), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def tap_name(port_id):
    """The name of the tap that Nova's libvirt driver makes for a port."""
    return f"tap{port_id[:_TAP_CHARACTERS]}"


def _passes(state):
    bound = state.get("binding:host_id") and state.get("binding:vif_type") not in _UNBOUND
    return bool(state["admin_state_up"] and bound and state["device_id"])


def _sources(state):
    """The permitted source addresses of a port; None for all."""
    if state.get("port_security_enabled") is False:
        return None
    pairs = [one["ip_address"] for one in (*state["fixed_ips"], *(state.get("allowed_address_pairs") or ()))]
    return [*pairs, _link_local(state["mac_address"])]


def _link_local(mac):
    """The address that the kernel derives from a MAC address (RFC 4291, appendix A)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    own = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + own))
