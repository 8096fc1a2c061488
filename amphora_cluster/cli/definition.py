# SPDX-License-Identifier: Apache-2.0
"""The arguments that define a group, and the definition that they give."""

from __future__ import annotations

import argparse
import uuid
from typing import Any

from amphora_cluster.cloud import options
from amphora_cluster.cloud.errors import CloudError
from amphora_cluster.cloud.octavia import LoadBalancerIds, OctaviaPools
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.groups import GroupStore
from amphora_cluster.model import TAG_PREFIX, Group, MemberTemplate, Selector, SelectorKind, Weight, WeightKind
from amphora_cluster.policy import PolicySpec, names, to_create_body
from amphora_cluster.requests import SERVER_ID
from amphora_driver.cli.command import Argument, argument
from amphora_driver.errors import RequestError, StoreError, UnknownObject

_MOST_PORT, _MOST_WEIGHT, _MOST_SECONDS = 65535, 256, 86400


def number(least: int, most: int) -> Any:
    """Return a type for argparse: a whole number with limits."""

    def read(text: str) -> int:
        found = int(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{found} is not from {least} to {most}")
        return found

    read.__name__ = "number"
    return read


def group_id(text: str) -> str:
    """Return the id of a group in its usual spelling; a type for argparse."""
    return str(uuid.UUID(text))


def server_id(text: str) -> str:
    """Return the id of a server as Nova writes it; a type for argparse."""
    if not SERVER_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id of a server")
    return text.lower()


SELECTORS: tuple[tuple[SelectorKind, str, str, str], ...] = (
    (SelectorKind.SERVER_GROUP, "--server-group", "ID", "The members of this Nova server group."),
    (SelectorKind.METADATA, "--metadata", "KEY=VALUE", "The servers of the project with this metadata."),
    (SelectorKind.TAG, "--tag", "TAG", "The servers of the project with this tag."),
    (SelectorKind.HEAT_STACK, "--heat-stack", "STACK/RESOURCE", "The servers of this resource of a Heat stack."),
)
PROTECTION: tuple[Argument, ...] = (
    argument(
        "--drain-seconds",
        type=number(0, _MOST_SECONDS),
        metavar="SECONDS",
        help="Longest time between weight 0 and the removal of a member. 0 removes members at once.",
    ),
    argument("--minimum", type=number(0, 100_000), metavar="NUMBER", help="Smallest number of serving servers."),
    argument(
        "--join-timeout",
        type=number(1, _MOST_SECONDS),
        metavar="SECONDS",
        help="Seconds until a joining server counts as failed. A join waits as long for an unhealthy server.",
    ),
    argument(
        "--load-metadata",
        metavar="KEY",
        help="The load of a server is the number in this metadata of it, for the criterion least_loaded.",
    ),
)
MEMBERS: tuple[Argument, ...] = (
    argument(
        "--port",
        type=number(1, _MOST_PORT),
        action="append",
        metavar="PORT",
        help="Port of the members; can be repeated: each server has a member for each port. Default with --policy: the "
        "port of the policy.",
    ),
    argument("--subnet", metavar="ID", help="Subnet of the members. Default: the first fixed address of the family."),
    argument("--family", type=int, choices=(4, 6), default=4, help="Family of the addresses (default: 4)."),
    argument("--monitor-port", type=number(1, _MOST_PORT), metavar="PORT", help="Port of health checks."),
    argument("--backup", action="store_true", help="The members are backup members."),
    argument(
        "--weight",
        type=number(0, _MOST_WEIGHT),
        default=1,
        metavar="NUMBER",
        help="Weight of the members (default: 1).",
    ),
    argument("--weight-metadata", metavar="KEY", help="The weight of a member is this metadata of its server."),
    argument("--weight-vcpus", action="store_true", help="The weight of a member is the number of vCPUs."),
    argument(
        "--no-drain-on-idle",
        action="store_true",
        help="A drain always lasts for --drain-seconds. By default it ends when the statistics show no connection, but "
        "not before the time of the option [amp_cluster] statistics_age.",
    ),
)


def selector_arguments() -> tuple[Argument, ...]:
    """Return the arguments of the selectors; a group has exactly one."""
    text = "An explicit list of servers; can be repeated."
    listed = argument("--server", type=server_id, action="append", metavar="ID", help=text)
    return (*(argument(name, metavar=value, help=text) for _, name, value, text in SELECTORS), listed)


def read_selector(parsed: argparse.Namespace) -> Selector:
    """Return the selector; raises RequestError unless there is exactly one."""
    values = {kind: getattr(parsed, name[2:].replace("-", "_")) for kind, name, _, _ in SELECTORS}
    given = [Selector(kind=kind, value=value) for kind, value in values.items() if value]
    if parsed.server:
        given.append(Selector(kind=SelectorKind.LIST, servers=tuple(dict.fromkeys(parsed.server))))
    if len(given) != 1:
        options_ = ", ".join((*(name for _, name, _, _ in SELECTORS), "--server"))
        raise RequestError("create the group", f"{len(given)} selectors are given", f"Use exactly one of {options_}.")
    (found,) = given
    if found.kind is SelectorKind.METADATA and not found.value.partition("=")[1]:
        raise RequestError("create the group", f"{found.value!r} is not KEY=VALUE", "Write, for example, role=web.")
    if found.kind is SelectorKind.HEAT_STACK and not all(found.value.rpartition("/")):
        raise RequestError("create the group", f"{found.value!r} is not STACK/RESOURCE", "Name a resource group.")
    return found


def read_template(parsed: argparse.Namespace, policy: PolicySpec | None) -> MemberTemplate:
    """Return the properties of the members; port and subnet may come from the policy."""
    ports = tuple(dict.fromkeys(parsed.port or ([policy.pool.protocol_port] if policy else [])))
    if not ports:
        raise RequestError("create the group", "no port is given", "Use --port.")
    return MemberTemplate(
        ports=ports,
        subnet_id=parsed.subnet or (policy.pool.subnet if policy else None),
        family=parsed.family,
        monitor_port=parsed.monitor_port,
        backup=parsed.backup,
        weight=_weight(parsed),
    )


def protection(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `PROTECTION` that are given."""
    values = {name: getattr(parsed, name) for name in ("drain_seconds", "minimum", "join_timeout", "load_metadata")}
    return {name: value for name, value in values.items() if value is not None}


def connect(conf: Any, credential: ApplicationCredential | None, project_id: str) -> OctaviaPools:
    """Return Octavia for the owner of a group."""
    return OctaviaPools(CloudConnection(options.settings(conf), credential, project_id))


def require_ids(policy: PolicySpec | None, subnet: str | None) -> None:
    """Refuse names in a policy, and in the argument --subnet.

    Senlin resolves names with Neutron. Octavia's API takes ids only, and a group uses no API of Neutron.

    Raises:
        RequestError: a value is a name.
    """
    given = [*(names(policy) if policy else ()), *([("subnet", subnet)] if subnet else [])]
    for kind, value in given:
        if not _is_id(value):
            remedy = f"Write the id of the {kind}: openstack {kind} show NAME -f value -c id."
            raise RequestError("create the group", f"{value!r} is no id, and names are not resolved", remedy)


def create_load_balancer(octavia: OctaviaPools, group_id: str, name: str, policy: PolicySpec) -> LoadBalancerIds:
    """Create the load balancer of a policy, or find the one of an earlier call; return the ids.

    Raises:
        CloudError: Octavia refuses the load balancer.
    """
    body = to_create_body(policy, name, tags=(TAG_PREFIX + group_id,))["loadbalancer"]
    body.pop("tags", None)
    return octavia.create_load_balancer(group_id, body)


def check_pool(octavia: OctaviaPools, group: Group) -> None:
    """Read the pool with the credential, to find a wrong id or credential before the group is recorded.

    Raises:
        CloudError: the pool does not exist, or the credential does not permit to read it.
        ConfigurationError: the credential belongs to another project.
        RequestError: the pool belongs to another load balancer, or a member that the group did not create has its tag.
    """
    octavia.require_project()
    pool = octavia.read_pool(group)
    if pool.load_balancer_id != group.load_balancer_id:
        happened = f"pool {pool.id} belongs to load balancer {pool.load_balancer_id}, not to {group.load_balancer_id}"
        raise RequestError("create the group", happened, f"Use --load-balancer {pool.load_balancer_id}.")
    if any(group.tag in one.tags for one in pool.members) and not group.owns_load_balancer:
        raise RequestError("create the group", f"members of the pool have the tag {group.tag} already", "Use a new id.")


def check_credential(octavia: OctaviaPools, group: Group) -> None:
    """Read the pool of a group with a new credential.

    Raises:
        CloudError: the credential is refused.
        ConfigurationError: the credential belongs to another project.
    """
    octavia.require_project()
    octavia.read_pool(group)


def undo_load_balancer(octavia: OctaviaPools, groups: GroupStore, group_id: str, made: LoadBalancerIds) -> str:
    """Delete the load balancer of a group that could not be recorded; return a text if it still exists.

    It stays if an earlier call has created it, and if the group may be recorded in spite of the error.
    """
    stays = f" Load balancer {made.load_balancer_id} stays. Repeat the command with --id {group_id}, or delete it."
    try:
        groups.get(group_id)
    except UnknownObject:
        if not made.created:
            return stays
    except StoreError:
        return stays
    else:
        return f" Group {group_id} is recorded."
    try:
        octavia.delete_load_balancer(group_id, made.load_balancer_id)
    except CloudError as error:
        return f"{stays} It could not be deleted: {error}"
    return ""


def _weight(parsed: argparse.Namespace) -> Weight:
    if parsed.weight_metadata:
        return Weight(kind=WeightKind.METADATA, key=parsed.weight_metadata, number=parsed.weight)
    return Weight(kind=WeightKind.VCPUS if parsed.weight_vcpus else WeightKind.NUMBER, number=parsed.weight)


def _is_id(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
