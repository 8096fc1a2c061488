# SPDX-License-Identifier: Apache-2.0
"""A program with Octavia's own health manager before and after a take-over: its decisions, as JSON.

The arguments are the URL of Octavia's database and the id of a pair (`octavia_rows`). A process of its own, because the
import of Octavia's options patches the interpreter for eventlet.
"""

import json
import sys
import time
import warnings

warnings.simplefilter("ignore")

import sqlalchemy as sa  # noqa: E402
from octavia.amphorae.drivers.health import heartbeat_udp  # noqa: E402
from octavia.common import config  # noqa: E402
from octavia.db import api, repositories  # noqa: E402
from sqlalchemy import orm  # noqa: E402

from amphora_driver.adoption.octavia_tables import OctaviaDatabase  # noqa: E402


class Compute:
    """Records the machines that Octavia deletes."""

    def __init__(self):
        self.driver = self
        self.deleted = []

    def __call__(self, **_options):
        return self

    def delete(self, compute_id):
        self.deleted.append(compute_id)


def decide(amphora_ids, between=lambda: None):
    """The amphora that the health manager would replace, and the machines that it deletes at heartbeats.

    `between` runs between the two reads for a heartbeat.
    """
    compute = heartbeat_udp.stevedore_driver.DriverManager = Compute()
    session = api.get_session()
    session.begin()
    found = repositories.AmphoraHealthRepository().get_stale_amphora(session)
    stale = found and found.amphora_id
    session.rollback()
    updater = heartbeat_udp.UpdateHealthDb()
    get = updater.amphora_repo.get

    def get_later(*words, **more):
        between()
        return get(*words, **more)

    updater.amphora_repo.get = get_later
    for one in amphora_ids:
        updater.update_health({"id": one, "listeners": {}, "recv_time": time.time(), "ver": 3}, ("192.0.2.9", 1))
    return {"stale": stale, "deleted": compute.deleted}


def main(url, load_balancer_id):
    config.cfg.CONF([], project="octavia", default_config_files=[], default_config_dirs=[])
    engine = sa.create_engine(url)
    # octavia.db.api has options that SQLAlchemy refuses for SQLite.
    api.get_session = lambda: orm.Session(engine)
    octavia = OctaviaDatabase(url)
    before = octavia.read(load_balancer_id)
    ids = [one.id for one in before.amphorae]

    def write(statement):
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)

    first = decide([])
    write(f"UPDATE amphora SET status = 'DELETED' WHERE id = '{ids[1]}'")
    with_status = decide(ids[1:])
    write(f"UPDATE amphora SET status = 'ALLOCATED' WHERE id = '{ids[1]}'")
    write("UPDATE load_balancer SET provisioning_status = 'PENDING_UPDATE'")
    octavia.take_over(before, "haproxy")
    adopted = decide(ids)
    inserted = decide(ids[:1], lambda: octavia.insert_amphorae(before, "haproxy"))
    print(json.dumps([first, with_status, adopted, inserted]))  # noqa: T201 - the answer


main(*sys.argv[1:])
