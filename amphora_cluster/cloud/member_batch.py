# SPDX-License-Identifier: Apache-2.0
"""The members of a plan as requests to Octavia. Pure.

Invariant: no request names a member without the tag of the group, and no new member has the address and port of
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from amphora_cluster.addresses import canonical
from amphora_cluster.model import Member, MemberChange, Step, StepKind

MEMBER_FIELDS = (
    "id", "name", "address", "protocol_port", "weight", "subnet_id", "monitor_port", "monitor_address", "backup",
    "admin_state_up", "operating_status", "provisioning_status", "tags",
)  # fmt: skip


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A member in an answer of Octavia."""

    id: str
    address: str
    protocol_port: int
    name: str | None = ""
    weight: int | None = 1
    subnet_id: str | None = None
    monitor_port: int | None = None
    monitor_address: str | None = None
    backup: bool | None = False
    admin_state_up: bool | None = True
    operating_status: str | None = ""
    provisioning_status: str | None = ""
    tags: tuple[str, ...] | None = ()

    @property
    def endpoint(self) -> tuple[str, int]:
        """The identity of the member in a batch."""
        return canonical(self.address), self.protocol_port

    def member(self) -> Member:
        """Return the member as the plan reads it."""
        return Member(
            id=self.id,
            name=self.name or "",
            address=self.address,
            port=self.protocol_port,
            weight=1 if self.weight is None else self.weight,
            subnet_id=self.subnet_id,
            monitor_port=self.monitor_port,
            backup=bool(self.backup),
            operating_status=self.operating_status or "",
            provisioning_status=self.provisioning_status or "",
            tags=tuple(self.tags or ()),
        )


class MemberBatch:
    """The requests for some steps, as far as the present members permit them.

    Args:
        present: all members of the pool, by address and port.
        tag: the tag of the group.
    """

    def __init__(self, present: Mapping[tuple[str, int], MemberRecord], tag: str) -> None:
        self._present = present
        self._own = {one.id for one in present.values() if tag in (one.tags or ())}
        self._tag = tag
        self.refused: dict[str, str] = {}

    def batch_of(self, step: Step) -> list[dict[str, Any]]:
        """Return the members of a step for the batch; nothing if they have their values already."""
        if step.kind is StepKind.LEAVE:
            return []
        members = [(change, self._present.get((canonical(change.address), change.port))) for change in step.members]
        foreign = [one for _, one in members if one is not None and one.id not in self._own]
        if foreign and step.kind is StepKind.JOIN:
            one = foreign[0]
            self.refused[step.server_id] = (
                f"Member {one.id} has address {one.address} and port {one.protocol_port}, "
                "but not the tag of this group."
            )
            return []
        return [
            _body(change, one, self._tag)
            for change, one in members
            # The controller changes only members with the group's tag, because other members belong to the user. A
            # drain does not create a member again.
            if (one is None and step.kind is not StepKind.DRAIN) or (one is not None and self._changes(change, one))
        ]

    def _changes(self, change: MemberChange, one: MemberRecord) -> bool:
        if one.id not in self._own or one.provisioning_status == "PENDING_DELETE":
            return False
        now = one.name or "", one.weight, one.monitor_port, bool(one.backup)
        wanted = change.name, change.weight, change.monitor_port, change.backup
        return now != wanted or one.provisioning_status == "ERROR"

    def deleted_of(self, step: Step) -> list[str]:
        """Return the ids of the members that a step deletes."""
        if step.kind is not StepKind.LEAVE:
            return []
        pending = {one.id for one in self._present.values() if one.provisioning_status == "PENDING_DELETE"}
        named = [one.member_id for one in step.members]
        return [one for one in named if one is not None and one in self._own and one not in pending]


def _body(change: MemberChange, one: MemberRecord | None, tag: str) -> dict[str, Any]:
    """Return a member for a batch.

    Octavia resets an absent property of an existing member to its default. The member therefore keeps the values that
    the group does not set: its administrative state, its monitor address, its other tags.
    """
    body: dict[str, Any] = {
        "name": change.name,
        "address": change.address if one is None else one.address,
        "protocol_port": change.port,
        "weight": change.weight,
        "backup": change.backup,
        "tags": [tag] if one is None else list(one.tags or ()),
    }
    if change.monitor_port is not None:
        body["monitor_port"] = change.monitor_port
    subnet_id = change.subnet_id if one is None else one.subnet_id
    if subnet_id is not None:
        body["subnet_id"] = subnet_id
    if one is not None:
        body["admin_state_up"] = one.admin_state_up is not False
        if one.monitor_address is not None:
            body["monitor_address"] = one.monitor_address
    return body
