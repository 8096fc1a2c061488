# SPDX-License-Identifier: Apache-2.0
"""Waiting without a lease, VIP options, and orphans."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import add_column, create_table

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    add_column("amphora", sa.Column("booted_at", sa.Double(), nullable=True))
    add_column("amphora", sa.Column("confirmed_at", sa.Double(), nullable=True))
    add_column("work", sa.Column("vip_applied", BODY, nullable=True))
    add_column("work", sa.Column("left_out", BODY, nullable=True))
    add_column("vip_claim", sa.Column("project_id", sa.String(length=64), nullable=True))
    add_column("vip_claim", sa.Column("wanted", BODY, nullable=True))
    add_column("vip_claim", sa.Column("reason", sa.Text(), nullable=True))
    create_table(
        "orphan",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("found_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "backend", "id", name=op.f("pk_orphan")),
    )
    create_table(
        "local_qos_policy",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("egress_kbps", sa.BigInteger(), nullable=True),
        sa.Column("ingress_kbps", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_qos_policy")),
    )
    create_table(
        "local_security_group",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("rules", BODY, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_security_group")),
    )
    create_table(
        "local_vip_option",
        sa.Column("load_balancer_id", sa.String(length=36), nullable=False),
        sa.Column("qos_policy_id", sa.String(length=36), nullable=True),
        sa.Column("security_group_ids", BODY, nullable=False),
        sa.Column("port_ids", BODY, nullable=False),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_local_vip_option")),
    )


def downgrade() -> None:
    raise NotImplementedError("a schema is brought forward only; to go back, put the backup back")
