# SPDX-License-Identifier: Apache-2.0
"""Create the tables of Placement, Glance and Nova, and Nova's cells: prepare_services.py NOVA-FILE.

Standard input is a JSON object: the database URLs by service, and the names of the compute hosts. Runs in the
environment of the services. One process creates all tables from the models: the migrations create the same tables in
minutes instead of seconds.
"""

import json
import sys
import uuid

import sqlalchemy as sa
from glance.db.sqlalchemy import models as glance
from glance.db.sqlalchemy import models_metadef
from nova import config, context, objects
from nova.conf import CONF
from nova.db.api import models as nova_api
from nova.db.main import models as nova_main
from placement.db.sqlalchemy import models as placement

told = json.load(sys.stdin)
for table in nova_main.BASE.metadata.tables.values():
    for index in table.indexes:
        # An index of several long texts is too long for MariaDB. The migrations index the first characters only.
        texts = [column.name for column in index.columns if getattr(column.type, "length", None) == 255]
        if len(texts) > 2:
            index.dialect_options["mysql"]["length"] = dict.fromkeys(texts, 100)
for name, metadata in (
    ("placement", [placement.BASE.metadata]),
    ("glance", [glance.BASE.metadata, models_metadef.BASE_DICT.metadata]),
    ("nova_api", [nova_api.BASE.metadata]),
    ("nova", [nova_main.BASE.metadata]),
    ("nova_cell0", [nova_main.BASE.metadata]),
):
    engine = sa.create_engine(told["databases"][name])
    for one in metadata:
        one.create_all(engine)
    engine.dispose()

config.parse_args(["nova-manage", "--config-file", sys.argv[1]])
objects.register_all()
admin = context.get_admin_context()
cells = {
    # As `nova-manage cell_v2 map_cell0` and `create_cell`: cell0 has the servers that no host takes.
    objects.CellMapping.CELL0_UUID: ("cell0", "none:///", "nova_cell0"),
    str(uuid.uuid4()): ("cell1", CONF.transport_url, "nova"),
}
for cell_id, (name, transport, database) in cells.items():
    cell = objects.CellMapping(
        admin, uuid=cell_id, name=name, transport_url=transport, database_connection=told["databases"][database]
    )
    cell.create()
for host in told["hosts"]:
    # Otherwise `nova-manage cell_v2 discover_hosts` would have to run after the start of nova-compute.
    objects.HostMapping(admin, host=host, cell_mapping=cell).create()
