# SPDX-License-Identifier: Apache-2.0
"""Octavia's tables: reads of one load balancer, and the transactions that change its provider.

Invariant: `take_over`, `insert_amphorae`, `remove_inserted` and `give_back` are the only writes of this provider to
Octavia's tables. Each is one transaction on the locked row of the load balancer. It changes nothing unless the load
balancer is locked by its status, and its configuration and amphorae are those that the adoption has recorded.
`remove_inserted` only needs the provider, and deletes only rows of `insert_amphorae`. A repeated call does nothing.

`take_over` deletes the rows of the former amphorae. The status DELETED would not suffice: Octavia's health manager
deletes the machine of such a row at its next heartbeat, so there would be no way back. For an amphora without a row, it
logs a warning only. The adoption has recorded the rows, and `insert_amphorae` inserts them again.

The columns are read from the database, because they differ between versions of Octavia.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from amphora_driver.adoption import octavia_state
from amphora_driver.adoption.octavia_state import AMPHORA_PROVIDERS, LOCKED, OctaviaState, OldAmphora, Row
from amphora_driver.database.outage import release_frames
from amphora_driver.errors import ConfigurationError, Conflict, StoreError

T = TypeVar("T")
# The column by which a table refers to its parent, and the table of the parent. A parent precedes its children.
_CONFIGURATION = {
    "load_balancer": ("id", None),
    "vip": ("load_balancer_id", "load_balancer"),
    "additional_vip": ("load_balancer_id", "load_balancer"),
    "vip_security_group": ("load_balancer_id", "load_balancer"),
    "listener": ("load_balancer_id", "load_balancer"),
    "listener_cidr": ("listener_id", "listener"),
    "sni": ("listener_id", "listener"),
    "pool": ("load_balancer_id", "load_balancer"),
    "session_persistence": ("pool_id", "pool"),
    "member": ("pool_id", "pool"),
    "health_monitor": ("pool_id", "pool"),
    "l7policy": ("listener_id", "listener"),
    "l7rule": ("l7policy_id", "l7policy"),
}
_AMPHORA, _HEALTH, _MEMBER_PORT, _TAGS = "amphora", "amphora_health", "amphora_member_port", "tags"
# Older versions of Octavia do not have these tables.
_OPTIONAL = {"additional_vip", "vip_security_group", _MEMBER_PORT}
_NEEDED = {
    "load_balancer": {"id", "project_id", "provider", "provisioning_status", "topology", "server_group_id"},
    "vip": {"load_balancer_id", "port_id", "octavia_owned"},
    _AMPHORA: {"id", "load_balancer_id", "compute_id", "status", "role", "vrrp_port_id"},
    _HEALTH: {"amphora_id", "last_update", "busy"},
}
_DELETED = "DELETED"
# Seconds for a connection, and for each statement.
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 5


class OctaviaDatabase:
    """Octavia's database. Usable from any thread; connects at its first use.

    Args:
        url: the SQLAlchemy URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None
        self._tables: dict[str, sa.Table] = {}

    def read(self, load_balancer_id: str) -> OctaviaState | None:
        """Return the state of a load balancer; None if Octavia has no row of exactly this id."""
        return self._run(f"read load balancer {load_balancer_id}", lambda c: self._state(c, load_balancer_id))

    def find(self, *, project_id: str | None = None, tag: str | None = None) -> list[str]:
        """Return the ids of the load balancers of Octavia's own provider, of a project or with a tag."""

        def work(connection: sa.Connection) -> list[str]:
            table = self._tables["load_balancer"]
            theirs = sa.or_(table.c.provider.in_(AMPHORA_PROVIDERS), table.c.provider.is_(None))
            columns: list[sa.ColumnElement[Any]] = [table.c.id]
            query = sa.select(*columns).where(theirs, table.c.provisioning_status != _DELETED).order_by(table.c.id)
            # MySQL and MariaDB ignore upper and lower case, so the values are compared again.
            wanted: list[str] = []
            if project_id is not None:
                query = query.add_columns(table.c.project_id).where(table.c.project_id == project_id)
                wanted.append(project_id)
            if tag is not None:
                tags = self._tables[_TAGS]
                query = query.add_columns(tags.c.tag).join(tags, tags.c.resource_id == table.c.id)
                query = query.where(tags.c.tag == tag)
                wanted.append(tag)
            found = [row[0] for row in connection.execute(query) if list(row[1:]) == wanted]
            return list(dict.fromkeys(found))

        return self._run("list load balancers", work)

    def take_over(self, before: OctaviaState, provider: str) -> None:
        """Give a locked load balancer to a provider, and delete the rows of its amphorae.

        Raises:
            Conflict: the lock is lost, or the load balancer differs from `before`.
            StoreError: Octavia's database does not answer; the result is then unknown.
        """
        wanted = f"change the provider of load balancer {before.load_balancer_id} to {provider}"

        def work(connection: sa.Connection) -> None:
            now = self._locked_state(connection, before.load_balancer_id, wanted)
            if now.provider == provider and not now.amphorae:
                return
            if change := octavia_state.describe_change(before, now):
                raise Conflict(wanted, change)
            ids = [one.id for one in before.amphorae]
            self._delete_amphorae(connection, ids)
            self._set_provider(connection, now, provider, None, wanted)

        self._run(wanted, work)

    def insert_amphorae(self, before: OctaviaState, provider: str) -> None:
        """Insert the rows of the former amphorae again, without the ids of their machines.

        Octavia's health manager reads twice for a heartbeat: the load balancer of the amphora, and without one, the
        amphora. It deletes the machine of an amphora whose row appears between these reads. Without an id, it deletes
        none. `give_back` follows when no heartbeat from before can be in progress.

        Args:
            before: the state before `take_over`.
            provider: the provider that has the load balancer now.

        Raises:
            Conflict: the lock is lost, or the configuration or an inserted amphora differs from `before`.
            StoreError: Octavia's database does not answer; the result is then unknown.
        """
        wanted = f"insert the former amphorae of load balancer {before.load_balancer_id}"

        def work(connection: sa.Connection) -> None:
            now = self._locked_state(connection, before.load_balancer_id, wanted)
            expected = _inserted(before, provider) if now.amphorae else _adopted(before, provider)
            if change := octavia_state.describe_change(expected, now):
                raise Conflict(wanted, change)
            if now.amphorae:
                return
            for name in (_AMPHORA, _MEMBER_PORT):
                rows = [octavia_state.from_json(one) for one in before.saved.get(name, ())]
                if name == _AMPHORA:
                    rows = [{**one, "compute_id": None} for one in rows]
                if rows:
                    connection.execute(self._tables[name].insert(), rows)

        self._run(wanted, work)

    def remove_inserted(self, before: OctaviaState, provider: str) -> None:
        """Delete the rows of `insert_amphorae` again, if the provider still has the load balancer.

        The load balancer may have lost its lock, have changed, or be deleted. An amphora with a machine stays.

        Args:
            before: the state before `take_over`.
            provider: the provider that has the load balancer now.

        Raises:
            StoreError: Octavia's database does not answer; the result is then unknown.
        """
        of = before.load_balancer_id

        def work(connection: sa.Connection) -> None:
            balancer, table = self._tables["load_balancer"], self._tables[_AMPHORA]
            adopted = sa.select(balancer.c.id).where(balancer.c.id == of, balancer.c.provider == provider)
            if not connection.execute(adopted.with_for_update()).all():
                return
            query = sa.select(table.c.id).where(table.c.load_balancer_id == of, table.c.compute_id.is_(None))
            former = [one.id for one in before.amphorae]
            self._delete_amphorae(connection, list(connection.execute(query.where(table.c.id.in_(former))).scalars()))

        self._run(f"remove the inserted amphorae of load balancer {of}", work)

    def give_back(self, before: OctaviaState, provider: str) -> None:
        """Give a locked load balancer back to its former provider, with the machines of the inserted amphorae.

        The heartbeats of the amphorae count from now on, so Octavia's health manager does not replace them at once.

        Args:
            before: the state before `take_over`.
            provider: the provider that has the load balancer now.

        Raises:
            Conflict: the lock is lost, or the configuration differs from `before`.
            StoreError: Octavia's database does not answer; the result is then unknown.
        """
        wanted = f"give load balancer {before.load_balancer_id} back to the provider {before.provider}"

        def work(connection: sa.Connection) -> None:
            now = self._locked_state(connection, before.load_balancer_id, wanted)
            if now.provider == before.provider and now.amphorae:
                return
            if change := octavia_state.describe_change(_inserted(before, provider), now):
                raise Conflict(wanted, change)
            table = self._tables[_AMPHORA]
            for one in before.amphorae:
                changed = table.update().where(table.c.id == one.id).values(compute_id=one.compute_id)
                connection.execute(changed)
            self._refresh_health(connection, [one.id for one in before.amphorae])
            self._set_provider(connection, now, before.provider, before.server_group_id, wanted)

        self._run(wanted, work)

    def _delete_amphorae(self, connection: sa.Connection, ids: list[str]) -> None:
        for name, column in ((_MEMBER_PORT, "amphora_id"), (_HEALTH, "amphora_id"), (_AMPHORA, "id")):
            if name in self._tables:
                table = self._tables[name]
                connection.execute(table.delete().where(table.c[column].in_(ids)))

    def _refresh_health(self, connection: sa.Connection, amphora_ids: list[str]) -> None:
        """Insert the rows of heartbeats; a heartbeat in progress may have inserted one during the adoption."""
        table = self._tables[_HEALTH]
        connection.execute(table.delete().where(table.c.amphora_id.in_(amphora_ids)))
        now = dt.datetime.now(dt.timezone.utc).replace(tzinfo=None)
        rows = [{"amphora_id": one, "last_update": now, "busy": False} for one in amphora_ids]
        connection.execute(table.insert(), rows)

    def _set_provider(
        self, connection: sa.Connection, now: OctaviaState, provider: str | None, group: str | None, wanted: str
    ) -> None:
        table = self._tables["load_balancer"]
        same = table.c.provider.is_(None) if now.provider is None else table.c.provider == now.provider
        mine = (table.c.id == now.load_balancer_id, table.c.provisioning_status == LOCKED, same)
        changed = table.update().where(*mine).values(provider=provider, server_group_id=group)
        if connection.execute(changed).rowcount != 1:
            raise Conflict(wanted, "its row has changed")

    def _locked_state(self, connection: sa.Connection, load_balancer_id: str, wanted: str) -> OctaviaState:
        """Lock the row of the load balancer until the end of the transaction, and return its state."""
        table = self._tables["load_balancer"]
        connection.execute(sa.select(table.c.id).where(table.c.id == load_balancer_id).with_for_update()).all()
        found = self._state(connection, load_balancer_id)
        if found is None:
            raise Conflict(wanted, "Octavia does not know it, or has deleted it")
        return found

    def _state(self, connection: sa.Connection, load_balancer_id: str) -> OctaviaState | None:
        rows = self._rows(connection, load_balancer_id)
        # MySQL and MariaDB also find an id in another spelling, which would be another load balancer for this provider.
        balancer = next((row for row in rows["load_balancer"] if row["id"] == load_balancer_id), None)
        if balancer is None or balancer["provisioning_status"] == _DELETED:
            return None
        vip = next(iter(rows["vip"]), {})
        table = self._tables[_AMPHORA]
        query = sa.select(table).where(table.c.load_balancer_id == load_balancer_id, table.c.status != _DELETED)
        amphorae = [dict(row) for row in connection.execute(query.order_by(table.c.id)).mappings()]
        ports = self._member_ports(connection, [row["id"] for row in amphorae])
        owned = vip.get("octavia_owned")
        children = {name: found for name, found in rows.items() if name != "load_balancer"}
        return OctaviaState(
            load_balancer_id=load_balancer_id,
            project_id=balancer["project_id"] or "",
            provider=balancer["provider"],
            status=balancer["provisioning_status"],
            topology=balancer["topology"],
            availability_zone=balancer.get("availability_zone"),
            server_group_id=balancer["server_group_id"],
            vip_port_id=vip.get("port_id"),
            vip_owned=None if owned is None else bool(owned),
            vnic_types=frozenset(one["vnic_type"] for one in (vip, *rows["member"]) if one.get("vnic_type")),
            amphorae=tuple(_old_amphora(row) for row in amphorae),
            member_ports=tuple(sorted(row["port_id"] for row in ports)),
            unsettled={
                row["id"]: row["provisioning_status"]
                for found in children.values()
                for row in found
                if row.get("provisioning_status", "ACTIVE") != "ACTIVE"
            },
            fingerprint=octavia_state.fingerprint(rows),
            saved={
                _AMPHORA: [octavia_state.to_json(row) for row in amphorae],
                _MEMBER_PORT: [octavia_state.to_json(row) for row in ports],
            },
        )

    def _rows(self, connection: sa.Connection, load_balancer_id: str) -> dict[str, list[Row]]:
        """Return all rows of the configuration, by table."""
        found: dict[str, list[Row]] = {}
        for name, (column, parent) in _CONFIGURATION.items():
            table = self._tables.get(name)
            ids = [load_balancer_id] if parent in (None, "load_balancer") else [one["id"] for one in found[parent]]
            if table is None or not ids:
                found[name] = []
                continue
            query = sa.select(table).where(table.c[column].in_(ids))
            found[name] = [dict(row) for row in connection.execute(query).mappings()]
        return found

    def _member_ports(self, connection: sa.Connection, amphora_ids: list[str]) -> list[Row]:
        table = self._tables.get(_MEMBER_PORT)
        if table is None or not amphora_ids:
            return []
        query = sa.select(table).where(table.c.amphora_id.in_(amphora_ids)).order_by(table.c.port_id)
        return [dict(row) for row in connection.execute(query).mappings()]

    def _run(self, wanted: str, work: Callable[[sa.Connection], T]) -> T:
        with _translated(f"{wanted} in Octavia's database"), self._connected().begin() as connection:
            if not self._tables:
                self._reflect(connection)
            return work(connection)

    def _connected(self) -> sa.Engine:
        with self._lock:
            if self._engine is None:
                if not self._url:
                    remedy = "Set it to the URL of [database] connection in octavia.conf."
                    raise ConfigurationError("open Octavia's database", "[amp_adoption] octavia_connection", remedy)
                self._engine = _create_engine(self._url)
            return self._engine

    def _reflect(self, connection: sa.Connection) -> None:
        """Read the columns of the tables."""
        names = {*_CONFIGURATION, _AMPHORA, _HEALTH, _MEMBER_PORT, _TAGS}
        present = names & set(sa.inspect(connection).get_table_names())
        metadata = sa.MetaData()
        metadata.reflect(connection, only=sorted(present), resolve_fks=False)
        tables = {name: metadata.tables[name] for name in present}
        missing = [name for name in sorted(names - _OPTIONAL) if name not in tables]
        missing += [
            f"{name}.{column}"
            for name, columns in _NEEDED.items()
            if name in tables
            for column in sorted(columns - set(tables[name].c.keys()))
        ]
        if missing:
            happened = f"it has no {', '.join(missing)}"
            raise ConfigurationError("use Octavia's database", happened, "Check [amp_adoption] octavia_connection.")
        self._tables = tables


def _adopted(before: OctaviaState, provider: str, **more: Any) -> OctaviaState:
    """Return the state of a load balancer that this provider has adopted, and that no user has changed."""
    return OctaviaState(
        load_balancer_id=before.load_balancer_id,
        project_id=before.project_id,
        provider=provider,
        status=LOCKED,
        topology=before.topology,
        vip_port_id=before.vip_port_id,
        fingerprint=before.fingerprint,
        **more,
    )


def _inserted(before: OctaviaState, provider: str) -> OctaviaState:
    """Return the state of such a load balancer after `insert_amphorae`."""
    found = tuple(msgspec.structs.replace(one, compute_id=None) for one in before.amphorae)
    return _adopted(before, provider, amphorae=found, member_ports=before.member_ports)


def _old_amphora(row: Row) -> OldAmphora:
    return OldAmphora(
        id=row["id"],
        status=row["status"],
        role=row["role"],
        compute_id=row["compute_id"],
        port_id=row["vrrp_port_id"],
        address=row.get("lb_network_ip"),
    )


def _create_engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        options: dict[str, Any] = {"pool_pre_ping": True, "pool_recycle": 3600}
        if parsed.get_backend_name() != "sqlite":
            # The transactions lock the row of the load balancer first. Later reads must then see all earlier commits.
            options["isolation_level"] = "READ COMMITTED"
            options["connect_args"] = _time_outs(parsed)
        return sa.create_engine(parsed, **options)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
        remedy = "Check [amp_adoption] octavia_connection."
        raise ConfigurationError("open Octavia's database", type(error).__name__, remedy) from error


def _time_outs(url: sa.URL) -> dict[str, Any]:
    """Return the time-outs of a connection by the names of its driver, without those that the URL sets."""
    found: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS}
    if url.get_backend_name() == "postgresql":
        found["options"] = f"-c statement_timeout={_ANSWER_SECONDS}s"
        found["tcp_user_timeout"] = _ANSWER_SECONDS * 1000
    else:
        found |= {"read_timeout": _ANSWER_SECONDS, "write_timeout": _ANSWER_SECONDS}
    return {name: value for name, value in found.items() if name not in url.query}


@contextmanager
def _translated(wanted: str) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        release_frames(error)
        happened = str(getattr(error, "orig", None) or type(error).__name__)
        raise StoreError(wanted, happened) from error
