# SPDX-License-Identifier: Apache-2.0
"""Rolling upgrades: the controllers, with the newest migration that each knows."""

import sqlalchemy as sa
from alembic import op

from amphora_driver.database.migrations.repeatable import create_table

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_table(
        "cluster_process",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_cluster_process")),
    )
