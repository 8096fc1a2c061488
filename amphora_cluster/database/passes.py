# SPDX-License-Identifier: Apache-2.0
"""What a pass over a group reads from the database, and what it records under its lease."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from amphora_cluster.database.claims import Claim, PassEnd, end_passes
from amphora_cluster.database.groups import decode_group, read_nodes, record_nodes, remove_group
from amphora_cluster.database.requests import StoredRequest, read_open_requests, write_requests
from amphora_cluster.database.tables import group_row
from amphora_cluster.model import Group, Node
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks


class ClaimedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group at the begin of a pass.

    Args:
        credential: the sealed application credential.
        requests: those without an outcome, oldest first.
    """

    claim: Claim
    group: Group
    deleting: bool
    credential: bytes | None
    nodes: tuple[Node, ...]
    requests: tuple[StoredRequest, ...]


class PassStore:
    """Reads and writes of passes in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, claims: Sequence[Claim]) -> tuple[ClaimedGroup, ...]:
        """Return the groups of these leases, all with three queries. A group that was deleted is missing."""
        by_id = {claim.group_id: claim for claim in claims}
        columns = (group_row.c.id, group_row.c.body, group_row.c.deleting, group_row.c.credential)

        def read(connection: sa.Connection) -> tuple[ClaimedGroup, ...]:
            rows = [
                row
                for part in chunks(list(by_id))
                for row in connection.execute(sa.select(*columns).where(group_row.c.id.in_(part)))
            ]
            nodes = read_nodes(connection, list(by_id))
            requests = read_open_requests(connection, list(by_id))
            return tuple(
                ClaimedGroup(
                    claim=by_id[row.id],
                    group=decode_group(row.body),
                    deleting=bool(row.deleting),
                    credential=row.credential,
                    nodes=nodes.get(row.id, ()),
                    requests=requests.get(row.id, ()),
                )
                for row in rows
            )

        return self._database.read(read) if claims else ()

    def record(
        self, claim: Claim, before: Sequence[Node], after: Sequence[Node], requests: Sequence[StoredRequest] = ()
    ) -> tuple[Node, ...]:
        """Record nodes and changed requests of a pass before its steps; return the nodes with a new state.

        Raises:
            LeaseLost: another process owns the group. Nothing is recorded.
        """

        def write(connection: sa.Connection) -> tuple[Node, ...]:
            moved = record_nodes(connection, claim, before, after)
            write_requests(connection, requests)
            return moved

        return self._database.write(write)

    def finish(
        self, end: PassEnd, before: Sequence[Node], after: Sequence[Node], requests: Sequence[StoredRequest] = ()
    ) -> tuple[Node, ...]:
        """Record the result of the steps and return the lease in one transaction; see `record`."""

        def write(connection: sa.Connection) -> tuple[Node, ...]:
            moved = record_nodes(connection, end.claim, before, after)
            write_requests(connection, requests)
            end_passes(connection, [end])
            return moved

        return self._database.write(write)

    def remove(self, claim: Claim) -> None:
        """Delete a group with all its records; raises LeaseLost if another process owns it."""
        self._database.write(lambda connection: remove_group(connection, claim))
