# SPDX-License-Identifier: Apache-2.0
"""Alembic's entry: runs migrations on the connection it is handed, inside that connection's transaction."""

from alembic import context

from amphora_driver.database.tables_fleet import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
