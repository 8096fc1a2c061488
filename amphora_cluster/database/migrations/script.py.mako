# SPDX-License-Identifier: Apache-2.0
"""${message}."""

import sqlalchemy as sa
from alembic import op

# Each step can be repeated. The file name is NNNN_expand_NAME.py or NNNN_contract_NAME.py (decision record 0026).
from amphora_driver.database.migrations.repeatable import add_column, create_index, create_table
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    raise NotImplementedError('a schema is brought forward only; to go back, put the backup back')
