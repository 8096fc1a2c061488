# SPDX-License-Identifier: Apache-2.0
"""Initial schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import create_index, create_table

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(36)
SERVER_ID = sa.String(64)
BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
SEALED = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    create_table(
        "cluster_group",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("body", BODY, nullable=False),
        sa.Column("credential", SEALED, nullable=True),
        sa.Column("deleting", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(128), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("writes", sa.BigInteger(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("passed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster_group")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_cluster_group_project_id")),
    )
    create_index("ix_cluster_group_due_at", "cluster_group", ["due_at"])
    create_table(
        "cluster_node",
        sa.Column("group_id", ID, nullable=False),
        sa.Column("server_id", SERVER_ID, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("body", BODY, nullable=False),
        sa.PrimaryKeyConstraint("group_id", "server_id", name=op.f("pk_cluster_node")),
    )
    create_index("ix_cluster_node_server_id", "cluster_node", ["server_id"])
    create_table(
        "cluster_request",
        sa.Column("id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("body", BODY, nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("digest", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster_request")),
        sa.UniqueConstraint("group_id", "idempotency_key", name=op.f("uq_cluster_request_group_id")),
    )
    create_index("ix_cluster_request_group_id", "cluster_request", ["group_id", "ended_at"])
    create_index("ix_cluster_request_ended_at", "cluster_request", ["ended_at"])
    create_table(
        "cluster_event",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("server_id", SERVER_ID, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster_event")),
    )
    create_index("ix_cluster_event_group_id", "cluster_event", ["group_id", "id"])
    create_index("ix_cluster_event_at", "cluster_event", ["at"])
    create_table(
        "cluster_token",
        sa.Column("id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("digest", SEALED, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(128), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster_token")),
    )
    create_index("ix_cluster_token_group_id", "cluster_token", ["group_id"])
    create_table(
        "cluster_nonce",
        sa.Column("token_id", ID, nullable=False),
        sa.Column("nonce", sa.String(128), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "nonce", name=op.f("pk_cluster_nonce")),
    )
    create_index("ix_cluster_nonce_expires_at", "cluster_nonce", ["expires_at"])


def downgrade() -> None:
    raise NotImplementedError("a database schema can only be upgraded; for an older schema, restore a backup")
