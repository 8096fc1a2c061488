# SPDX-License-Identifier: Apache-2.0
"""Requests in the database: recorded by API and command line, carried out by controllers.

Invariant: a request is recorded, and its group is made due, in one transaction. A caller may repeat a request with the
same idempotency key; the repetition records nothing and returns the first request. Ended requests are kept for the
retention time, and so are their keys.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from amphora_cluster.database.groups import make_group_due
from amphora_cluster.database.tables import event_row, nonce_row, request_row
from amphora_cluster.model import Request
from amphora_driver.database import clock
from amphora_driver.database.engine import Database, set_commit_marker
from amphora_driver.database.rows import chunks
from amphora_driver.errors import Conflict, ContentRefused, RequestError, UnknownObject

# Maximum number of open requests of one group, all of which each pass reads.
MOST_OPEN = 1000
_REQUESTS = msgspec.json.Decoder(Request)
_MARKER = sa.select(request_row.c.id).where(request_row.c.id == sa.bindparam("of"))


class TooManyOpen(RequestError):
    """A group has as many open requests as one group can have."""


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded request.

    Args:
        applied: the request has changed the recorded nodes; its servers are chosen.
    """

    request: Request
    applied: bool = False


class RequestStore:
    """The requests of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, request: Request, *, key: str | None = None, digest: str | None = None) -> Request:
        """Record a request and make its group due; return it, or the first request with the same key.

        Args:
            request: a new request; this method sets its id, if it is empty, and its time.
            key: idempotency key of the caller, unique in the group.
            digest: digest of the content, in at most 64 characters.

        Raises:
            UnknownObject: the group does not exist, or is being deleted.
            Conflict: the key belongs to a request with another digest.
            TooManyOpen: the group has `MOST_OPEN` open requests.
        """
        request = msgspec.structs.replace(request, id=request.id or str(uuid.uuid4()))
        # MariaDB ignores the case of texts and would find the key `a` for `A`. So the table stores digests of keys.
        key = None if key is None else hashlib.sha256(key.encode()).hexdigest()

        def write(connection: sa.Connection) -> Request:
            set_commit_marker(connection, _MARKER, {"of": request.id})
            if key is not None and (found := _with_key(connection, request.group_id, key)) is not None:
                return _replayed(found, request, digest)
            if not make_group_due(connection, request.group_id):
                wanted = f"record a request for group {request.group_id}"
                raise UnknownObject(wanted, "the group does not exist, or is being deleted")
            _require_room(connection, request.group_id)
            now = connection.execute(sa.select(clock.now(connection))).scalar_one()
            recorded = msgspec.structs.replace(request, created_at=float(now))
            values = {"id": request.id, "group_id": request.group_id, "body": _encode(recorded), "created_at": now}
            connection.execute(request_row.insert().values(**values, idempotency_key=key, digest=digest))
            return recorded

        try:
            return self._database.write(write)
        except ContentRefused:
            # Another process has just recorded a request with the same key. The client gets that request as the answer.
            found = None if key is None else self._database.read(lambda c: _with_key(c, request.group_id, key))
            if found is None:
                raise
            return _replayed(found, request, digest)

    def get(self, group_id: str, request_id: str) -> Request:
        """Return a request of a group, or raise UnknownObject."""
        query = sa.select(request_row.c.body).where(request_row.c.id == request_id, request_row.c.group_id == group_id)
        body = self._database.read(lambda connection: connection.execute(query).scalar())
        if body is None:
            raise UnknownObject(f"find request {request_id}", f"group {group_id} has no such request")
        return _REQUESTS.decode(body)

    def list_requests(self, group_id: str, most: int) -> tuple[Request, ...]:
        """Return the newest requests of a group, newest first."""
        query = sa.select(request_row.c.body).where(request_row.c.group_id == group_id)
        query = query.order_by(request_row.c.created_at.desc(), request_row.c.id).limit(most)
        return tuple(map(_REQUESTS.decode, self._database.read(lambda c: c.execute(query).scalars().all())))

    def purge(self, retention: float, now: float) -> int:
        """Delete requests and events that ended `retention` seconds before `now`, and expired nonces."""

        def write(connection: sa.Connection) -> int:
            old = (
                request_row.delete().where(request_row.c.ended_at < now - retention),
                event_row.delete().where(event_row.c.at < now - retention),
                nonce_row.delete().where(nonce_row.c.expires_at < now),
            )
            return sum(connection.execute(statement).rowcount for statement in old)

        return self._database.write(write)


def read_open_requests(connection: sa.Connection, group_ids: Sequence[str]) -> Mapping[str, tuple[StoredRequest, ...]]:
    """Return the requests without an outcome by group, oldest first."""
    found: dict[str, list[StoredRequest]] = {}
    for part in chunks(group_ids):
        query = sa.select(request_row.c.group_id, request_row.c.body, request_row.c.applied)
        query = query.where(request_row.c.group_id.in_(part), request_row.c.ended_at.is_(None))
        for row in connection.execute(query.order_by(request_row.c.created_at, request_row.c.id)):
            one = StoredRequest(request=_REQUESTS.decode(row.body), applied=bool(row.applied))
            found.setdefault(row.group_id, []).append(one)
    return {group_id: tuple(requests) for group_id, requests in found.items()}


def write_requests(connection: sa.Connection, requests: Sequence[StoredRequest]) -> None:
    """Replace recorded requests. The caller holds the lease of their group in this transaction."""
    for one in requests:
        values = {"body": _encode(one.request), "applied": one.applied, "ended_at": one.request.ended_at}
        connection.execute(request_row.update().where(request_row.c.id == one.request.id).values(**values))


def _require_room(connection: sa.Connection, group_id: str) -> None:
    still_open = request_row.c.group_id == group_id, request_row.c.ended_at.is_(None)
    number = connection.execute(sa.select(sa.func.count()).select_from(request_row).where(*still_open)).scalar_one()
    if number >= MOST_OPEN:
        wanted = f"record a request for group {group_id}"
        raise TooManyOpen(wanted, f"it has {number} open requests", "Send the request again after some of them ended.")


def _with_key(connection: sa.Connection, group_id: str, key: str) -> tuple[Request, str | None] | None:
    query = sa.select(request_row.c.body, request_row.c.digest)
    query = query.where(request_row.c.group_id == group_id, request_row.c.idempotency_key == key)
    row = connection.execute(query).first()
    return None if row is None else (_REQUESTS.decode(row.body), row.digest)


def _replayed(found: tuple[Request, str | None], request: Request, digest: str | None) -> Request:
    if found[1] != digest:
        happened = f"request {found[0].id} with another content has the same idempotency key"
        raise Conflict(f"record a request for group {request.group_id}", happened, "Use another key.")
    return found[0]


def _encode(request: Request) -> str:
    return msgspec.json.encode(request).decode()
