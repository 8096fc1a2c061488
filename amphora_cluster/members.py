# SPDX-License-Identifier: Apache-2.0
"""The members that the servers of a group should have, and the members that they have. Pure functions.

Ownership: a member belongs to the group if it has the group's tag. All others are foreign, also a member whose tag was
removed: they are never changed.

Relation of a member to its server: Octavia's members have no reference to a server. An own member belongs to the server
that should have its address and port. Otherwise it belongs to the server whose id is its name, and is obsolete: the
server has changed its address, or the group its ports. The name is the id of the server, for all of its ports. So a
member stays with its server after a user has renamed it, and an address that Neutron has given to another server counts
for this other server.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from amphora_cluster.addresses import canonical, choose_address
from amphora_cluster.model import Group, Member, MemberChange, Pool, Server, Weight, WeightKind

MOST_WEIGHT = 256
# Nova still lists a deleted server with one of these states.
GONE = frozenset({"DELETED", "SOFT_DELETED"})

# IP address and port of a member. Octavia permits each pair once in a pool.
Endpoint = tuple[str, int]


class ServerMembers(msgspec.Struct, frozen=True, kw_only=True):
    """A server and its members in the pool.

    Args:
        server: None if the source does not show the server, or shows it as deleted.
        current: own members with a wanted address and port, each with the wanted properties. Without a usable address
            all own members are current.
        missing: wanted members that do not exist. None of them joins while there is an obstacle.
        obsolete: own members with another address or port than wanted.
        obstacle: the reason why no member can join now, for example the server's status.
        conflict: the reason why a member can never join: another member or server has its address and port.
    """

    server_id: str
    server: Server | None
    current: tuple[tuple[Member, MemberChange], ...] = ()
    missing: tuple[MemberChange, ...] = ()
    obsolete: tuple[Member, ...] = ()
    obstacle: str = ""
    conflict: str = ""

    @property
    def own(self) -> tuple[Member, ...]:
        """All members of the server that the group may change."""
        return tuple(member for member, _ in self.current) + self.obsolete


def weight_of(server: Server, weight: Weight) -> int:
    """The weight of the server's members, within Octavia's limits of 0 and 256."""
    value: int | None = None
    if weight.kind is WeightKind.VCPUS:
        value = server.vcpus
    elif weight.kind is WeightKind.METADATA:
        text = server.metadata.get(weight.key, "").strip()
        # A minus sign is not decimal, so a negative number is invalid like any other text. int() reads all decimal
        # texts.
        value = int(text) if text.isdecimal() and len(text) < 10 else None
    return max(0, min(MOST_WEIGHT, weight.number if value is None else value))


def wanted_members(group: Group, server: Server) -> tuple[MemberChange, ...] | str:
    """The members of a server that serves, or a text with the reason why it can have none."""
    address = choose_address(server, group.member)
    if isinstance(address, str):
        return address
    template = group.member
    return tuple(
        MemberChange(
            member_id=None,
            name=server.id,
            address=address.ip,
            port=port,
            weight=weight_of(server, template.weight),
            subnet_id=template.subnet_id,
            monitor_port=template.monitor_port,
            backup=template.backup,
        )
        for port in dict.fromkeys(template.ports)
    )


def relate(group: Group, servers: tuple[Server, ...], pool: Pool) -> dict[str, ServerMembers]:
    """Each server of the source, and each former server that still has own members, by server id."""
    shown = {server.id: server for server in servers if server.status not in GONE}
    wanted = {one: wanted_members(group, server) for one, server in shown.items()}
    members = [member for member in pool.members if member.provisioning_status != "DELETED"]
    own = {endpoint_of(member): member for member in members if group.tag in member.tags}
    foreign = {endpoint_of(member): member for member in members if group.tag not in member.tags}
    holders = _holders(shown, wanted, own)
    by_name: dict[str, list[Member]] = {}
    for endpoint, member in own.items():
        if endpoint not in holders:
            by_name.setdefault(server_id_of(member), []).append(member)
    related = {
        one: _related(server, wanted[one], own, foreign, holders, tuple(by_name.pop(one, ())))
        for one, server in shown.items()
    }
    for one, left in by_name.items():
        related[one] = ServerMembers(server_id=one, server=None, obsolete=tuple(left))
    return related


def endpoint_of(member: Member | MemberChange) -> Endpoint:
    """The address and port by which Octavia identifies a member of a batch."""
    return canonical(member.address), member.port


def server_id_of(member: Member) -> str:
    """The server that a member's name states. A text behind a colon does not count."""
    return member.name.partition(":")[0]


def unchanged(member: Member) -> MemberChange:
    """A member with its present properties."""
    return MemberChange(
        member_id=member.id,
        name=member.name,
        address=member.address,
        port=member.port,
        weight=member.weight,
        subnet_id=member.subnet_id,
        monitor_port=member.monitor_port,
        backup=member.backup,
    )


def _holders(
    shown: Mapping[str, Server], wanted: Mapping[str, tuple[MemberChange, ...] | str], own: Mapping[Endpoint, Member]
) -> dict[Endpoint, str]:
    """The server for each wanted endpoint.

    If several servers want one, for example with equal addresses in two networks, the present member decides by its
    name, and otherwise the older server has it.
    """
    holders: dict[Endpoint, str] = {}
    for server in sorted(shown.values(), key=lambda one: (one.created_at, one.id)):
        for change in _changes(wanted[server.id]):
            endpoint = endpoint_of(change)
            member = own.get(endpoint)
            if endpoint not in holders or (member and server_id_of(member) == server.id):
                holders[endpoint] = server.id
    return holders


def _related(
    server: Server,
    wanted: tuple[MemberChange, ...] | str,
    own: Mapping[Endpoint, Member],
    foreign: Mapping[Endpoint, Member],
    holders: Mapping[Endpoint, str],
    named: tuple[Member, ...],
) -> ServerMembers:
    if isinstance(wanted, str):
        present = tuple((member, unchanged(member)) for member in named)
        reason = wanted if server.status == "ACTIVE" else _not_active(server)
        return ServerMembers(server_id=server.id, server=server, current=present, obstacle=reason)
    current, missing, conflict = [], [], ""
    for change in wanted:
        endpoint = endpoint_of(change)
        if holders[endpoint] != server.id:
            conflict = f"Server {holders[endpoint]} has the same address {change.address} and port {change.port}."
        elif endpoint in own:
            member = own[endpoint]
            # Octavia ignores a changed subnet, and treats another spelling of an address as another address. So the
            # plan keeps the member's subnet and spelling.
            known = {"member_id": member.id, "address": member.address, "subnet_id": member.subnet_id}
            current.append((member, msgspec.structs.replace(change, **known)))
        elif endpoint in foreign:
            conflict = (
                f"Member {foreign[endpoint].id} has address {change.address} and port {change.port}, "
                "but not the tag of this group."
            )
        else:
            missing.append(change)
    obstacle = conflict or ("" if server.status == "ACTIVE" else _not_active(server))
    return ServerMembers(
        server_id=server.id,
        server=server,
        current=tuple(current),
        missing=tuple(missing),
        obsolete=named,
        obstacle=obstacle,
        conflict=conflict,
    )


def _not_active(server: Server) -> str:
    return f"The server is in status {server.status}."


def _changes(wanted: tuple[MemberChange, ...] | str) -> tuple[MemberChange, ...]:
    return () if isinstance(wanted, str) else wanted
