# SPDX-License-Identifier: Apache-2.0
"""Fail-overs, silent amphorae, rotations, certificate authorities and processes."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import add_column, create_index, create_table

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
SEALED = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _columns()
    _failovers()
    _silence()
    _rotations()
    _resync()
    create_table(
        "process",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_process")),
    )
    create_table(
        "drained_host",
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("asked_by", sa.String(length=128), nullable=True),
        sa.PrimaryKeyConstraint("host", name=op.f("pk_drained_host")),
    )
    create_table(
        "authority",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("certificate", BODY, nullable=False),
        sa.Column("sealed_key", SEALED, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_authority")),
    )


def _resync() -> None:
    create_table(
        "resync",
        sa.Column("load_balancer_id", sa.String(length=36), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("asked_by", sa.String(length=128), nullable=True),
        sa.Column("remove_unknown", sa.Boolean(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_resync")),
    )
    create_index("ix_resync_ended_at", "resync", ["ended_at"])


def _columns() -> None:
    add_column("amphora", sa.Column("image", sa.String(length=255), nullable=True))
    add_column("amphora", sa.Column("certificate_issued_at", sa.Double(), nullable=True))
    add_column("amphora", sa.Column("certificate_authority", sa.BigInteger(), nullable=True))
    add_column("amphora", sa.Column("trusts", sa.String(length=255), nullable=True))
    add_column("amphora", sa.Column("audited_at", sa.Double(), nullable=True))
    add_column("amphora", sa.Column("drift", sa.Text(), nullable=True))
    add_column("amphora", sa.Column("drifts", sa.Boolean(), nullable=True))
    add_column("amphora_seen", sa.Column("agent_version", sa.String(length=64), nullable=True))
    add_column("work", sa.Column("spare_pool", sa.String(length=36), nullable=True))
    add_column("work", sa.Column("spares", BODY, nullable=True))
    add_column("work", sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))


def _failovers() -> None:
    create_table(
        "failover",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("load_balancer_id", sa.String(length=36), nullable=False),
        sa.Column("amphora_id", sa.String(length=36), nullable=True),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("asked_by", sa.String(length=128), nullable=True),
        sa.Column("rotation_id", sa.BigInteger(), nullable=True),
        sa.Column("silent_since", sa.Double(), nullable=True),
        sa.Column("begun_at", sa.Double(), nullable=False),
        sa.Column("served_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_failover")),
    )
    create_index("ix_failover_load_balancer_id", "failover", ["load_balancer_id"])
    create_index("ix_failover_ended_at", "failover", ["ended_at"])
    create_index("ix_failover_begun_at", "failover", ["begun_at"])
    create_table(
        "failover_event",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("failover_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("word", sa.String(length=32), nullable=False),
        sa.Column("amphora_id", sa.String(length=36), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_failover_event")),
    )
    create_index("ix_failover_event_failover_id", "failover_event", ["failover_id"])


def _silence() -> None:
    create_table(
        "silence",
        sa.Column("amphora_id", sa.String(length=36), nullable=False),
        sa.Column("load_balancer_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("amphora_id", name=op.f("pk_silence")),
    )
    create_table(
        "zombie",
        sa.Column("amphora_id", sa.String(length=36), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("amphora_id", name=op.f("pk_zombie")),
    )
    create_table(
        "breaker",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("silent", sa.Integer(), nullable=False),
        sa.Column("watched", sa.Integer(), nullable=False),
        sa.Column("trial_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_breaker")),
    )


def _rotations() -> None:
    create_table(
        "rotation",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("wanted", BODY, nullable=False),
        sa.Column("max_unavailable", sa.Integer(), nullable=False),
        sa.Column("asked_by", sa.String(length=128), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rotation")),
    )
    create_table(
        "rotation_item",
        sa.Column("rotation_id", sa.BigInteger(), nullable=False),
        sa.Column("load_balancer_id", sa.String(length=36), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("amphorae", BODY, nullable=False),
        sa.Column("operating", sa.String(length=16), nullable=True),
        sa.Column("begun_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("rotation_id", "load_balancer_id", name=op.f("pk_rotation_item")),
    )


def downgrade() -> None:
    raise NotImplementedError("a schema is brought forward only; to go back, put the backup back")
