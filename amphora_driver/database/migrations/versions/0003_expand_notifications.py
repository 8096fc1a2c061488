# SPDX-License-Identifier: Apache-2.0
"""Notifications for other OpenStack services."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import create_index, create_table

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ID = sa.String(36)
BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    create_table(
        "notification",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("message_id", ID, nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("payload", BODY, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notification")),
    )
    create_index("ix_notification_load_balancer_id", "notification", ["load_balancer_id"])
    create_index("ix_notification_ready_at", "notification", ["ready_at"])
