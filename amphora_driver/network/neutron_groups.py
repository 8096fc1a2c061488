# SPDX-License-Identifier: Apache-2.0
"""The security groups of a deployment.

Invariant: a group is found by its name, the mark of the deployment, and the project of the service account, in which
users create nothing. Neutron permits several groups with the same name, and processes can create one each at the same
time. Each process that lists these groups uses the oldest one, by creation time and id. It deletes the others two hours
after their creation. Neutron refuses the deletion of a group that a port uses. Such a group passes the same traffic,
because its rules are the same. It stays until a process lists the groups after its last port is gone. No process can
delete the oldest group, so at least one group always remains.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from amphora_driver.deadline import limit_wait
from amphora_driver.errors import NetworkError, UnsupportedOption
from amphora_driver.model.network import VipOptions
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.neutron_client import Json, Neutron
from amphora_driver.network.neutron_references import References
from amphora_driver.network.neutron_rules import (
    Group,
    Rule,
    difference,
    family_of,
    group_rules,
    load_balancer_rules,
    rule_body,
)
from amphora_driver.openstack.errors import ApiError, translate

LOG = logging.getLogger(__name__)
# Maximum number of attempts to create or complete a group. Changes by other processes make an attempt fail.
_ATTEMPTS = 5
# Maximum seconds to wait until another thread has read a group.
_MAX_WAIT = 5.0
# Minimum age in seconds of a duplicate group before its deletion. Other processes cache groups for at most an hour, and
# Neutron would remove a deleted group from their new ports.
_MIN_AGE = 2 * 3600.0


class Groups:
    """Finds, creates and removes security groups.

    Args:
        neutron: the client.
        references: checks the groups of users.
        deployment_id: the owner of the groups.
        name: first part of the names.
        agent_port: the TCP port of the agents.
        listener_rules: whether each load balancer has a group with rules of its listeners.
    """

    def __init__(
        self,
        neutron: Neutron,
        references: References,
        *,
        deployment_id: str,
        name: str,
        agent_port: int,
        listener_rules: bool,
    ) -> None:
        self._neutron = neutron
        self._references = references
        self._deployment_id = deployment_id
        self._mark = objects.mark(deployment_id)
        self._name = name
        self._agent_port = agent_port
        self._listener_rules = listener_rules
        self._reading = threading.Lock()

    def for_vips(
        self, load_balancer_id: str, project_id: str, options: VipOptions, families: Collection[str], wanted: str
    ) -> list[str]:
        """Return the groups of a port for VIPs.

        Raises:
            UnsupportedOption: a group of the user does not exist, or its project must not use it.
        """
        if options.security_group_ids:
            chosen = self._references.require_groups(options.security_group_ids, project_id, wanted)
            kinds = {one.get("stateful", True) for one in chosen}
            if len(kinds) > 1:
                raise UnsupportedOption(
                    wanted,
                    "some of the security groups are stateful and some are stateless",
                    "Use groups of one kind: Neutron does not mix them on a port.",
                )
            peers = Group.PEERS if kinds == {True} else Group.PEERS_STATELESS
            return [*options.security_group_ids, self.of_deployment(peers)]
        if self._listener_rules:
            rules = load_balancer_rules(options.listener_rules, families)
            return [self._ensure(objects.load_balancer_name(load_balancer_id), rules, load_balancer_id)["id"]]
        return [self.of_deployment(Group.TRAFFIC)]

    def for_members(self) -> list[str]:
        """Return the groups of a port for members only."""
        return [self.of_deployment(Group.OUTBOUND if self._listener_rules else Group.TRAFFIC)]

    def for_management(self) -> list[str]:
        """Return the groups of a management port."""
        return [self.of_deployment(Group.MANAGEMENT)]

    def of_deployment(self, group: Group) -> str:
        """Return the id of a group of the deployment; created if missing."""
        key = ("group", group.value)

        def read() -> str:
            rules = group_rules(group, self._agent_port)
            found: str = self._ensure(self._full_name(group), rules, stateful=group.stateful)["id"]
            return found

        def read_alone() -> str:
            # The lock only prevents that several threads of a new process create duplicate groups. Duplicate groups are
            # harmless, so a thread continues without the lock after the time-out.
            is_locked = self._reading.acquire(timeout=limit_wait(_MAX_WAIT))
            try:
                return self._neutron.cached(key, read)
            finally:
                if is_locked:
                    self._reading.release()

        return self._neutron.cached(key, read_alone)

    def ids_of_vip_ports(self) -> frozenset[str]:
        """Return the ids of the groups that only VIP ports of the deployment have."""
        return frozenset(one["id"] for one in self._find(self._full_name(Group.VIPS)))

    def forget(self) -> None:
        """Read the groups again at their next use, because one of them no longer exists."""
        self._neutron.forget(*(("group", one.value) for one in Group))

    def remove(self, load_balancer_id: str) -> None:
        """Remove the group of a load balancer."""
        for one in self._find(objects.load_balancer_name(load_balancer_id)):
            self._neutron.delete("groups", one["id"])

    def all(self) -> list[Json]:
        """Return the names of all groups of the deployment."""
        project_id = self._neutron.project_id()
        return self._neutron.find_paged("groups", fields=("id", "name"), description=self._mark, project_id=project_id)

    def pass_one_direction(self, ports: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these ports pass answers without the preceding packets, because no group tracks connections."""
        guarded = [one for one in ports if one.get("port_security_enabled", True)]
        ids = sorted({group for one in guarded for group in one["security_groups"]})
        if not ids or not all(one["security_groups"] for one in guarded):
            # Neutron blocks all traffic of a port with port security but without a group. So the result is True only if
            # no port has port security.
            return not guarded
        found = self._neutron.find("groups", fields=("id", "stateful"), id=ids)
        return len(found) == len(ids) and not any(one.get("stateful", True) for one in found)

    def _full_name(self, group: Group) -> str:
        return f"{self._name}-{group.value}"

    def _find(self, name: str) -> list[Json]:
        project_id = self._neutron.project_id()
        return self._neutron.find("groups", name=name, description=self._mark, project_id=project_id)

    def _ensure(
        self, name: str, rules: frozenset[Rule], load_balancer_id: str | None = None, *, stateful: bool = True
    ) -> Json:
        """Return the group with this name; created and completed if necessary."""
        # Operators may add rules to the groups of the deployment, so the driver keeps additional rules there. The group
        # of a load balancer must have exactly the driver's rules.
        exact = load_balancer_id is not None
        for _ in range(_ATTEMPTS):
            found = self._find(name)
            try:
                if not found:
                    made = self._create(name, load_balancer_id, stateful=stateful)
                    self._complete(made, rules, exact=exact)
                    # Another process may have created the group too, so the list is read again.
                    found = self._find(name)
                kept = objects.oldest(found)
                if kept is None:
                    continue
                self._complete(kept, rules, exact=exact)
            except ApiError as error:
                if error.status not in (404, 409) or "overquota" in error.kind.lower():
                    raise
                # Another process has changed the rules or deleted the group, so the driver tries again.
                continue
            self._delete_others(found, kept)
            return kept
        raise NetworkError(f"make the security group {name}", f"other processes changed it {_ATTEMPTS} times")

    def _create(self, name: str, load_balancer_id: str | None, *, stateful: bool) -> Json:
        body: dict[str, object] = {"name": name, "description": self._mark, "project_id": self._neutron.project_id()}
        if self._neutron.has_extension("stateful-security-group"):
            body["stateful"] = stateful
        made = self._neutron.create_tagged("groups", body, objects.tags(self._deployment_id, load_balancer_id))
        LOG.info("the network backend created the security group %s with the id %s", name, made["id"])
        return made

    def _complete(self, group: Mapping[str, Any], rules: frozenset[Rule], *, exact: bool) -> None:
        found = difference(group["security_group_rules"], rules)
        if found.missing:
            self._neutron.create_rules([rule_body(one, group["id"], group["project_id"]) for one in found.missing])
        for rule_id in (*found.repeated, *(found.surplus if exact else ())):
            self._neutron.delete("rules", rule_id)

    def _delete_others(self, found: Sequence[Json], kept: Json) -> None:
        """Delete the old groups of a list except the kept one; a group that a port uses stays."""
        for one in found:
            if one["id"] == kept["id"] or time.time() - objects.created_at(one) < _MIN_AGE:
                continue
            try:
                self._neutron.delete("groups", one["id"])
            except ApiError as error:
                # Neutron refuses with 409 to delete a group that a port uses. Such a refusal is usual and needs no
                # warning.
                level = logging.DEBUG if error.status == 409 else logging.WARNING
                LOG.log(
                    level,
                    "the network backend uses the security group %s, but could not delete the newer group %s of the "
                    "same name; the backend tries again when it lists the groups the next time: %s",
                    kept["id"],
                    one["id"],
                    translate(error, "delete it"),
                )
            else:
                LOG.info(
                    "several processes created the security group %s, so the network backend uses %s and has "
                    "deleted the duplicate %s",
                    one["name"],
                    kept["id"],
                    one["id"],
                )


def families(addresses: Collection[str]) -> frozenset[str]:
    """Return the families of addresses."""
    return frozenset(family_of(one) for one in addresses)
