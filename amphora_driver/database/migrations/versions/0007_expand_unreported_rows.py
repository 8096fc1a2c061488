# SPDX-License-Identifier: Apache-2.0
"""Generated columns with an index: the rows with a version that Octavia has not received."""

import sqlalchemy as sa
from alembic import op

from amphora_driver.database.migrations.repeatable import add_column, create_index

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INDEXES = {"object_status": ["unreported"], "listener_statistics": ["unreported", "listener_id"]}


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, columns in INDEXES.items():
        # SQLite can add a virtual column only. The servers store the column.
        is_unreported = sa.Computed("version > reported", persisted=dialect != "sqlite")
        add_column(table, sa.Column("unreported", sa.Boolean(), is_unreported, nullable=True))
        create_index(f"ix_{table}_unreported", table, columns)
        if dialect == "postgresql":
            # Without statistics of the new column, PostgreSQL expects that half of the rows match, and reads all rows.
            op.execute(f"ANALYZE {table}")
