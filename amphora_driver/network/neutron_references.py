# SPDX-License-Identifier: Apache-2.0
"""Networks, subnets, QoS policies and security groups that a project refers to.

Invariant: Octavia's interface passes no token of the user, and the service account sees the objects of all projects.
Each reference is therefore checked here: a project uses its own objects, and objects that an RBAC policy shares with it
or with all projects. Such a policy also makes a network external. The attributes `shared` and `router:external` are no
evidence: Neutron computes them for the service account. The error for an object of another project is the same as for a
missing object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amphora_driver.errors import UnsupportedOption
from amphora_driver.network.neutron_client import Json, Neutron
from amphora_driver.network.neutron_objects import choose_subnet

# For each kind of object: its name in error messages, and its type in Neutron's RBAC policies.
_TYPES = {
    "networks": ("network", "network"),
    "policies": ("QoS policy", "qos_policy"),
    "groups": ("security group", "security_group"),
}
# Actions of RBAC policies that permit the use of an object. The second action exists for networks only.
_ACTIONS = ("access_as_shared", "access_as_external")


class References:
    """Reads objects that a request names.

    Args:
        neutron: the client.
    """

    def __init__(self, neutron: Neutron) -> None:
        self._neutron = neutron

    def network(self, network_id: str, wanted: str) -> Json:
        """Return a network.

        Raises:
            UnsupportedOption: it does not exist.
        """
        return self._read("networks", network_id, wanted)

    def require_network(self, network_id: str, project_id: str | None, wanted: str) -> Json:
        """Return a network that this project uses; None for the operator.

        Raises:
            UnsupportedOption: it does not exist, or this project must not use it.
        """
        found = self.network(network_id, wanted)
        self._require("networks", found, project_id, wanted)
        return found

    def subnet(self, subnet_id: str, project_id: str | None, wanted: str) -> Json:
        """Return a subnet that this project uses; None for the operator.

        Raises:
            UnsupportedOption: it does not exist, or this project must not use its network.
        """

        def read() -> Json | None:
            return self._neutron.get("subnets", subnet_id)

        found = self._neutron.cached(("subnets", subnet_id), read)
        if found is None:
            self._neutron.forget(("subnets", subnet_id))
            raise _refused("subnet", subnet_id, project_id, wanted)
        if project_id is not None and found["project_id"] != project_id:
            try:
                self.require_network(found["network_id"], project_id, wanted)
            except UnsupportedOption as error:
                raise _refused("subnet", subnet_id, project_id, wanted) from error
        return found

    def subnet_of_network(self, network_id: str, address: str | None, project_id: str, wanted: str) -> Json:
        """Return the subnet for a VIP of which only the network, and perhaps the address, is known.

        Raises:
            UnsupportedOption: the network has no suitable subnet, or this project must not use it.
        """
        self.require_network(network_id, project_id, wanted)
        found = choose_subnet(self._neutron.find("subnets", network_id=network_id), address)
        if found is None:
            suited = f" that contains {address}" if address else ""
            raise UnsupportedOption(wanted, f"network {network_id} has no subnet{suited}")
        return found

    def require_policy(self, policy_id: str, project_id: str, wanted: str) -> None:
        """Check a QoS policy.

        Raises:
            UnsupportedOption: it does not exist, or this project must not use it.
        """
        self._require("policies", self._read("policies", policy_id, wanted), project_id, wanted)

    def require_groups(self, group_ids: Sequence[str], project_id: str, wanted: str) -> list[Json]:
        """Return security groups that this project uses.

        Raises:
            UnsupportedOption: one does not exist, or this project must not use it.
        """
        read = self._neutron.find("groups", fields=("id", "project_id", "stateful"), id=group_ids) if group_ids else []
        found = {one["id"]: one for one in read}
        for group_id in group_ids:
            if group_id not in found:
                raise _refused("security group", group_id, project_id, wanted)
            self._require("groups", found[group_id], project_id, wanted)
        return [found[one] for one in group_ids]

    def _read(self, kind: str, object_id: str, wanted: str) -> Json:
        found = self._neutron.cached((kind, object_id), lambda: self._neutron.get(kind, object_id))
        if found is None:
            self._neutron.forget((kind, object_id))
            raise _refused(_TYPES[kind][0], object_id, None, wanted)
        return found

    def _require(self, kind: str, found: Json, project_id: str | None, wanted: str) -> None:
        """Refuse an object of another project that no RBAC policy shares."""
        if project_id is None or found["project_id"] == project_id:
            return
        name, object_type = _TYPES[kind]

        def shared() -> list[dict[str, Any]]:
            return self._neutron.find(
                "rbac",
                object_type=object_type,
                object_id=found["id"],
                action=_ACTIONS,
                target_tenant=(project_id, "*"),
            )

        key = ("rbac", found["id"], project_id)
        if not self._neutron.cached(key, shared):
            self._neutron.forget(key)
            raise _refused(name, found["id"], project_id, wanted)


def _refused(name: str, object_id: str, project_id: str | None, wanted: str) -> UnsupportedOption:
    must_not = f", or project {project_id} must not use it" if project_id else ""
    return UnsupportedOption(wanted, f"{name} {object_id} does not exist{must_not}")
