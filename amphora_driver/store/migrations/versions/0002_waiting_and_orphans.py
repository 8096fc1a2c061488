# SPDX-License-Identifier: Apache-2.0
"""What is waited for without holding anything, what a VIP has besides its address, and who belongs to nobody."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql
revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb')


def upgrade() -> None:
    with op.batch_alter_table('amphora', schema=None) as batch_op:
        batch_op.add_column(sa.Column('booted_at', sa.Double(), nullable=True))
    with op.batch_alter_table('work', schema=None) as batch_op:
        batch_op.add_column(sa.Column('vip_applied', BODY, nullable=True))
    with op.batch_alter_table('vip_claim', schema=None) as batch_op:
        batch_op.add_column(sa.Column('project_id', sa.String(length=64), nullable=True))
        batch_op.add_column(sa.Column('wanted', BODY, nullable=True))
        batch_op.add_column(sa.Column('reason', sa.Text(), nullable=True))
    op.create_table('orphan',
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('backend', sa.String(length=64), nullable=False),
    sa.Column('id', sa.String(length=128), nullable=False),
    sa.Column('found_at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('kind', 'backend', 'id', name=op.f('pk_orphan'))
    )


def downgrade() -> None:
    raise NotImplementedError('a schema is brought forward only; to go back, put the backup back')
