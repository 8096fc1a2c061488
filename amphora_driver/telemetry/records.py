# SPDX-License-Identifier: Apache-2.0
"""Records of the database as a JSON document, for the read-only mode of amphoractl.

Invariant: a document has rows of the named tables only, and never a column with encrypted content, a key or a pending
secret. A column that a document lacks does not exist for the reader, so a command fails instead of showing less. The
number of rows of each table is limited.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database import clock, tables, tables_fleet
from amphora_driver.database.rows import plain_columns
from amphora_driver.errors import StoreError
from amphora_driver.model.enums import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database

# Version of the document's format. A reader refuses a document with another version.
FORMAT = 1
MAX_ROWS = 50_000
# The document about the whole fleet contains all open fail-overs, and in addition the newest MAX_FAILOVERS fail-overs.
MAX_FAILOVERS = 1000
# Maximum number of certificates in the document about the whole fleet.
MAX_CERTIFICATES = 1000
# Maximum number of requests and events in the document about one load balancer.
MAX_EVENTS = 2000
# Maximum number of ids for a prefix: ten are listed, and one more shows that others exist.
_MAX_IDS = 11
_MAX_AGE = 1.0
_LOCK_SECONDS = 5.0
_MAX_CACHED = 16
# Options that commands of amphoractl need. In the read-only mode, amphoractl has no configuration file.
OPTIONS = (
    *(("amp_controller", "boot_timeout"), ("amp_controller", "operation_timeout")),
    *(("amp_failover", "automatic"), ("amp_failover", "silent_after"), ("amp_failover", "witnesses")),
    *(("amp_rotation", "image_days"), ("amp_rotation", "replacement_timeout"), ("amp_spares", "number")),
    ("amp_tls", "expiry_days"),
)
# The document omits these columns: unvalidated objects of Octavia, and CA certificates because of their length.
_OMITTED = {tables.job.c.reread, tables_fleet.certificate_authority.c.certificate}


class TableRows(msgspec.Struct, frozen=True):
    """Rows of one table, each with its values in the order of the columns."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """A document.

    Attributes:
        version: version of the process that answers.
        at: time of the read by the clock of the database (seconds since 1970).
        cut: whether a limit has truncated a table.
        options: values of `OPTIONS`, by group and name.
        tables: rows by the name of the table.
    """

    format: int
    version: str
    at: float
    cut: bool
    options: dict[str, dict[str, Any]]
    tables: dict[str, TableRows]


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The subject of a document: load balancers by a prefix of the id, one fail-over, or the fleet."""

    load_balancer: str | None = None
    failover: int | None = None


def read_options(conf: ConfigOpts) -> dict[str, dict[str, Any]]:
    """Return the values of `OPTIONS`."""
    found: dict[str, dict[str, Any]] = {}
    for group, name in OPTIONS:
        found.setdefault(group, {})[name] = conf[group][name]
    return found


def sent_columns(table: sa.Table) -> tuple[sa.Column[Any], ...]:
    """Return the columns of a table that a document may contain: none of them is binary or generated."""
    # Binary values are left out, because all of them are encrypted secrets. Generated columns serve as indexes only.
    sent = (one for one in plain_columns(table) if one not in _OMITTED)
    return tuple(one for one in sent if not isinstance(one.type, sa.LargeBinary))


def read_records(database: Database, scope: Scope, version: str, options: dict[str, dict[str, Any]]) -> Records:
    """Return the document about a scope; raises StoreError if the database does not answer."""

    def read(connection: sa.Connection) -> Records:
        queries = _queries_of(connection, scope)
        found = {name: _read_table(connection, query) for name, query in queries.items()}
        return Records(
            format=FORMAT,
            version=version,
            at=float(connection.execute(sa.select(clock.now(connection))).scalar_one()),
            cut=any(len(one.rows) >= MAX_ROWS for one in found.values()),
            options=options,
            tables=found,
        )

    return database.read(read)


class RecordReader:
    """Reads documents for requests. Thread-safe.

    One request at a time reads the database. The result is valid for a second.

    Args:
        version: version of this process.
        options: result of `read_options`.
        monotonic: returns monotonic seconds.
    """

    def __init__(
        self,
        database: Database,
        version: str,
        options: dict[str, dict[str, Any]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._version = version
        self._options = options
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._cached: dict[Scope, tuple[float, bytes]] = {}

    def encode(self, scope: Scope) -> bytes:
        """Return a document as JSON; raises StoreError if the database does not answer."""
        # Another request may hold this lock while it waits for the database. This request then fails after
        # _LOCK_SECONDS seconds, before its client gives up.
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise StoreError("read the records", "other requests still wait for the database", "Try again.")
        try:
            now = self._monotonic()
            self._cached = {one: each for one, each in self._cached.items() if now - each[0] < _MAX_AGE}
            if scope not in self._cached:
                if len(self._cached) >= _MAX_CACHED:
                    self._cached.clear()
                found = read_records(self._database, scope, self._version, self._options)
                self._cached[scope] = (self._monotonic(), msgspec.json.encode(found))
            return self._cached[scope][1]
        finally:
            self._lock.release()


def _read_table(connection: sa.Connection, query: sa.Select[Any]) -> TableRows:
    result = connection.execute(query.limit(MAX_ROWS) if query._limit is None else query)  # noqa: SLF001 - no public name
    # The names are converted to str, because msgspec cannot encode SQLAlchemy's subclass of str.
    return TableRows(tuple(map(str, result.keys())), [tuple(row) for row in result])


def _queries_of(connection: sa.Connection, scope: Scope) -> Mapping[str, sa.Select[Any]]:
    if scope.failover is not None:
        events = tables_fleet.failover_event
        return {
            "failover": _select(tables_fleet.failover, tables_fleet.failover.c.id == scope.failover),
            "failover_event": _select(events, events.c.failover_id == scope.failover).limit(MAX_EVENTS),
        }
    if scope.load_balancer is not None:
        return _load_balancer_queries(_find_ids(connection, scope.load_balancer))
    return _FLEET


def _find_ids(connection: sa.Connection, prefix: str) -> list[str]:
    """Return the first ids of load balancers, also of deleted ones, that begin with the prefix."""
    sources = (tables.job, tables.request, tables_fleet.failover)
    ids = sa.union(*(sa.select(one.c.load_balancer_id.label("id")) for one in sources)).subquery().c.id
    query = sa.select(ids).where(ids.startswith(prefix, autoescape=True)).order_by(ids).limit(_MAX_IDS)
    found = list(connection.execute(query).scalars()) if prefix else []
    return [prefix] if prefix in found else found


def _select(table: sa.Table, *conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(*sent_columns(table)).where(*conditions)


def _load_balancer_queries(ids: list[str]) -> dict[str, sa.Select[Any]]:
    def of(table: sa.Table) -> sa.Select[Any]:
        return _select(table, table.c.load_balancer_id.in_(ids))

    request, event = tables.request, tables_fleet.failover_event
    amphorae = sa.select(tables.amphora.c.id).where(tables.amphora.c.load_balancer_id.in_(ids))
    failovers = sa.select(tables_fleet.failover.c.id).where(tables_fleet.failover.c.load_balancer_id.in_(ids))
    heard = tables.amphora_heartbeat
    whole = (tables.job, tables.object_status, tables.amphora, tables.vip_claim)
    fleet = (tables_fleet.silent_amphora, tables_fleet.failover, tables_fleet.resync)
    object_of_ids = tables.desired_object.c.load_balancer_id.in_(ids)
    return {
        **{one.name: of(one) for one in (*whole, *fleet)},
        "desired_object": sa.select(*_OBJECT_COLUMNS).where(object_of_ids),
        "request": of(request).order_by(request.c.id.desc()).limit(MAX_EVENTS),
        "amphora_heartbeat": _select(heard, heard.c.amphora_id.in_(amphorae)),
        "failover_event": _select(event, event.c.failover_id.in_(failovers))
        .order_by(event.c.id.desc())
        .limit(MAX_EVENTS),
    }


def _fleet_queries() -> dict[str, sa.Select[Any]]:
    status, request, failover = tables.object_status.c, tables.request, tables_fleet.failover
    newest = sa.select(failover.c.id).order_by(failover.c.id.desc()).limit(MAX_FAILOVERS).subquery()
    shown_failover = sa.or_(failover.c.ended_at.is_(None), failover.c.id.in_(sa.select(newest.c.id)))
    # Commands show the statuses of load balancers, and count the pending and unreported statuses of other objects. So
    # the document contains no other statuses.
    shown_status = sa.or_(status.kind == _BALANCER, status.pending.is_not(None), status.version > status.reported)
    whole = (tables.job, tables.amphora, tables.amphora_heartbeat, tables.duty)
    expiring = _EXPIRING.subquery()
    # The query selects load balancers by a join with `job`, because a condition on the column `kind` alone would read
    # all objects.
    work = tables.job.c
    # Objects with expiring certificates are sent too, because the list of these certificates shows the kind of their
    # objects.
    shown = sa.union(sa.select(work.load_balancer_id.label("id")), sa.select(expiring.c.object_id)).subquery()
    newer = sa.and_(request.c.load_balancer_id == work.load_balancer_id, request.c.generation > work.applied)
    fleet = tables_fleet
    more = (fleet.silent_amphora, fleet.unknown_amphora, fleet.circuit_breaker, fleet.process, fleet.drained_host)
    return {
        **{one.name: _select(one) for one in (*whole, *more, fleet.resync)},
        "object_status": _select(tables.object_status, shown_status),
        "desired_object": sa.select(*_OBJECT_COLUMNS).join(shown, shown.c.id == _OBJECT.c.id),
        "secret": _EXPIRING,
        "request": _select(request, request.c.applied_at.is_(None)).join(tables.job, newer),
        "failover": _select(failover, shown_failover),
        "rotation": _select(fleet.rotation, fleet.rotation.c.ended_at.is_(None)),
        "certificate_authority": _select(fleet.certificate_authority, fleet.certificate_authority.c.state != "gone"),
    }


_BALANCER = Kind.LOAD_BALANCER.value
_OBJECT = tables.desired_object
# amphoractl shows all attributes of load balancers, but only the id and the kind of other objects. So the query
# omits the bodies of other objects.
_OBJECT_COLUMNS = tuple(
    sa.case((_OBJECT.c.kind == _BALANCER, one), else_="").label(one.name) if one.name == "body" else one
    for one in sent_columns(_OBJECT)
)
_SECRET = tables.secret.c
# The objects whose certificates expire first, each with the earliest expiry of its certificates.
_EXPIRING = (
    sa.select(_SECRET.object_id, _SECRET.load_balancer_id, sa.func.min(_SECRET.expires_at).label("expires_at"))
    .where(_SECRET.expires_at.is_not(None))
    .group_by(_SECRET.object_id, _SECRET.load_balancer_id)
    .order_by(sa.func.min(_SECRET.expires_at), _SECRET.object_id)
    .limit(MAX_CERTIFICATES)
)
_FLEET = _fleet_queries()
