# SPDX-License-Identifier: Apache-2.0
"""Rolling upgrades: the minimum revision of processes, and the revision that each process knows."""

import sqlalchemy as sa
from alembic import op

from amphora_driver.database.migrations.repeatable import add_column, create_table

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_table(
        "schema_minimum",
        sa.Column("revision", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_schema_minimum")),
    )
    add_column("process", sa.Column("schema_revision", sa.String(32), nullable=True))
