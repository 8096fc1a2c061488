# SPDX-License-Identifier: Apache-2.0
"""Indexed generated columns: jobs that wait for Octavia or do not serve; amphorae that are not ready."""

import sqlalchemy as sa
from alembic import op

from amphora_driver.database.migrations.repeatable import add_column, create_index

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# One column for each table: SQLAlchemy cannot read two generated columns that SQLite has added.
COLUMNS = {
    "job": ("exceptional", "committed < generation OR read_back OR op <> 'apply'"),
    "amphora": ("unready", "state <> 'ready'"),
}


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    create_index("ix_amphora_ready_at", "amphora", ["ready_at"])
    for table, (name, condition) in COLUMNS.items():
        # SQLite can add a virtual column only. The servers store the column.
        generated = sa.Computed(condition, persisted=dialect != "sqlite")
        add_column(table, sa.Column(name, sa.Boolean(), generated, nullable=True))
        create_index(f"ix_{table}_{name}", table, [name])
        if dialect == "postgresql":
            # Without statistics of the new column, PostgreSQL expects that half of the rows match, and reads all rows.
            op.execute(f"ANALYZE {table}")
