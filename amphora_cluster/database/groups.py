# SPDX-License-Identifier: Apache-2.0
"""Groups in the database: definitions, application credentials, and the recorded states of servers.

Invariant: an application credential is in the table only as a result of the vault, bound to its group. A change of a
group is an event: the group is due at once, also if a pass is running.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.claims import Claim, guard_claim
from amphora_cluster.database.tables import event_row, group_row, node_row, request_row, token_row
from amphora_cluster.model import Group, Node, NodeState
from amphora_driver.database import clock
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks
from amphora_driver.database.vault import SecretLocation, Vault
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.secret import Secret

# Maximum number of characters of a reason in the history of a server.
_MAX_REASON = 2000


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A group with its place in the queue.

    Args:
        deleting: the group removes its members, and then its record.
        passed_at: time of the last successful pass, None before the first one.
        due_at: time of the next pass; in the past if it is due.
        error: of the last pass; None if it succeeded.
        attempts: failed passes since the last success.
        owner: the process that works on the group.
    """

    group: Group
    deleting: bool
    created_at: float
    passed_at: float | None
    due_at: float
    error: str | None
    attempts: int
    owner: str | None


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the state of a server."""

    server_id: str
    at: float
    state: str
    reason: str


class StoredCredential(msgspec.Struct, frozen=True):
    """The sealed content of a credential."""

    id: str
    secret: str


def credential_location(group_id: str) -> SecretLocation:
    """Return the location to which the vault binds the application credential of a group."""
    return SecretLocation("cluster_group", (group_id, "credential"))


class GroupStore:
    """The groups of a database."""

    def __init__(self, database: Database, vault: Vault) -> None:
        self._database = database
        self._vault = vault

    def create(self, group: Group, credential: ApplicationCredential | None) -> None:
        """Record a group, which is due at once; None is the credential in a cloud without Keystone.

        Raises:
            Conflict: a group with this id exists, or the project has a group with this name.
        """
        sealed = self._seal(group.id, credential)

        def write(connection: sa.Connection) -> None:
            same_name = sa.and_(group_row.c.project_id == group.project_id, group_row.c.name == group.name)
            taken = sa.select(group_row.c.id).where(sa.or_(group_row.c.id == group.id, same_name)).limit(1)
            if found := connection.execute(taken).scalar():
                raise Conflict(f"create group {group.name}", f"group {found} has this name", "Choose another name.")
            values: dict[str, Any] = {"id": group.id, "name": group.name, "project_id": group.project_id}
            now = clock.now(connection)
            values |= {"body": _encode(group), "credential": sealed, "created_at": now, "due_at": now}
            connection.execute(group_row.insert().values(**values))

        self._database.write(write)

    def update(
        self, group: Group, credential: ApplicationCredential | None = None, *, before: Group | None = None
    ) -> None:
        """Replace the definition of a group, and also its credential unless it is None.

        Args:
            before: the definition that the caller has changed; None to replace any definition.

        Raises:
            UnknownObject: the group does not exist, or is being deleted.
            Conflict: the recorded definition is another one than `before`.
        """
        values: dict[str, Any] = {"name": group.name, "body": _encode(group)}
        if credential is not None:
            values["credential"] = self._seal(group.id, credential)

        def write(connection: sa.Connection) -> None:
            alive = group_row.c.id == group.id, sa.not_(group_row.c.deleting)
            body = connection.execute(sa.select(group_row.c.body).where(*alive).with_for_update()).scalar()
            if body is None:
                raise _unknown(group.id)
            if before is not None and decode_group(body) != before:
                happened = "another command has changed it meanwhile"
                raise Conflict(f"change group {group.name}", happened, "Repeat the command.")
            connection.execute(group_row.update().where(*alive).values(**values, **_event(connection)))

        self._database.write(write)

    def delete(self, group_id: str) -> None:
        """Let a controller remove the members and then the record. Idempotent.

        Raises:
            UnknownObject: no such group is recorded.
        """

        def write(connection: sa.Connection) -> None:
            update = group_row.update().where(group_row.c.id == group_id).values(deleting=True, **_event(connection))
            if not connection.execute(update).rowcount:
                raise _unknown(group_id)

        self._database.write(write)

    def forget(self, group_id: str) -> None:
        """Delete the record of a group without its members; a running pass loses its lease. Idempotent."""
        self._database.write(lambda connection: _delete_rows(connection, group_id))

    def get(self, group_id: str) -> GroupRecord:
        """Return a group, or raise UnknownObject."""
        row = self._database.read(lambda c: c.execute(_RECORDS.where(group_row.c.id == group_id)).first())
        if row is None:
            raise _unknown(group_id)
        return _record(row)

    def find(self, name_or_id: str) -> GroupRecord:
        """Return the group with this id, name or beginning of an id; UnknownObject for none or several."""
        by_beginning = group_row.c.id.startswith(name_or_id, autoescape=True)

        def read(connection: sa.Connection) -> Sequence[Any]:
            for condition in (group_row.c.id == name_or_id, group_row.c.name == name_or_id, by_beginning):
                if found := connection.execute(_RECORDS.where(condition).limit(2)).all():
                    return found
            return ()

        rows = self._database.read(read)
        if len(rows) != 1:
            happened = "several groups have it" if rows else "no group has this name or id"
            raise UnknownObject(f"find group {name_or_id}", happened, "List the groups: amphoractl group list.")
        return _record(rows[0])

    def list_groups(self, project_id: str | None = None) -> tuple[GroupRecord, ...]:
        """Return all groups, or those of a project, in the order of their names."""
        query = _RECORDS.order_by(group_row.c.name, group_row.c.id)
        if project_id is not None:
            query = query.where(group_row.c.project_id == project_id)
        return tuple(map(_record, self._database.read(lambda c: c.execute(query).all())))

    def list_nodes(self, group_id: str) -> tuple[Node, ...]:
        """Return the recorded states of a group's servers, in the order of the ids."""
        return self._database.read(lambda connection: read_nodes(connection, [group_id])).get(group_id, ())

    def list_events(self, group_id: str, most: int) -> tuple[NodeEvent, ...]:
        """Return the newest changes of states, newest first."""
        query = sa.select(event_row).where(event_row.c.group_id == group_id).order_by(event_row.c.id.desc()).limit(most)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return tuple(NodeEvent(server_id=row.server_id, at=row.at, state=row.state, reason=row.reason) for row in rows)

    def count_nodes(self) -> dict[str, dict[NodeState, int]]:
        """Return the number of servers by group and state."""
        count = sa.select(node_row.c.group_id, node_row.c.state, sa.func.count())
        rows = self._database.read(lambda c: c.execute(count.group_by(node_row.c.group_id, node_row.c.state)).all())
        found: dict[str, dict[NodeState, int]] = {}
        for group_id, state, number in rows:
            found.setdefault(group_id, {})[NodeState(state)] = number
        return found

    def make_due(
        self, group_ids: Collection[str] = (), *, server_ids: Collection[str] = (), project_ids: Collection[str] = ()
    ) -> int:
        """Make groups due at once: these, those with one of these servers, and those of these projects.

        Return the number of groups. A group is due again after a pass that is running now.
        """

        def write(connection: sa.Connection) -> int:
            number = 0
            for column, values in ((group_row.c.id, group_ids), (group_row.c.project_id, project_ids)):
                for part in chunks(sorted(set(values))):
                    number += connection.execute(
                        group_row.update().where(column.in_(part)).values(**_event(connection))
                    ).rowcount
            for part in chunks(sorted(set(server_ids))):
                groups = sa.select(node_row.c.group_id).where(node_row.c.server_id.in_(part))
                having = group_row.update().where(group_row.c.id.in_(groups)).values(**_event(connection))
                number += connection.execute(having).rowcount
            return number

        return self._database.write(write)

    def open_credential(self, group_id: str, sealed: bytes | None) -> ApplicationCredential | None:
        """Return the credential of a group from its sealed content.

        Raises:
            StoreError: no key opens it, or it was sealed for another group.
        """
        if sealed is None:
            return None
        content = self._vault.open(sealed, credential_location(group_id))
        stored = msgspec.json.decode(content.reveal(), type=StoredCredential)
        return ApplicationCredential(id=stored.id, secret=Secret(stored.secret.encode()))

    def _seal(self, group_id: str, credential: ApplicationCredential | None) -> bytes | None:
        if credential is None:
            return None
        stored = StoredCredential(id=credential.id, secret=credential.secret.reveal().decode())
        return self._vault.seal(Secret(msgspec.json.encode(stored)), credential_location(group_id))


_RECORDS = sa.select(*(column for column in group_row.c if column.name != "credential"))


def _event(connection: sa.Connection) -> dict[str, Any]:
    """Return the values of an UPDATE that make a group due at once, also after a pass that is running.

    A group that is due already keeps its time. Otherwise, frequent events would move it behind all other due groups.
    """
    now = clock.now(connection)
    due_at = sa.case((group_row.c.due_at < now, group_row.c.due_at), else_=now)
    return {"events": group_row.c.events + 1, "due_at": due_at, "writes": group_row.c.writes + 1}


def make_group_due(connection: sa.Connection, group_id: str) -> bool:
    """Make a group due at once; return whether it exists and is not being deleted."""
    alive = group_row.c.id == group_id, sa.not_(group_row.c.deleting)
    return bool(connection.execute(group_row.update().where(*alive).values(**_event(connection))).rowcount)


def read_nodes(connection: sa.Connection, group_ids: Sequence[str]) -> dict[str, tuple[Node, ...]]:
    """Return the recorded states by group, in the order of the server ids."""
    found: dict[str, list[Node]] = {}
    for part in chunks(group_ids):
        query = sa.select(node_row.c.group_id, node_row.c.body).where(node_row.c.group_id.in_(part))
        for group_id, body in connection.execute(query.order_by(node_row.c.group_id, node_row.c.server_id)):
            found.setdefault(group_id, []).append(_NODES.decode(body))
    return {group_id: tuple(nodes) for group_id, nodes in found.items()}


def record_nodes(
    connection: sa.Connection, claim: Claim, before: Sequence[Node], after: Sequence[Node]
) -> tuple[Node, ...]:
    """Replace the recorded states of a group under its lease; return the nodes with a new state.

    Only differences are written. Raises LeaseLost if another process owns the group.
    """
    guard_claim(connection, claim)
    known = {node.server_id: node for node in before}
    present = {node.server_id for node in after}
    changed = [node for node in after if known.get(node.server_id) != node]
    moved = [node for node in changed if node.server_id not in known or known[node.server_id].state is not node.state]
    replaced = [node.server_id for node in changed] + [one for one in known if one not in present]
    for part in chunks(replaced):
        old = node_row.c.group_id == claim.group_id, node_row.c.server_id.in_(part)
        connection.execute(node_row.delete().where(*old))
    if changed:
        connection.execute(node_row.insert(), [_node_values(claim.group_id, node) for node in changed])
    if moved:
        events = [
            {
                "group_id": claim.group_id,
                "server_id": node.server_id,
                "at": node.since,
                "state": node.state.value,
                "reason": node.reason[:_MAX_REASON],
            }
            for node in moved
        ]
        connection.execute(event_row.insert(), events)
    return tuple(moved)


def remove_group(connection: sa.Connection, claim: Claim) -> None:
    """Delete a group with all its records under its lease; raises LeaseLost."""
    guard_claim(connection, claim)
    _delete_rows(connection, claim.group_id)


def _delete_rows(connection: sa.Connection, group_id: str) -> None:
    # The row of the group is deleted first, so that no transaction can record a request for the group.
    connection.execute(group_row.delete().where(group_row.c.id == group_id))
    for table in (node_row, request_row, event_row, token_row):
        connection.execute(table.delete().where(table.c.group_id == group_id))


def _node_values(group_id: str, node: Node) -> dict[str, Any]:
    values = {"group_id": group_id, "server_id": node.server_id, "state": node.state.value, "since": node.since}
    return {**values, "body": _encode(node)}


_NODES = msgspec.json.Decoder(Node)
_GROUPS = msgspec.json.Decoder(Group)


def decode_group(body: str) -> Group:
    """Return the definition of a group from its column."""
    return _GROUPS.decode(body)


def _record(row: Any) -> GroupRecord:
    names = [name for name in GroupRecord.__struct_fields__ if name != "group"]
    return GroupRecord(group=decode_group(row.body), **{name: getattr(row, name) for name in names})


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _unknown(group_id: str) -> UnknownObject:
    return UnknownObject(
        f"find group {group_id}", "no such group is recorded", "List the groups: amphoractl group list."
    )
