# SPDX-License-Identifier: Apache-2.0
"""Create Neutron's tables from its models.

Usage: prepare_neutron.py --config-file FILE, in .sandbox/openstack-venv. The migrations create the same tables in a
minute instead of seconds.
"""

import sys

import sqlalchemy as sa
from neutron.common import config
from neutron.db.migration.models import head
from oslo_config import cfg
from oslo_db import options

options.set_defaults(cfg.CONF)
config.register_common_config_options()
config.init(sys.argv[1:])
engine = sa.create_engine(cfg.CONF.database.connection)
head.get_metadata().create_all(engine)
engine.dispose()
