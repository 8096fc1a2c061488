# SPDX-License-Identifier: Apache-2.0
"""Expiry of users' certificates, and amphorae near a limit."""

import sqlalchemy as sa

from amphora_driver.database.migrations.repeatable import add_column, create_index

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("secret", sa.Column("expires_at", sa.Double, nullable=True))
    create_index("ix_secret_expires_at", "secret", ["expires_at"])
    add_column("amphora", sa.Column("near_limit", sa.String(128), nullable=True))
