# SPDX-License-Identifier: Apache-2.0
"""Alembic's entry point: run the migrations on the given connection, inside its transaction."""

from alembic import context

from amphora_cluster.database.tables import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SCHEMA.metadata,
    version_table=SCHEMA.version_table,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
