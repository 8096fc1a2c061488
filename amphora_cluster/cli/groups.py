# SPDX-License-Identifier: Apache-2.0
"""Commands about groups.

Invariant: `group create` and `group set` read an application credential from a file or from standard input, and no
command shows it. `group delete` records the request and returns; a controller removes the members.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from amphora_cluster.cli import definition
from amphora_cluster.cli.credentials import read_credential, read_policy
from amphora_cluster.cli.stores import GROUP, Stores, opened
from amphora_cluster.database.groups import GroupRecord, GroupStore
from amphora_cluster.model import Group, Node, NodeState, SelectorKind
from amphora_cluster.policy import PolicySpec
from amphora_driver.cli.command import Lister, ShowOne, Table, argument
from amphora_driver.cli.formatting import Age, Counts, Rows, Timestamp, Value, ValueList
from amphora_driver.errors import AmphoraDriverError, ConfigurationError, Conflict, RequestError

_HEAD = ("ID", "Name", "Project", "Pool", "Servers", "Last pass", "State", "Error")
_CREDENTIAL = argument(
    "--credential-file",
    metavar="FILE",
    help="JSON file with the owner's application credential, as `openstack application credential create -f json` "
    "writes it; - for standard input.",
)


class Nodes(Rows):
    """The servers of a group, with their states."""

    empty = "none"

    def describe(self, row: Mapping[str, Any]) -> str:
        """Return the line of a server."""
        leaving = ", leaving" if row["leaving"] and row["state"] != NodeState.LEFT.value else ""
        reason = f": {row['reason']}" if row["reason"] else ""
        return f"{row['server_id']} {row['state']}{leaving} since {Age(row['since']).human_readable()}{reason}"


class CreateGroup(ShowOne):
    """Create a group: its servers become members of a pool.

    The pool exists, or --policy names a file with a load-balancing policy (the properties of Senlin's
    senlin.policy.loadbalance): the group then creates the load balancer, and deletes it with the group.
    """

    arguments = (
        argument("name", metavar="NAME", help="Name of the group, unique in its project."),
        *definition.selector_arguments(),
        argument("--load-balancer", metavar="ID", help="Load balancer of the pool."),
        argument("--pool", metavar="ID", help="The existing pool."),
        argument("--policy", metavar="FILE", help="JSON or YAML file with a load-balancing policy."),
        *definition.MEMBERS,
        *definition.PROTECTION,
        _CREDENTIAL,
        argument("--project", metavar="ID", help="Project of the owner. Default: project_id in the credential file."),
        argument(
            "--id",
            type=definition.group_id,
            metavar="UUID",
            help="Id of the new group, to repeat an interrupted creation.",
        ),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Create the group; return what it is."""
        policy = read_policy(parsed_args.policy) if parsed_args.policy else None
        definition.require_ids(policy, parsed_args.subnet)
        selector = definition.read_selector(parsed_args)
        template = definition.read_template(parsed_args, policy)
        balancer, pool = _pool_of(parsed_args, policy)
        with opened(self.app) as stores:
            credential, project = _owner(parsed_args, stores)
            store, new = stores.groups, parsed_args.id or str(uuid.uuid4())
            _require_new(store, new, parsed_args.name, project)
            octavia = definition.connect(stores.conf, credential, project)
            made = None
            if policy is not None and policy.creates_load_balancer:
                made = definition.create_load_balancer(octavia, new, parsed_args.name, policy)
                balancer, pool = made.load_balancer_id, made.pool_id
            group = Group(
                id=new,
                name=parsed_args.name,
                project_id=project,
                selector=selector,
                load_balancer_id=balancer,
                pool_id=pool,
                member=template,
                owns_load_balancer=made is not None,
                drain_on_idle=not parsed_args.no_drain_on_idle,
                **definition.protection(parsed_args),
            )
            try:
                definition.check_pool(octavia, group)
                store.create(group, credential)
            except AmphoraDriverError as error:
                if made is not None:
                    error.remedy += definition.undo_load_balancer(octavia, store, new, made)
                raise
            return _details(store.get(new), ())


class ListGroups(Lister):
    """List groups, with the number of their servers by state."""

    arguments = (argument("--project", metavar="ID", help="Only groups of this project."),)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        """Return the rows."""
        with opened(self.app) as stores:
            records = stores.groups.list_groups(parsed_args.project)
            counts = stores.groups.count_nodes()
        return _HEAD, [
            (
                *(one.group.id, one.group.name, one.group.project_id, one.group.pool_id),
                Counts({state.value: number for state, number in sorted(counts.get(one.group.id, {}).items())}),
                *(Age(one.passed_at), _state(one), one.error),
            )
            for one in records
        ]


class ShowGroup(ShowOne):
    """Show a group and its servers: their states, the times of the last changes, and the reasons."""

    arguments = (GROUP,)

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Return the group."""
        with opened(self.app) as stores:
            record = stores.groups.find(parsed_args.group)
            return _details(record, stores.groups.list_nodes(record.group.id))


class SetGroup(ShowOne):
    """Change a group; a controller applies the change at once."""

    arguments = (
        GROUP,
        argument("--name", metavar="NAME", help="New name."),
        argument(
            "--add-server",
            type=definition.server_id,
            action="append",
            default=[],
            metavar="ID",
            help="Add a server to an explicit list.",
        ),
        argument(
            "--remove-server",
            type=definition.server_id,
            action="append",
            default=[],
            metavar="ID",
            help="Remove a server from an explicit list. Its members drain first.",
        ),
        *definition.PROTECTION,
        _CREDENTIAL,
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Change the group; return what it is."""
        with opened(self.app) as stores:
            record = stores.groups.find(parsed_args.group)
            before = record.group
            group = msgspec.structs.replace(before, **definition.protection(parsed_args))
            if parsed_args.name:
                group = msgspec.structs.replace(group, name=parsed_args.name)
            if parsed_args.add_server or parsed_args.remove_server:
                group = _with_servers(group, parsed_args.add_server, parsed_args.remove_server)
            credential = read_credential(parsed_args.credential_file)[0] if parsed_args.credential_file else None
            if credential is not None:
                definition.check_credential(definition.connect(stores.conf, credential, group.project_id), group)
            stores.groups.update(group, credential, before=before)
            return _details(stores.groups.get(group.id), stores.groups.list_nodes(group.id))


class DeleteGroup(ShowOne):
    """Delete a group: a controller drains and removes its members.

    It also deletes the load balancer that the group has created. The command returns at once; the group is in the
    list until its members are removed.
    """

    arguments = (
        GROUP,
        argument(
            "--force",
            action="store_true",
            help="Delete the record only. Members and load balancer stay. Use it if the credential is revoked.",
        ),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Request the deletion."""
        with opened(self.app) as stores:
            found = stores.groups.find(parsed_args.group).group
            if parsed_args.force:
                stores.groups.forget(found.id)
            else:
                stores.groups.delete(found.id)
            return {"ID": found.id, "Name": found.name, "State": "deleted" if parsed_args.force else "deleting"}


def _require_new(store: GroupStore, group_id: str, name: str, project_id: str) -> None:
    """Find a conflict before a load balancer is created; raises Conflict."""
    for one in store.list_groups():
        group = one.group
        if group.id == group_id or (group.name, group.project_id) == (name, project_id):
            happened = f"group {group.id} with the name {group.name} exists"
            raise Conflict(
                f"create group {name}",
                happened,
                "Use another name and id. If this is the same group, nothing is to be done.",
            )


def _pool_of(parsed: argparse.Namespace, policy: PolicySpec | None) -> tuple[str, str]:
    """Return load balancer and pool of the arguments or of the policy; empty if the policy creates them."""
    balancer, pool = parsed.load_balancer, parsed.pool
    if policy is not None:
        if balancer or pool:
            raise RequestError("create the group", "a policy and a pool are given", "Use --policy or --pool.")
        if policy.creates_load_balancer:
            return "", ""
        balancer, pool = policy.loadbalancer, policy.pool.id
    if not (balancer and pool):
        raise RequestError("create the group", "no pool is given", "Use --load-balancer with --pool, or --policy.")
    return balancer, pool


def _owner(parsed: argparse.Namespace, stores: Stores) -> tuple[Any, str]:
    """Return credential and project of the owner."""
    credential, project = None, None
    if parsed.credential_file:
        credential, project = read_credential(parsed.credential_file)
    elif not stores.conf.amp_cluster_cloud.without_keystone:
        raise ConfigurationError("create the group", "no application credential is given", "Use --credential-file.")
    project = parsed.project or project
    if not project:
        raise ConfigurationError("create the group", "the file names no project", "Use --project.")
    return credential, project


def _with_servers(group: Group, added: list[str], removed: list[str]) -> Group:
    if group.selector.kind is not SelectorKind.LIST:
        raise RequestError("change the servers", "the group finds its servers by a selector", "Change the servers.")
    servers = tuple(one for one in dict.fromkeys((*group.selector.servers, *added)) if one not in removed)
    return msgspec.structs.replace(group, selector=msgspec.structs.replace(group.selector, servers=servers))


def _state(record: GroupRecord) -> str:
    if record.deleting:
        return "deleting"
    return "new" if record.passed_at is None and not record.error else "failing" if record.error else "working"


def _details(record: GroupRecord, nodes: tuple[Node, ...]) -> dict[str, Any]:
    group = record.group
    selector = ", ".join(group.selector.servers) or group.selector.value
    weight = group.member.weight
    return {
        "ID": group.id,
        "Name": group.name,
        "Project": group.project_id,
        "State": _state(record),
        "Error": record.error,
        "Selector": f"{group.selector.kind.value} {selector}",
        "Load balancer": group.load_balancer_id,
        "Owns load balancer": group.owns_load_balancer,
        "Pool": group.pool_id,
        "Ports": ValueList(group.member.ports),
        "Subnet": group.member.subnet_id,
        "Family": group.member.family,
        "Weight": f"{weight.kind.value} {weight.key or weight.number}",
        "Drain seconds": group.drain_seconds,
        "Minimum": group.minimum,
        "Join timeout": group.join_timeout,
        "Load metadata": group.load_metadata,
        "Created": Timestamp(record.created_at),
        "Last pass": Timestamp(record.passed_at),
        "Worked on by": Value(record.owner),
        "Servers": Nodes([msgspec.structs.asdict(node) | {"state": node.state.value} for node in nodes]),
    }
