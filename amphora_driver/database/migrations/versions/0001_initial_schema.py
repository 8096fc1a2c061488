# SPDX-License-Identifier: Apache-2.0
"""Initial schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import create_index, create_table

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Written from tables.py; a test compares the two.
    create_table('amphora',
    sa.Column('id', sa.String(length=36), nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('role', sa.String(length=16), nullable=False),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('compute_id', sa.String(length=128), nullable=True),
    sa.Column('management_address', sa.String(length=64), nullable=True),
    sa.Column('confirmed', sa.BigInteger(), nullable=False),
    sa.Column('heartbeat_key', sa.LargeBinary(), nullable=False),
    sa.Column('plugged', sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mariadb').with_variant(mysql.MEDIUMTEXT(), 'mysql'), nullable=True),
    sa.Column('partners', sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb'), nullable=True),
    sa.Column('handed_over', sa.Boolean(), nullable=False),
    sa.Column('drains_until', sa.Double(), nullable=True),
    sa.Column('certificate_expires_at', sa.Double(), nullable=True),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.Column('ready_at', sa.Double(), nullable=True),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_amphora'))
    )
    create_index('ix_amphora_load_balancer_id', 'amphora', ['load_balancer_id'])

    create_table('amphora_seen',
    sa.Column('amphora_id', sa.String(length=36), nullable=False),
    sa.Column('seen_at', sa.Double(), nullable=False),
    sa.Column('generation', sa.BigInteger(), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.Column('sequence', sa.BigInteger(), nullable=False),
    sa.Column('holds_vip', sa.Boolean(), nullable=True),
    sa.PrimaryKeyConstraint('amphora_id', name=op.f('pk_amphora_seen'))
    )
    create_table('duty',
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('owner', sa.String(length=128), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.Column('leased_until', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_duty'))
    )
    create_table('listener_statistics',
    sa.Column('listener_id', sa.String(length=36), nullable=False),
    sa.Column('amphora_id', sa.String(length=36), nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('active_connections', sa.BigInteger(), nullable=False),
    sa.Column('bytes_in', sa.BigInteger(), nullable=False),
    sa.Column('bytes_out', sa.BigInteger(), nullable=False),
    sa.Column('request_errors', sa.BigInteger(), nullable=False),
    sa.Column('total_connections', sa.BigInteger(), nullable=False),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('reported', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('listener_id', 'amphora_id', name=op.f('pk_listener_statistics'))
    )
    create_index('ix_listener_statistics_load_balancer_id', 'listener_statistics', ['load_balancer_id'])

    create_table('local_network',
    sa.Column('id', sa.String(length=36), nullable=False),
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('bridge', sa.String(length=15), nullable=False),
    sa.Column('mtu', sa.Integer(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_local_network')),
    sa.UniqueConstraint('bridge', name=op.f('uq_local_network_bridge')),
    sa.UniqueConstraint('name', name=op.f('uq_local_network_name'))
    )
    create_table('request',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('generation', sa.BigInteger(), nullable=False),
    sa.Column('action', sa.String(length=32), nullable=False),
    sa.Column('object_id', sa.String(length=36), nullable=False),
    sa.Column('accepted_at', sa.Double(), nullable=False),
    sa.Column('applied_at', sa.Double(), nullable=True),
    sa.Column('outcome', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_request'))
    )
    create_index('ix_request_load_balancer_id', 'request', ['load_balancer_id', 'generation'])

    create_table('secret',
    sa.Column('object_id', sa.String(length=36), nullable=False),
    sa.Column('purpose', sa.String(length=16), nullable=False),
    sa.Column('ref', sa.String(length=255), nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('sealed', sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), 'mysql', 'mariadb'), nullable=True),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('object_id', 'purpose', 'ref', name='pk_secret')
    )
    create_index('ix_secret_load_balancer_id', 'secret', ['load_balancer_id'])

    create_table('status',
    sa.Column('object_id', sa.String(length=36), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('provisioning', sa.String(length=16), nullable=True),
    sa.Column('operating', sa.String(length=16), nullable=True),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.Column('since', sa.Double(), nullable=False),
    sa.Column('pending', sa.BigInteger(), nullable=True),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('settled', sa.BigInteger(), nullable=False),
    sa.Column('reported', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('object_id', name=op.f('pk_status'))
    )
    create_index('ix_status_load_balancer_id', 'status', ['load_balancer_id'])

    create_table('vip_claim',
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('network', sa.String(length=64), nullable=True),
    sa.Column('claimed_at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('load_balancer_id', name=op.f('pk_vip_claim'))
    )
    create_table('wanted_object',
    sa.Column('id', sa.String(length=36), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('parent_id', sa.String(length=36), nullable=True),
    sa.Column('refers_to', sa.String(length=36), nullable=True),
    sa.Column('created', sa.BigInteger(), nullable=False),
    sa.Column('generation', sa.BigInteger(), nullable=False),
    sa.Column('removed', sa.Boolean(), nullable=False),
    sa.Column('body', sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mariadb').with_variant(mysql.MEDIUMTEXT(), 'mysql'), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_wanted_object'))
    )
    create_index('ix_wanted_object_load_balancer_id', 'wanted_object', ['load_balancer_id'])
    create_index('ix_wanted_object_parent_id', 'wanted_object', ['parent_id'])
    create_index('ix_wanted_object_refers_to', 'wanted_object', ['refers_to'])

    create_table('work',
    sa.Column('load_balancer_id', sa.String(length=36), nullable=False),
    sa.Column('project_id', sa.String(length=64), nullable=True),
    sa.Column('topology', sa.String(length=32), nullable=False),
    sa.Column('compute', sa.String(length=64), nullable=True),
    sa.Column('network', sa.String(length=64), nullable=True),
    sa.Column('op', sa.String(length=16), nullable=False),
    sa.Column('generation', sa.BigInteger(), nullable=False),
    sa.Column('committed', sa.BigInteger(), nullable=False),
    sa.Column('applied', sa.BigInteger(), nullable=False),
    sa.Column('read_back', sa.Boolean(), nullable=False),
    sa.Column('reread', sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb'), nullable=True),
    sa.Column('dirty', sa.Boolean(), nullable=False),
    sa.Column('tickets', sa.BigInteger(), nullable=True),
    sa.Column('tickets_due', sa.Double(), nullable=True),
    sa.Column('owner', sa.String(length=128), nullable=True),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.Column('leased_until', sa.Double(), nullable=True),
    sa.Column('free_at', sa.Double(), nullable=False),
    sa.Column('attempts', sa.Integer(), nullable=False),
    sa.Column('error', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('load_balancer_id', name=op.f('pk_work'))
    )
    create_index('ix_work_dirty_free_at', 'work', ['dirty', 'free_at'])

    create_table('local_port',
    sa.Column('id', sa.String(length=36), nullable=False),
    sa.Column('network_id', sa.String(length=36), nullable=False),
    sa.Column('owner', sa.String(length=64), nullable=False),
    sa.Column('mac', sa.String(length=17), nullable=False),
    sa.Column('ours', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['network_id'], ['local_network.id'], name=op.f('fk_local_port_network_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_local_port')),
    sa.UniqueConstraint('mac', name=op.f('uq_local_port_mac')),
    sa.UniqueConstraint('owner', 'network_id', name='uq_local_port_owner_network')
    )
    create_table('local_subnet',
    sa.Column('id', sa.String(length=36), nullable=False),
    sa.Column('network_id', sa.String(length=36), nullable=False),
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('cidr', sa.String(length=64), nullable=False),
    sa.Column('gateway', sa.String(length=64), nullable=True),
    sa.Column('first_address', sa.String(length=64), nullable=False),
    sa.Column('last_address', sa.String(length=64), nullable=False),
    sa.ForeignKeyConstraint(['network_id'], ['local_network.id'], name=op.f('fk_local_subnet_network_id'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_local_subnet'))
    )
    create_table('local_address',
    sa.Column('subnet_id', sa.String(length=36), nullable=False),
    sa.Column('address', sa.String(length=64), nullable=False),
    sa.Column('port_id', sa.String(length=36), nullable=False),
    sa.Column('ordinal', sa.Integer(), nullable=False),
    sa.ForeignKeyConstraint(['port_id'], ['local_port.id'], name=op.f('fk_local_address_port_id'), ondelete='CASCADE'),
    sa.ForeignKeyConstraint(['subnet_id'], ['local_subnet.id'], name=op.f('fk_local_address_subnet_id')),
    sa.PrimaryKeyConstraint('subnet_id', 'address', name=op.f('pk_local_address'))
    )
    create_index('ix_local_address_port_id', 'local_address', ['port_id'])



def downgrade() -> None:
    # Written from tables.py; a test compares the two.
    with op.batch_alter_table('local_address', schema=None) as batch_op:
        batch_op.drop_index('ix_local_address_port_id')

    op.drop_table('local_address')
    op.drop_table('local_subnet')
    op.drop_table('local_port')
    with op.batch_alter_table('work', schema=None) as batch_op:
        batch_op.drop_index('ix_work_dirty_free_at')

    op.drop_table('work')
    with op.batch_alter_table('wanted_object', schema=None) as batch_op:
        batch_op.drop_index('ix_wanted_object_refers_to')
        batch_op.drop_index('ix_wanted_object_parent_id')
        batch_op.drop_index('ix_wanted_object_load_balancer_id')

    op.drop_table('wanted_object')
    op.drop_table('vip_claim')
    with op.batch_alter_table('status', schema=None) as batch_op:
        batch_op.drop_index('ix_status_load_balancer_id')

    op.drop_table('status')
    with op.batch_alter_table('secret', schema=None) as batch_op:
        batch_op.drop_index('ix_secret_load_balancer_id')

    op.drop_table('secret')
    with op.batch_alter_table('request', schema=None) as batch_op:
        batch_op.drop_index('ix_request_load_balancer_id')

    op.drop_table('request')
    op.drop_table('local_network')
    with op.batch_alter_table('listener_statistics', schema=None) as batch_op:
        batch_op.drop_index('ix_listener_statistics_load_balancer_id')

    op.drop_table('listener_statistics')
    op.drop_table('duty')
    op.drop_table('amphora_seen')
    with op.batch_alter_table('amphora', schema=None) as batch_op:
        batch_op.drop_index('ix_amphora_load_balancer_id')

    op.drop_table('amphora')
