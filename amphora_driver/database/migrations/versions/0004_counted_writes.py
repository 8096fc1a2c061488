# SPDX-License-Identifier: Apache-2.0
"""Each write under a lease changes a value of the row in `work`."""

import sqlalchemy as sa

from amphora_driver.database.migrations.repeatable import add_column

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("work", sa.Column("writes", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    raise NotImplementedError("a schema is brought forward only; to go back, put the backup back")
