# SPDX-License-Identifier: Apache-2.0
"""Adoptions of load balancers of Octavia's provider `amphora`."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import create_index, create_table

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    create_table(
        "adoption",
        sa.Column("load_balancer_id", sa.String(36), nullable=False),
        sa.Column("step", sa.String(16), nullable=False),
        *(sa.Column(name, sa.Boolean(), nullable=False) for name in ("vips_held", "reporting", "paused", "revert")),
        sa.Column("state", BODY, nullable=True),
        sa.Column("max_in_progress", sa.Integer(), nullable=False),
        sa.Column("remove_after", sa.Double(), nullable=False),
        sa.Column("asked_by", sa.String(128), nullable=True),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("asked_at", "step_at")),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("committed_at", "ended_at")),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_adoption")),
    )
    create_index("ix_adoption_ended_at", "adoption", ["ended_at"])
