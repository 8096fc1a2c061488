# SPDX-License-Identifier: Apache-2.0
"""The tables of groups, in a database of their own.

Invariant: the rows are authoritative; a process may lose its memory at any moment. Times are seconds since 1970 (UTC)
as floating point numbers. The names begin with `cluster_`, so that the database may also be that of the driver.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from amphora_driver.database.schema_check import Activity, Schema

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = sa.String(36)
# Nova's server ids have 36 characters. A group with an explicit list may contain longer ids of another cloud.
ServerId = sa.String(64)
# A body may list many servers and exceed the 64 KiB of MySQL's TEXT and BLOB.
Body = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
Sealed = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# Groups. `credential` is the encrypted application credential, or NULL in a cloud without Keystone. With `deleting`, a
# controller removes the group's members and then this row.
group_row = sa.Table(
    "cluster_group",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("project_id", sa.String(64), nullable=False),
    sa.Column("body", Body, nullable=False),
    sa.Column("credential", Sealed, nullable=True),
    sa.Column("deleting", sa.Boolean, nullable=False, default=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # The lease of a controller. `epoch` grows with each owner. Each write increments `writes`, because Galera
    # replicates only changed rows.
    sa.Column("owner", sa.String(128), nullable=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("writes", sa.BigInteger, nullable=False, default=0),
    sa.Column("leased_until", sa.Double, nullable=True),
    # Each event (a request or a notification) increments `events` and makes the group due. If `events` has changed
    # during a pass, the group is due again at the end of the pass.
    sa.Column("due_at", sa.Double, nullable=False, default=0.0),
    sa.Column("events", sa.BigInteger, nullable=False, default=0),
    # Failed passes since the last success, the last error, and the time of the last success.
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("error", sa.Text, nullable=True),
    sa.Column("passed_at", sa.Double, nullable=True),
    sa.UniqueConstraint("project_id", "name"),
    sa.Index("ix_cluster_group_due_at", "due_at"),
)

# Servers of groups. `state` and `since` are copies of values in `body`, for queries.
node_row = sa.Table(
    "cluster_node",
    metadata,
    sa.Column("group_id", Id, primary_key=True),
    sa.Column("server_id", ServerId, primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("body", Body, nullable=False),
    sa.Index("ix_cluster_node_server_id", "server_id"),
)

# Requests to groups. `applied` means that the request has changed the recorded nodes. A repetition with the same key
# and `digest` returns the first request.
request_row = sa.Table(
    "cluster_request",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("group_id", Id, nullable=False),
    sa.Column("body", Body, nullable=False),
    sa.Column("applied", sa.Boolean, nullable=False, default=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("idempotency_key", sa.String(255), nullable=True),
    sa.Column("digest", sa.String(64), nullable=True),
    sa.UniqueConstraint("group_id", "idempotency_key"),
    sa.Index("ix_cluster_request_group_id", "group_id", "ended_at"),
    sa.Index("ix_cluster_request_ended_at", "ended_at"),
)

# The history of servers in groups, with a row for each change of a state.
event_row = sa.Table(
    "cluster_event",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("group_id", Id, nullable=False),
    sa.Column("server_id", ServerId, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Index("ix_cluster_event_group_id", "group_id", "id"),
    sa.Index("ix_cluster_event_at", "at"),
)

# Webhook tokens. `digest` is the SHA-256 of the token and also serves as the key of signatures. The vault encrypts
# `digest`, so that a copy of the database does not reveal it.
token_row = sa.Table(
    "cluster_token",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("group_id", Id, nullable=False, index=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("digest", Sealed, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("created_by", sa.String(128), nullable=False),
    sa.Column("expires_at", sa.Double, nullable=True),
)

# Nonces of signed requests, until the timestamp of the request is too old.
nonce_row = sa.Table(
    "cluster_nonce",
    metadata,
    sa.Column("token_id", Id, primary_key=True),
    sa.Column("nonce", sa.String(128), primary_key=True),
    sa.Column("expires_at", sa.Double, nullable=False, index=True),
)

# The controllers: the newest migration that each knows, and the time of its last heartbeat.
process_row = sa.Table(
    "cluster_process",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("revision", sa.String(32), nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False),
)

# The table lists all contract migrations that have begun. A process that does not know one of these migrations refuses
# the database.
sa.Table("cluster_schema_minimum", metadata, sa.Column("revision", sa.String(32), primary_key=True))

# Seconds without a heartbeat after which a controller counts as dead.
_CONTROLLER_ALIVE_SECONDS = 7.0
SCHEMA = Schema(
    migrations=Path(__file__).parent / "migrations",
    metadata=metadata,
    version_table="cluster_version",
    minimum_table="cluster_schema_minimum",
    rolling_since="0002",
    lock_name="amphora-cluster schema",
    lock_number=0x616D_636C,
    activities=(
        Activity(table="cluster_group", name="owner", until="leased_until"),
        Activity(
            table="cluster_process",
            name="name",
            until="seen_at",
            grace=_CONTROLLER_ALIVE_SECONDS,
            revision="revision",
        ),
    ),
    option="[amp_cluster] connection",
    command="amphoractl group database upgrade",
    users="the processes amphora-cluster and amphora-cluster-api",
)
