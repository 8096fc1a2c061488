# SPDX-License-Identifier: Apache-2.0
"""Rolling upgrades: the minimum revision of processes."""

import sqlalchemy as sa
from alembic import op

from amphora_driver.database.migrations.repeatable import create_table

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_table(
        "cluster_schema_minimum",
        sa.Column("revision", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_cluster_schema_minimum")),
    )
