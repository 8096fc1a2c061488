# SPDX-License-Identifier: Apache-2.0
"""Load balancers in the database for all cases; the case `graph` of the harness."""

import time

import sqlalchemy as sa
from adapter_heartbeats import GENERATION, heartbeat_key
from adapter_tree import tree

from amphora_driver.database import migrate, tables
from amphora_driver.database.engine import Database
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import amphorae, desired_objects


class Store:
    """Records as a controller leaves them: applied, confirmed, ACTIVE."""

    def db_setup(self, url):
        migrate.upgrade(url)
        self.url = url
        self.database = Database(url, durable=False)  # as in controller and health manager

    def db_add(self, specs):
        for spec in specs:
            self.database.write(lambda connection, spec=spec: self._record(connection, spec))

    def _record(self, connection, spec):
        whole = tree(spec)
        nodes = list(desired_objects.iter_subtree(whole))
        connection.execute(
            tables.job.insert().values(
                load_balancer_id=whole.id, project_id=whole.project_id, op="apply", generation=GENERATION,
                committed=GENERATION, applied=GENERATION, read_back=False, dirty=False,
            )
        )  # fmt: skip
        desired_objects.insert_objects(connection, whole.id, GENERATION, nodes)
        rows = [
            {
                "object_id": node.id, "kind": desired_objects.kind_of(node).value, "load_balancer_id": whole.id,
                "provisioning": "ACTIVE", "operating": "ONLINE", "since": time.time(), "version": 1, "reported": 1,
            }
            for node in nodes
        ]  # fmt: skip
        connection.execute(tables.object_status.insert(), rows)
        for one in spec["amphorae"]:
            sealed = self._vault.seal(heartbeat_key(one["id"]), amphorae.key_location(one["id"]))
            amphorae.insert_amphora(connection, one["id"], whole.id, one["role"], sealed)
            amphorae.update_amphora(
                connection, one["id"], state=AmphoraState.READY, confirmed=GENERATION, compute_id=one["compute_id"],
                management_address=one["lb_network_ip"], plugged=(), ready_at=time.time(),
            )  # fmt: skip

    def graph_load(self, lb_id):
        """Read all data that a controller reads for one job."""

        def read(connection):
            work = connection.execute(sa.select(tables.job).where(tables.job.c.load_balancer_id == lb_id)).one()
            return work, amphorae.load_amphorae(connection, lb_id), desired_objects.load_tree(connection, lb_id)

        return self.database.read(read)

    def sql_count(self, on):
        """Count statements without BEGIN, because only this provider sends it explicitly (SQLite)."""
        if on:
            self._counted = {"statements": 0, "commits": 0}

            def statement(_connection, _cursor, text, *_more):
                self._counted["statements"] += not text.startswith("BEGIN")

            def commit(_connection):
                self._counted["commits"] += 1

            # SQLAlchemy also notes a commit after a read in autocommit mode, for which MariaDB gets no COMMIT.
            self._listening = (
                *((engine, "before_cursor_execute", statement) for engine in self.database.engines),
                (self.database.engine, "commit", commit),
            )
            for listening in self._listening:
                sa.event.listen(*listening)
            return None
        for listening in self._listening:
            sa.event.remove(*listening)
        return self._counted
