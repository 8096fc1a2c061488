# SPDX-License-Identifier: Apache-2.0
"""Hypervisor and availability zone of amphorae."""

import sqlalchemy as sa

from amphora_driver.database.migrations.repeatable import add_column

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("amphora", sa.Column("host", sa.String(255), nullable=True))
    add_column("amphora", sa.Column("zone", sa.String(255), nullable=True))
